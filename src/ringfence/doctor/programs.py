"""What doctor runs in an interpreter of its own: a whole sandbox, and a cgroup. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.process.cgroup import Tree

_MEMORY = 64 << 20


def main(name: str) -> None:
    from ringfence.errors import RingfenceError

    work: Callable[[], dict[str, object]] = {"run": run, "cgroup": cgroup}[name]
    answer: dict[str, object]
    try:
        answer = work()
    except RingfenceError as error:
        answer = {"ok": False, "detail": str(error), "code": error.code, "fix": error.fix}
    except OSError as error:
        answer = {"ok": False, "detail": str(error), "errno": error.errno}
    print(json.dumps(answer), flush=True)


def run() -> dict[str, object]:
    import ringfence

    begun = time.monotonic()
    result = ringfence.run("print(1)", timeout_s=20, backend="process")
    took = time.monotonic() - begun
    if result.status != "ok" or result.stdout != "1\n":
        return {"ok": False, "detail": f"print(1) ended as {result.status} ({result.reason}): {result.stderr[-200:]!r}"}
    held = {name: _control(getattr(result.enforcement, name)) for name in type(result.enforcement).__fields__}
    return {"ok": True, "detail": f"print(1) printed 1, {took * 1000:.0f} ms from nothing", "enforcement": held}


def _control(control: object) -> dict[str, str]:
    return {name: str(getattr(control, name)) for name in ("mechanism", "level", "note")}


def cgroup() -> dict[str, object]:
    """A group made, limited and removed. A systemd scope is not started for this: the whole run does it."""
    from ringfence.backends.process import cgroup as groups
    from ringfence.backends.process.cgroup_base import MOUNT

    mode = (
        "v2" if os.path.exists(f"{MOUNT}/cgroup.controllers") else "v1" if os.path.isdir(f"{MOUNT}/memory") else "none"
    )
    tree = groups.find()
    if tree is None:
        scope = groups.delegable()
        lacks = [] if scope is None else _lacking(scope)
        how = "no group can be written" if scope is None else "by a systemd user scope"
        return {"ok": scope is not None, "detail": f"{mode}: {how}", "mode": mode, "lacks": lacks}
    tree.create("doctor", groups.GroupLimits(_MEMORY, 16, 1.0)).remove()
    tree.close()
    lacks = _lacking(tree)
    held = [name for name in ("memory", "cpu", "processes") if name not in lacks]
    return {"ok": True, "detail": f"{mode}: {', '.join(held)}; one was made and removed", "mode": mode, "lacks": lacks}


def _lacking(tree: Tree) -> list[str]:
    by = tree.mechanisms
    held = {"memory": by.memory, "cpu": by.cpu, "cpu time": by.cpu_time, "processes": by.processes}
    return [name for name, mechanism in held.items() if mechanism is None]
