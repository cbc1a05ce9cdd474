"""Show results: as text for a model and as JSON for machines. Loaded when the first result is shown.

Text from the guest is indented and our own is not, so that nothing a guest prints reads as a line of Ringfence (J14).
"""

from __future__ import annotations

from ringfence.text import encodable, printable
from ringfence.values import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.results import Denial, Result
    from ringfence.values import Json

_JSON_BYTES = 8 * 1024 * 1024
_JSON_DEPTH = 100
_JSON_VALUES = 1_000_000  # counted by separators: an empty list has two bytes, and takes 64 in our memory
_MESSAGE_CHARS = 500
_MOST_DENIALS = 12  # lines about denials
_DENIALS_SHARE = 4  # denials may take a fourth of the text
_DENIAL_CHARS = 200
_ALLOW_CHARS = 150
_SHORT_CHARS = 50  # text up to this length is never cut
_METADATA = ("net.metadata-address", "net.private-address", "net.bad-address")
_WORST_FIRST = ("mount.", "workspace.", "secret.", *_METADATA, "tool.", "exec.", "net.denied")

_CAUSES = {
    "done": "ended",
    "exit": "ended with an error",
    "exception": "raised an exception",
    "compile": "did not compile; nothing ran",
    "signal": "died of a signal",
    "not-found": "no such program inside",
    "not-executable": "the program may not be run",
    "wall-clock": "ran out of time",
    "memory": "ran out of memory",
    "cpu-time": "used up its CPU time",
    "caller": "was killed by the caller",
    "interrupted": "was interrupted",
    "protection-lost": "was stopped by Ringfence: a protected path was replaced or removed from outside",
    "guest-lost": "took its own supervisor down; nothing that it said is believed",
}


def headline(result: Result) -> str:
    """Return one line of our own: status, reason, and how the run ended."""
    parts = [_CAUSES[result.reason]]
    if result.exit_code:
        parts.append(f"exit code {result.exit_code}")
    if result.signal:
        parts.append(f"signal {result.signal}")
    parts.append(f"{result.duration_s:.2f} s")
    return f"{result.status}: {', '.join(parts)}"


def failure(result: Result) -> str:
    """Return the message of the GuestError for `result`."""
    said = ""
    if result.exception is not None:
        said = f"{result.exception.name}: {result.exception.message}"
    elif result.stderr_bytes:
        said = result.stderr.strip().rpartition("\n")[2]
    return headline(result) + (f"; the guest said: {printable(said, _MESSAGE_CHARS)}" if said else "")


