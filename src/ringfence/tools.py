"""Host functions that guest code may call: names from a table, arguments and results as JSON, caps on everything.

What the guest sends selects a name and nothing else. What a function raises does not go in, only that it failed: its
text may hold what the guest is not to know.
"""

from __future__ import annotations

import keyword

from ringfence.errors import PolicyError
from ringfence.results import Denial
from ringfence.values import Struct, final
from ringfence.wire import frames, line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.values import Tool

MAX_ARGUMENTS = 1 << 20
MAX_RESULT = 1 << 20
MAX_WAITING = 1 << 24  # arguments of all calls of a cell that wait for their turn
MAX_CALLS = 1000  # in one cell
DEADLINE_S = 30.0
LOOK_S = 0.05  # how often the caller of a tool looks whether its cell still runs
CELL_OVER = "its cell is over"
_MAX_TOOLS = 100
_LONGEST_NAME = 1000  # of one that is asked for: what is longer is no tool's


def check_tools(tools: object) -> dict[str, Tool]:
    """A table of functions, checked."""
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
    """A call as it waits for its turn. `left_out`: it came with more arguments than wait for theirs."""

    id: object
    name: str
    data: bytes
    left_out: int


def asked(said: line.Said, room: int) -> Asked:
    """`room`: for arguments. While a guest takes no answers its calls wait with us, and it chooses how long each is."""
    size = len(said.data)
    kept = size <= MAX_ARGUMENTS and size <= room
    name = str(said.fields["name"])[:_LONGEST_NAME]
    return Asked(said.fields["id"], name, said.data if kept else b"", 0 if kept else size)


class Budget:
    """What one cell may still ask for."""

    def __init__(self) -> None:
        self.calls = 0
        self.denials: list[Denial] = []

    def refusal(self, call: Asked, tools: Mapping[str, Tool]) -> str | None:
        """Why this call is not made, None when it is."""
        self.calls += 1
        name = call.name
        if name not in tools:
            self._deny(name, "tool.unknown", "no tool of this name is offered")
            return "no tool of this name is offered"
        if self.calls > MAX_CALLS:
            self._deny(name, "tool.budget", f"a cell may make {MAX_CALLS} calls")
            return f"more than {MAX_CALLS} calls in one cell"
        if call.left_out > MAX_ARGUMENTS:
            self._deny(name, "tool.arguments", f"arguments may be {MAX_ARGUMENTS} bytes")
            return f"arguments of more than {MAX_ARGUMENTS} bytes"
        if call.left_out:
            self._deny(name, "tool.arguments", f"arguments of calls that wait may be {MAX_WAITING} bytes together")
            return f"arguments of more than {MAX_WAITING} bytes wait for their turn"
        return None

    def _deny(self, name: str, code: str, why: str) -> None:
        shown = "".join(c if c.isprintable() else "?" for c in name[:100])
        if len(self.denials) < _MAX_TOOLS:
            self.denials.append(Denial("tool", shown, code, f"{shown}: {why}", allow=None))


def arguments(call: Asked) -> tuple[list[object], dict[str, object]] | None:
    """Positional and named ones, None when they are not that."""
    try:
        found = frames.strict_json(call.data)
    except frames.WireError:
        return None
    if not isinstance(found, dict) or set(found) != {"args", "kwargs"}:
        return None
    args, kwargs = found["args"], found["kwargs"]
    return (args, kwargs) if isinstance(args, list) and isinstance(kwargs, dict) else None


def answer(call: Asked, value: object) -> bytes:
    """The message that gives the guest its result."""
    import json

    try:
        data = json.dumps(value, allow_nan=False).encode()
    except Exception:  # noqa: BLE001  # what a tool returns may have methods of its own, and other threads may change it
        return failure(call, "its result is not JSON")
    if len(data) > MAX_RESULT:
        return failure(call, f"its result is more than {MAX_RESULT} bytes")
    return line.pack({"m": "answer", "id": call.id, "ok": True, "error": None}, data)


def failure(call: Asked, why: str) -> bytes:
    return line.pack({"m": "answer", "id": call.id, "ok": False, "error": f"{call.name[:100]}: {why}"})
