"""Parses the replies of file workers. A guest can forge these: each field is checked and chooses a sentence at most."""

from __future__ import annotations

import errno
import os

from ringfence.errors import SandboxError
from ringfence.events import FileEvent
from ringfence.records import FileInfo, Match
from ringfence.text import in_quotes
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAX_LINE = 1 << 18
_SHOWN = 200
_EVENTS = ("create", "write", "remove", "rename", "chmod", "overflow")

# The meaning of each word of `shared.tar.Refused`. A word that is not in this table is not shown.
_WHY = {
    "absolute": "its name is an absolute path",
    "dot-dot": "its name holds '..'",
    "name": "its name is empty, too long or of another system",
    "device": "it is a device or a pipe",
    "special": "it is a device, a pipe or a socket; remove it or transfer other folders",
    "link-leaves": "it is a link that leads out of the folder",
    "hard-link": "it is a hard link",
    "through": "another entry of that name is no folder",
    "twice": "two entries have its name",
    "changed": "it changed while it was read",
    "bytes": "there are more bytes than limits.disk allows for",
    "files": "there are more entries than limits.disk_files allows for",
    "bomb": "it unpacks to more bytes than it says",
    "damaged": "its bytes do not match its checksum",
    "overlap": "its bytes overlap another entry's",
    "mismatch": "its two headers differ",
    "encrypted": "it is encrypted",
    "method": "it is packed by another method than deflate",
    "sparse": "it is a sparse entry",
    "type": "it is of an unknown type",
    "size": "its size is impossible",
    "number": "a number in its header is malformed",
    "header": "its header is empty or too long",
    "headers": "it has too many headers",
    "global": "a header of all entries gives one of them a name or a size",
    "globals": "its headers of all entries are too large together",
    "pax": "its extended header is malformed",
    "two-names": "it has two names",
    "not-text": "its name is no text, which a zip cannot hold; use a tar",
    "not-tar": "this is no tar archive (compressed ones are unpacked before)",
    "not-zip": "this is no zip archive, or one with something around it",
    "cut-short": "it ends too early",
    "after-the-end": "something follows its end",
}
TOO_LONG_TO_READ = "the file is too large to be read as a whole: read parts of it by offset and size, or use chunks()"
_WHOLE = ("not-tar", "not-zip", "cut-short", "after-the-end")


def refusal(why: str, name: str, path: str) -> OSError:
    """Return the error for an archive or tree that was refused. An unknown `why` is never shown."""
    reason = _WHY.get(why, "it was refused")
    if why in ("bytes", "files"):
        return OSError(errno.EFBIG, f"too much to transfer: {reason}", path)
    about = "the archive" if why in _WHOLE or not name else in_quotes(name, _SHOWN)
    return OSError(errno.EINVAL, f"refused, nothing was written: {about}: {reason}", path)


def refused(found: Mapping[str, object], path: str) -> OSError:
    name = found.get("path")
    return refusal(str(found.get("refused")), name if isinstance(name, str) else "", path)


def explained(number: int, found: Mapping[str, object], path: str, *, call: str) -> str:
    """Return the kernel's own words, with the inner path that failed, if any."""
    inner = found.get("path")
    if number == errno.EFBIG:
        if call == "read":
            return TOO_LONG_TO_READ
        return "a file would be larger than limits.disk; write less, or raise the limit"
    words = os.strerror(number)
    if isinstance(inner, str) and inner and not _same(inner, path):
        return f"{words}: {in_quotes(inner, _SHOWN)}"
    return words


def _same(inner: str, path: str) -> bool:
    return inner in (path, f"/workspace/{path}")


class Lines:
    """Cuts a worker's output into JSON objects. Blank lines are heartbeats."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[dict[str, object]]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise _forged("broke its format: a line without an end")
        for line in lines:
            if line:
                yield _object(line)


def _forged(what: str) -> SandboxError:
    """Return the error for a reply that no worker of ours gives."""
    return SandboxError(
        f"the file worker {what}",
        fix="try once more; if it happens again, close the sandbox: its guest ended or imitated the worker",
    )


def _object(line: bytes) -> dict[str, object]:
    try:
        data = frames.strict_json(line)
    except frames.WireError as error:
        raise _forged(f"broke its format: {error}") from None
    if not isinstance(data, dict):
        raise _forged("broke its format: not an object")
    return data


def info(data: object, path: str) -> FileInfo:
    """Return an entry as the worker reported it. Raises SandboxError for anything else."""
    from datetime import UTC, datetime

    if not isinstance(data, dict):
        raise _forged("gave no answer")
    reported, kind, size, mode = data.get("path"), data.get("kind"), data.get("size"), data.get("mode")
    modified, target = data.get("modified"), data.get("target")
    if not isinstance(reported, str) or kind not in ("file", "directory", "symlink", "other"):
        raise _forged("answered with something else than a file")
    if type(size) is not int or type(mode) is not int or not isinstance(modified, int | float):
        raise _forged("answered with something else than numbers")
    stamp = datetime.fromtimestamp(min(max(modified, 0), 253402300799), UTC)
    link = target if isinstance(target, str) else None
    return FileInfo(path or reported, kind, size, mode, stamp, link)


def match(data: Mapping[str, object]) -> Match:
    path, line, text = data.get("path"), data.get("line"), data.get("text")
    if not isinstance(path, str) or type(line) is not int or not isinstance(text, str):
        raise _forged("answered with something else than a match")
    return Match(path, line, text)


def event(data: Mapping[str, object]) -> FileEvent:
    kind, path, source = data.get("kind"), data.get("path"), data.get("source")
    if kind not in _EVENTS or not isinstance(path, str) or not isinstance(source, str | None):
        raise _forged("answered with something else than an event")
    return FileEvent(kind, path, source)  # type: ignore[arg-type]  # one of the words above


def numbers(data: Mapping[str, object], *names: str) -> list[int]:
    found = [data.get(name) for name in names]
    if not all(type(number) is int and number >= 0 for number in found):
        raise _forged("gave no answer")
    return found  # type: ignore[return-value]  # checked above
