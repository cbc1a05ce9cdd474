"""Host functions that guest code may call: names from a table, arguments and results as JSON, caps on everything.

The guest's message selects a name and nothing else. When a function raises, the guest learns that it failed and the
type of the exception, but not its text, which may hold secrets.
"""

from __future__ import annotations

import keyword

from ringfence.errors import PolicyError
from ringfence.results import Denial
from ringfence.text import printable
from ringfence.values import Struct, final, replace
from ringfence.wire import frames, line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.values import Tool

MAX_ARGUMENTS = 1 << 20
MAX_RESULT = 1 << 20
MAX_WAITING = 1 << 24  # bytes of arguments of all calls of a cell that wait for their turn
MAX_CALLS = 1000  # in one cell
DEADLINE_S = 30.0
LOOK_S = 0.05  # how often the host checks during a call of a tool whether the cell still runs
CELL_OVER = "its cell is over"
_NOT_JSON = "its arguments are not JSON"
_MAX_TOOLS = 100
_FIRST = MAX_CALLS  # how many denials with different names are listed from the first on
_LAST = 100  # how many of the last denials are listed
_OTHERS = "(others)"  # the target of all denials between, counted together
_SHOWN = 100  # characters of a name from the guest
_UNKNOWN = "no tool of this name is offered"


def check_tools(tools: object) -> dict[str, Tool]:
    """Return a table of functions, checked."""
    if tools is None:
        return {}
    if not isinstance(tools, dict):
        raise TypeError(f"tools is a dict of names and functions, not {type(tools).__name__}")
    if len(tools) > _MAX_TOOLS:
        raise PolicyError(f"{len(tools)} tools; the most is {_MAX_TOOLS}", key="tools", fix="offer fewer")
    for name, tool in tools.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise PolicyError(f"{name!r} is no name for a tool", key="tools", fix="a Python name, such as lookup")
        if not callable(tool):
            raise TypeError(f"tool {name} is a {type(tool).__name__}, not a function")
    return dict(tools)


@final
class Asked(Struct):
    """A call that waits for a turn. `refused`: why the call is not made; then the arguments are not kept."""

    id: object
    name: str
    data: bytes
    refused: str | None


class Budget:
    """The calls that one cell may still make, and the denials of calls that were refused."""

    def __init__(self) -> None:
        self._calls = 0
        self._waiting = 0  # bytes of arguments
        self._first: dict[tuple[str, str], Denial] = {}
        self._last: dict[tuple[str, str], Denial] = {}
        self._others: dict[str, Denial] = {}  # by code

    def take(self, said: line.Said, tools: Mapping[str, Tool]) -> Asked:
        """Decide about a call on arrival, not at its turn. The cell may end before, and every attempt is reported."""
        self._calls += 1
        name = str(said.fields["name"])
        refused = self._refusal(name, len(said.data), tools)
        if refused is None:
            self._waiting += len(said.data)
            return Asked(said.fields["id"], name, said.data, None)
        code, why, for_guest = refused
        self.deny(name, code, why)
        return Asked(said.fields["id"], name[:_SHOWN], b"", for_guest)

    def begin(self, asked: Asked) -> None:
        """Count a call whose turn has come as no longer waiting."""
        self._waiting -= len(asked.data)

    def _refusal(self, name: str, size: int, tools: Mapping[str, Tool]) -> tuple[str, str, str] | None:
        """Return code and reason for the caller, and the reason for the guest; None for a call that is allowed."""
        if name not in tools:
            return "tool.unknown", _UNKNOWN, _UNKNOWN
        if self._calls > MAX_CALLS:
            return "tool.budget", f"a cell may make {MAX_CALLS} calls", f"more than {MAX_CALLS} calls in one cell"
        if size > MAX_ARGUMENTS:
            most = f"{MAX_ARGUMENTS} bytes"
            return "tool.arguments", f"arguments may be {most}", f"arguments of more than {most}"
        if self._waiting + size > MAX_WAITING:
            # While a guest takes no answers its calls wait on the host; it chooses how many and how long they are.
            most = f"{MAX_WAITING} bytes"
            return (
                "tool.arguments",
                f"arguments of calls that wait may be {most} together",
                f"arguments of more than {most} wait for their turn",
            )
        return None

    def deny(self, name: str, code: str, why: str) -> None:
        """Record a refused call. Equal denials are one denial with a count.

        The first and the last denials are listed and the others counted: a flood of names hides neither what came
        before it nor what comes after it (O23).
        """
        shown = _shown(name)
        key = (shown, code)
        if key in self._first:
            self._first[key] = _once_more(self._first[key])
            return
        if len(self._first) < _FIRST:
            self._first[key] = Denial("tool", shown, code, f"{shown}: {why}", allow=None)
            return
        again = self._last.pop(key, None)
        new = Denial("tool", shown, code, f"{shown}: {why}", allow=None)
        self._last[key] = new if again is None else _once_more(again)
        if len(self._last) > _LAST:
            self._drop(self._last.pop(next(iter(self._last))))

    def _drop(self, denial: Denial) -> None:
        """Remove a denial from the list and count it as not listed."""
        code = denial.code
        words = f"calls of other names than the first {_FIRST} and the last {_LAST} that were refused ({code})"
        counted = self._others.get(code) or Denial(
            "tool", _OTHERS, code, words, allow=None, count=0, first_at=denial.first_at
        )
        self._others[code] = replace(counted, count=counted.count + denial.count)

    @property
    def denials(self) -> tuple[Denial, ...]:
        return (*self._first.values(), *self._others.values(), *self._last.values())


def _once_more(denial: Denial) -> Denial:
    return replace(denial, count=denial.count + 1)


def _shown(name: str) -> str:
    """Return a name from the guest, for people."""
    text = printable(name, _SHOWN)
    return text if len(name) <= _SHOWN else f"{text}… ({len(name)} characters)"


def arguments(asked: Asked) -> tuple[list[object], dict[str, object]] | str:
    """Return positional and named arguments of a call, or the reason why they are refused.

    A lone surrogate is refused because it is no text: a function that passes it on, to a log or a database, would fail
    or lie. File names may hold surrogates, and the guest has to encode them.
    """
    try:
        found = frames.strict_json(asked.data)
        if b"\\u" in asked.data:  # a surrogate can only come as an escape: its own bytes are no UTF-8
            import json

            json.dumps(found, ensure_ascii=False).encode()
    except frames.WireError:
        return _NOT_JSON
    except UnicodeEncodeError:
        return "its arguments hold a lone surrogate, which is no text"
    if not isinstance(found, dict) or set(found) != {"args", "kwargs"}:
        return _NOT_JSON
    args = found["args"]
    kwargs = found["kwargs"]
    return (args, kwargs) if isinstance(args, list) and isinstance(kwargs, dict) else _NOT_JSON


def answer(asked: Asked, value: object) -> bytes:
    """Return the message that gives the guest the result."""
    import json

    try:
        data = json.dumps(value, allow_nan=False).encode()
    except Exception:  # noqa: BLE001  # the value may have methods of its own, and other threads may change it
        return failure(asked, "its result is not JSON")
    if len(data) > MAX_RESULT:
        return failure(asked, f"its result is more than {MAX_RESULT} bytes")
    return line.pack({"m": "answer", "id": asked.id, "ok": True, "error": None}, data)


def failure(asked: Asked, why: str) -> bytes:
    return line.pack({"m": "answer", "id": asked.id, "ok": False, "error": f"{asked.name}: {why}"})
