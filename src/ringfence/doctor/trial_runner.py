"""Starts the trials as processes of their own, each with a deadline, so that an examination never hangs nor fails.

Nothing is tried in the caller's process: it may have threads, sandboxes and a cgroup of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from ringfence.host.zygote_start import launcher, own_package
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfence.host.cgroups.find import Tree


_TRIALS_S = 60.0  # ten trials of at most 5 s, and a slow start
_WHOLE_S = 45.0
_CGROUP_S = 15.0
_HERE = os.path.dirname(os.path.abspath(__file__))


@final
class Answer(Struct):
    """How one trial ended."""

    ok: bool
    detail: str
    errno: int | None = None
    facts: Mapping[str, object] | None = None  # what else a whole program had to say


def trials() -> dict[str, Answer]:
    """Every trial's answer by name. Empty when the launcher did not start; `launcher` then says why."""
    from ringfence.plan.rootfs.interpreter import interpreter

    env = {"RINGFENCE_TRIAL_PYTHON": interpreter().executable}
    out, problem = _run([launcher(), f"{_HERE}/trial"], env, _TRIALS_S)
    found: dict[str, Answer] = {}
    for line in out.splitlines():
        said = json.loads(line)
        found[said["trial"]] = Answer(said["ok"], said["detail"], said["errno"])
    found["launcher"] = Answer(bool(found), problem or launcher())
    return found


def whole() -> Answer:
    """`ringfence.run("print(1)")` as a program would call it, with everything on."""
    return _program("run", _WHOLE_S)


def cgroup() -> Answer:
    """Which groups can be made here: one is made, limited and removed."""
    return _program("cgroup", _CGROUP_S)


def _program(name: str, timeout_s: float) -> Answer:
    """A function of `programs.py` in a fresh interpreter of the caller's kind."""
    code = f"{own_package()}; from ringfence.doctor.trial_runner import main; main({name!r})"
    out, problem = _run([sys.executable, "-I", "-W", "ignore", "-c", code], dict(os.environ), timeout_s)
    lines = out.splitlines()
    if not lines:
        return Answer(False, problem or "no answer")
    said = json.loads(lines[-1])
    return Answer(said["ok"], said["detail"], said.get("errno"), said)


def _run(argv: list[str], env: dict[str, str], timeout_s: float) -> tuple[str, str]:
    """Standard output, and what went wrong, "" when nothing did."""
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return _text(late.stdout), f"no answer in {timeout_s:g} s"
    except OSError as error:
        return "", f"cannot start {argv[0]}: {error.strerror}"
    if done.returncode == 0:
        return _text(done.stdout), ""
    last = _text(done.stderr).strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return _text(done.stdout), last[0]


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


# MERGED: What doctor runs in an interpreter of its own: a whole sandbox, and a cgroup. Prints one line of JSON.


_MEMORY = 64 << 20


def main(name: str) -> None:
    from ringfence.errors import RingfenceError

    work: Callable[[], dict[str, object]] = {"run": run, "cgroup": cgroup_programs}[name]
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


def cgroup_programs() -> dict[str, object]:
    """A group made, limited and removed. A systemd scope is not started for this: the whole run does it."""
    from ringfence.host.cgroups import find as groups
    from ringfence.host.cgroups.base import MOUNT

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