def render(result: Result, max_chars: int) -> str:
    """Return at most `max_chars` characters: the most important first, each section cut in its middle.

    The guest chooses how much is denied, so denials have a share like every section (O24).
    """
    head = [headline(result), *_denial_lines(result.denials, max_chars // _DENIALS_SHARE)]
    if result.truncated:
        head.append("note: output over the limit was dropped from its middle")
    if not result.state_kept:
        head.append("note: the session's state is gone; the next run starts a new one")
    sections = [(name, text) for name, text in _sections(result) if text]
    out = "\n".join(head)
    room = max_chars - len(out)
    for index, (name, text) in enumerate(sections):
        share = room // (len(sections) - index)
        block = f"\n{name}:\n" + _ends(_indent(text), share - len(name) - 3)
        out += block
        room -= len(block)
    return _ends(out, max_chars)


def _sections(result: Result) -> list[tuple[str, str]]:
    exception = result.exception
    said = "" if exception is None else exception.traceback or f"{exception.name}: {exception.message}"
    shown = [f"{', '.join(sorted(output.data))}" for output in result.outputs if not output.is_value]
    return [
        ("value", result.value or ""),
        ("exception", said),
        ("stdout", result.stdout),
        ("stderr", result.stderr.removesuffix(said) if said else result.stderr),  # the traceback is shown once
        ("displayed", "\n".join(shown)),
    ]


def _denial_lines(denials: tuple[Denial, ...], room: int) -> list[str]:
    """Return lines about denials, together no longer than `room`, each with a part of the room.

    At least two denials are shown, the worst and the last. One more line counts the denials that are left out.
    """
    most = _MOST_DENIALS
    while True:
        lines = [_denial_line(denial, alike, room // 4) for denial, alike in telling(denials, most)]
        size = sum(map(len, lines))
        if size <= room or most == 2:
            break
        most = max(2, min(most - 1, len(lines) * room // size))
    if len(lines) < len(denials):
        lines.append(f"note: and {len(denials) - len(lines)} more denials, see result.denials")
    return lines


def _denial_line(denial: Denial, alike: int, size: int) -> str:
    times = f" ({denial.count} times)" if denial.count > 1 else ""
    others = f"; and {alike} more like it" if alike else ""
    allow = denial.allow or ""
    # The whole line or none: a part of it would be another line of the policy.
    how = f"; to allow it: {allow}" if allow and len(allow) <= min(max(size, _SHORT_CHARS), _ALLOW_CHARS) else ""
    message = _middle_out(denial.message, min(max(size, _SHORT_CHARS), _DENIAL_CHARS))
    return printable(f"{word_of(denial)}: {message}{times}{others}{how}")


def word_of(denial: Denial) -> str:
    """Return "found" for what a look at the writable mounts showed after the run, else "denied".

    What was found afterwards was not prevented, so "denied" would be untrue.
    """
    return "found" if denial.code.startswith("mount.") else "denied"


def telling(denials: tuple[Denial, ...], most: int) -> list[tuple[Denial, int]]:
    """Return at most `most` denials in order, each with the number of similar denials that it stands for.

    Denials are alike when they are for hosts of one domain, by one rule. When there are more groups than `most`, half
    of the result are the most severe and the rarest groups, and the rest the last: a guest that wants a denial not to
    be seen makes many others (O24).
    """
    if len(denials) <= most:
        return [(denial, 0) for denial in denials]
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, denial in enumerate(denials):
        groups.setdefault(_likeness(denial), []).append(index)
    severe = sorted(groups.values(), key=lambda group: (_severity(denials[group[-1]]), len(group), group[0]))
    chosen = severe[: (most + 1) // 2]
    last = sorted((group for group in groups.values() if group not in chosen), key=lambda group: group[-1])
    chosen += last[max(len(last) - (most - len(chosen)), 0) :]
    return [(denials[group[-1]], len(group) - 1) for group in sorted(chosen, key=lambda group: group[-1])]


def _likeness(denial: Denial) -> tuple[str, ...]:
    if denial.kind not in ("network", "secret"):
        return (denial.kind, denial.code, denial.target)
    host, _, port = denial.target.partition(":") if "[" not in denial.target else (denial.target, "", "")
    labels = host.split(".")
    domain = labels[:2] if labels[-1].isdigit() else labels[-2:]  # for an address, its network
    return (denial.kind, denial.code, ".".join(domain), port)


def _severity(denial: Denial) -> int:
    """Return a number that is less for a worse denial.

    The worst are the count of denials that are not listed, and what happened to files of the host.
    """
    if denial.target == "(others)":
        return 0
    for number, start in enumerate(_WORST_FIRST, 1):
        if denial.code.startswith(start):
            return number
    return len(_WORST_FIRST) + 1


def _middle_out(text: str, size: int) -> str:
    half = (size - 1) // 2
    return text if len(text) <= size else f"{text[:half]}…{text[len(text) - half :]}"


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in encodable(text).splitlines())


def _ends(text: str, size: int) -> str:
    if len(text) <= size:
        return text
    mark = f"\n[… {len(text) - size} characters left out …]\n"
    if size <= len(mark) + 2:
        return text[: max(size, 0)]
    # The second half starts inside a line of the guest; the indent keeps it from looking like a line of our own.
    half = (size - len(mark) - 2) // 2
    return text[:half] + mark + "  " + text[len(text) - half :]


def to_dict(value: Struct) -> dict[str, Json]:
    """Return every field under the field's name; for a Result, also the properties."""
    from ringfence.results import Output, Result

    found = {name: _json(getattr(value, name)) for name in type(value).__fields__}
    if isinstance(value, Result):
        derived: dict[str, Json] = {"ok": value.ok, "stdout": value.stdout, "stderr": value.stderr}
        return found | derived | {"value": value.value}
    if isinstance(value, Output):
        return found | {"text": value.text}
    return found


def _json(value: object) -> Json:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        from base64 import b64encode

        return b64encode(value).decode("ascii")
    if isinstance(value, Struct):
        return to_dict(value)
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_json(item) for item in value]
    from datetime import datetime

    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def parse_json(data: bytes) -> Json:
    """Return JSON from a guest, parsed with caps on size, depth and numbers (F20). Return None for anything else."""
    if len(data) > _JSON_BYTES or sum(data.count(mark) for mark in (b",", b"[", b"{")) > _JSON_VALUES:
        return None
    import json

    try:
        found: Json = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return found if _within_depth(found) else None


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _within_depth(found: Json) -> bool:
    level = [found]
    for _ in range(_JSON_DEPTH + 1):
        below: list[Json] = []
        for item in level:
            if isinstance(item, list):
                below.extend(item)
            elif isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, float) and item - item != 0:  # 1e999 parses as infinity
                return False
        if not below:
            return True
        level = below
    return False
