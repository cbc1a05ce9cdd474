"""O: what a guest hides from the reader of a result, and what a copy gives back to a guest."""

from __future__ import annotations

import os

from ringfence import Mount, Sandbox, rendering
from ringfence.core import tools
from ringfence.errors import SnapshotError
from ringfence.results import Denial
from ringfence.snapshots import model
from ringfence_attacks.arena import POLICY
from ringfence_attacks.case import HOST_CODE, READ, SPOOF, Seen, attack, cases
from ringfence_attacks.witnesses import replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.results import Result
    from ringfence_attacks.arena import Arm

# Calls of tools as the interpreter's own code sends them: the guest writes to the same line.
_CALL = """
import json, os, struct
def call(name):
    text, data = json.dumps({"m": "call", "id": 1, "name": name}).encode(), b'{"args":[],"kwargs":{}}'
    os.write(3, struct.pack("<II", len(text), len(data)) + text + data)
"""
_FLOOD = _CALL + "for number in range(count): call(f'harmless{number}')\n"
_OUTPUT = "what it printed"


def _with_a_tool(arm: Arm) -> Sandbox:
    box = arm.sandbox(whole=True)
    box._tools["lookup"] = lambda: None  # noqa: SLF001  # an arm's sandboxes are made without; the first session has it
    return box


def _first_hundred(self: tools.Budget, name: str, code: str, why: str) -> None:
    """Without a count, and no more of them than that."""
    if len(self._first) < 100:  # it stands in for a method
        key = (f"{name}{len(self._first)}", code)  # as above
        self._first[key] = Denial("tool", name, code, f"{name}: {why}", allow=None)  # as above


@attack("O23", "no flood of refused calls hides one of them", SPOOF, off=HOST_CODE, label="denials are counted")
def hidden_denials(arm: Arm) -> Seen:
    """Try a name that was not tried before, after many names, equal and different, and a name that ends the cell."""
    if arm.off:
        arm.enter(replaced(tools.Budget, "deny", _first_hundred))
    hidden = []
    for flood in (_CALL + "for _ in range(200): call('harmless')\n", "count = 3000" + _FLOOD):
        result = _with_a_tool(arm).run(f"{flood}call({arm.canary!r})\n").check()
        count = sum(denial.count for denial in result.denials)
        if not any(denial.target == arm.canary for denial in result.denials):
            hidden.append(f"the name is in none of {len(result.denials)} denials")
        elif count not in (201, 3001):
            hidden.append(f"{count} are counted")
    return Seen(bool(hidden), "; ".join(hidden) or "told, and all are counted")


def _all_lines(denials: tuple[Denial, ...], room: int) -> list[str]:
    del room
    return [f"denied: {denial.message}" for denial in denials]


@attack(
    "O24", "no flood of denials hides what a run printed, nor the last of them", SPOOF, off=HOST_CODE, label="shares"
)
def drowned_rendering(arm: Arm) -> Seen:
    """The text that a model reads of a result. Off: every denial has its line, before all that the guest said."""
    if arm.off:
        arm.enter(replaced(rendering, "_denial_lines", _all_lines))
    box = _with_a_tool(arm)
    result = box.run(f"count = 900{_FLOOD}call({arm.canary!r})\nprint({_OUTPUT!r})\n'its value'\n")
    missing = _missing_of(result, arm.canary)
    return Seen(bool(missing), f"{len(result.denials)} denials; missing: {', '.join(missing) or 'nothing'}")


def _missing_of(result: Result, last: str) -> list[str]:
    if result.stdout.strip() != _OUTPUT or len(result.denials) < 900:
        raise AssertionError(f"{result.status}: {result.stdout[:100]!r}, {len(result.denials)} denials")
    text = result.render()
    return [word for word in (_OUTPUT, "its value", last) if word not in text]


@attack(
    "O25", "what was deleted in a copy of a folder stays deleted in a twin", READ, off=HOST_CODE, label="look before"
)
def brought_back(arm: Arm) -> Seen:
    """A token in the project is removed before a fork and a snapshot are given to somebody else's code. Off: a new
    sandbox is filled as if there were nothing in it, but it starts from the folder, as the first one did."""
    path = arm.host_file("project/token")
    os.chmod(os.path.dirname(path), 0o755)
    if arm.off:
        arm.enter(replaced(model, "copies_workspace", lambda _: False))
    policy = POLICY.replace(mounts=[Mount(os.path.dirname(path), target="/workspace", mode="copy")])
    box = arm.sandbox(policy, whole=True)
    box.exec(["sh", "-c", "rm token; echo own > own"]).check()
    made = box.snapshot()
    looted = []
    try:
        for twin in (box.fork(memory=False), Sandbox(policy=policy, snapshot=made, backend="process")):
            arm.enter(twin)
            if twin.files.read_text("own") != "own\n":
                raise AssertionError("the twin has not what the original has")
            looted.append(twin.exec(["cat", "token"]).stdout)
    except SnapshotError as error:
        return Seen(False, str(error))
    finally:
        made.delete()
    return Seen(
        any(arm.canary in one for one in looted), f"tokens read: {sum(arm.canary in one for one in looted)} of 2"
    )


CASES = cases(globals())
