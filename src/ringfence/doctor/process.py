"""The process backend's part of an examination: the steps of a start, tried and judged, with the fix for each.

Nothing is tried in the caller's process, which may have threads, sandboxes and a cgroup of its own. Every trial is a
process with a deadline, so that an examination never hangs and never fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from ringfence.backends.contract import BackendReport, Finding
from ringfence.doctor import fixes
from ringfence.doctor.examination import with_passed_over
from ringfence.host import kernel_refusals
from ringfence.host.zygote_start import launcher, own_package
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfence.host.cgroups import Tree

_TRIALS_S = 60.0  # ten trials of at most 5 s, and a slow start
_WHOLE_S = 45.0
_CGROUP_S = 15.0
_MEMORY = 64 << 20
_OLDEST = (5, 12)  # mount_setattr
_EXACT = (5, 14)  # RLIMIT_NPROC counts for each user namespace
_SCOPES_ABI = 6
# Parts that a sandbox can run without, and what is refused or enforced less well then.
_OPTIONAL = {
    "Landlock": "files are fenced by mounts alone, and PID 1 only by being non-dumpable",
    "idmapped mounts": "writable mounts, and files only root can read, are refused",
    "overlay": "mounts with mode copy, and `hide` in read-only mounts, are refused",
}


@final
class Answer(Struct):
    """The outcome of one trial."""

    ok: bool
    detail: str
    errno: int | None = None
    facts: Mapping[str, object] | None = None  # the whole answer of a program, with what only this program reports


def examine_process() -> BackendReport:
    """Try every step of a start and report. Takes about half a second; no process is left."""
    return with_passed_over(_process(), "unshare", "mmdebstrap", "npm", "zstd")


def _process() -> BackendReport:
    if sys.platform != "linux":
        finding = Finding("Linux", "missing", f"this is {sys.platform}", "run it in a Linux machine or container")
        return BackendReport("process", False, (finding,))
    system = [_kernel(os.uname().release), _machine(os.uname().machine)]
    if any(each.state == "missing" for each in system):
        return BackendReport("process", False, tuple(system))
    answers = run_trials()
    run = run_whole()
    found = [*system, *_tried(answers), _cgroup(make_cgroup()), _whole(run), *_enforced(run), _images(answers)]
    return BackendReport("process", run.ok, tuple(found))


def _images(answers: dict[str, Answer]) -> Finding:
    """Return whether images can be built here. Importing an image needs nothing."""
    if os.geteuid() != 0 and "user namespaces" in answers and not answers["user namespaces"].ok:
        # Without a user namespace `unshare` would wait for its deadline.
        return Finding("image build", "weaker", "images can be imported, not built: that needs user namespaces")
    from ringfence.errors import UnsupportedError
    from ringfence.images.packages import check_host

    try:
        check_host()
    except UnsupportedError as error:
        install = fixes.install("mmdebstrap", "mmdebstrap") if error.code == "mmdebstrap" else error.fix
        return Finding("image build", "weaker", f"images can be imported, not built: {error}", install)
    mode = "as root" if os.geteuid() == 0 else "with the uids of /etc/subuid"
    return Finding("image build", "ok", f"mmdebstrap, {mode}")


def _kernel(release: str) -> Finding:
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    version = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else _OLDEST
    if version < _OLDEST:
        return Finding("kernel", "missing", f"Linux {release}: older than 5.12", "use a newer kernel")
    if version < _EXACT:
        detail = f"Linux {release}: before 5.14 the limit of processes counts the user's other processes too"
        return Finding("kernel", "weaker", detail, "use a newer kernel")
    return Finding("kernel", "ok", f"Linux {release}")


def _machine(machine: str) -> Finding:
    if machine == "x86_64":
        return Finding("machine", "ok", machine)
    detail = f"{machine}: the list of system calls of this version is for x86_64"
    return Finding("machine", "missing", detail, "use a machine with x86_64")


def _tried(answers: dict[str, Answer]) -> list[Finding]:
    launched = answers.pop("launcher")
    if not launched.ok:
        fix = "reinstall ringfence where programs may be executed (not on a noexec mount)"
        return [Finding("launcher", "missing", launched.detail, fix, fixes.comment(fix))]
    found = [Finding("launcher", "ok", launched.detail)]
    for name, answer in answers.items():
        if name != "idmapped mounts" or os.geteuid() == 0:
            found.append(_judged(name, answer, launched.detail))
    return found


def _judged(name: str, answer: Answer, program: str) -> Finding:
    if answer.ok:
        return _landlock(answer.detail) if name == "Landlock" else Finding(name, "ok", answer.detail)
    if name in _OPTIONAL:
        fix = _landlock_fix() if name == "Landlock" else None
        return Finding(name, "weaker", f"{_OPTIONAL[name]}: {answer.detail}", fix, fix and fixes.comment(fix))
    cause = kernel_refusals.cause(answer.detail, answer.errno)
    fix, script = fixes.for_cause(cause, program)
    return Finding(name, "missing", f"{cause.why}: {answer.detail}", fix, script)


def _landlock(detail: str) -> Finding:
    abi = int(detail.rpartition(" ")[2])
    if abi >= _SCOPES_ABI:
        return Finding("Landlock", "ok", detail)
    weaker = f"{detail}: before ABI 6 it does not fence signals and abstract sockets; namespaces alone do"
    return Finding("Landlock", "weaker", weaker, "use Linux 6.12 or later")


def _landlock_fix() -> str:
    try:
        with open("/sys/kernel/security/lsm", encoding="ascii") as file:
            now = file.read().strip()
    except OSError:
        now = "capability"
    return f"start the kernel with lsm=landlock,{now} (5.13 or later, built with CONFIG_SECURITY_LANDLOCK)"


def _cgroup(answer: Answer) -> Finding:
    facts = answer.facts or {}
    lacks = facts.get("lacks") or []
    assert isinstance(lacks, list)
    if answer.ok and not lacks:
        return Finding("cgroup", "ok", answer.detail)
    fix, script = _cgroup_fix(str(facts.get("mode", "none")), scope=answer.ok)
    missing = f" (without {', '.join(lacks)})" if lacks else ""
    detail = f"{answer.detail}{missing}: rlimits take the place of missing controllers"
    return Finding("cgroup", "weaker", detail, fix, script)


def _cgroup_fix(mode: str, *, scope: bool) -> tuple[str, str]:
    if kernel_refusals.container() is not None:
        fix = "limit the container itself: docker run --memory 2g --pids-limit 500 --cpus 2 …"
    elif mode == "v2" and os.geteuid() != 0:
        if scope:
            return (
                f"{kernel_refusals.DOCTOR} | sudo sh   # systemd gives your user manager more controllers",
                fixes.delegate(),
            )
        if os.path.isdir("/run/systemd/system"):
            command = fixes.linger(_user_name())
            return f"sudo {command}   # starts your systemd user manager", f"{command}\n{fixes.delegate()}"
        fix = "give this user a cgroup of its own with memory, pids and cpu in cgroup.subtree_control"
    elif mode == "v1":
        fix = "start the kernel with systemd.unified_cgroup_hierarchy=1, or run as root"
    else:
        fix = "mount -t cgroup2 none /sys/fs/cgroup, with the memory, pids and cpu controllers"
    return fix, fixes.comment(fix)


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _whole(run: Answer) -> Finding:
    if run.ok:
        return Finding("a whole sandbox", "ok", run.detail)
    fix = (run.facts or {}).get("fix")
    return Finding("a whole sandbox", "missing", run.detail, str(fix) if fix else None)


def _enforced(run: Answer) -> list[Finding]:
    """Return the mechanism that enforced each promise of the run."""
    enforcement = (run.facts or {}).get("enforcement")
    if not isinstance(enforcement, dict):
        return []
    found = []
    for name, control in enforcement.items():
        if control["level"] == "weaker":
            found.append(Finding(name, "weaker", f"{control['mechanism']}: {control['note']}"))
        else:
            found.append(Finding(name, "ok", control["mechanism"]))
    return found


# ── the trials as processes ──────────────────────────────────────────────────────────────────────────


def run_trials() -> dict[str, Answer]:
    """Return every trial's answer by name.

    When the launcher does not start, there is only the answer `launcher`, which says why.
    """
    out, problem = _run([launcher(), f"{os.path.dirname(launcher())}/trial"], trial_environment(), _TRIALS_S)
    found: dict[str, Answer] = {}
    for line in out.splitlines():
        answer = json.loads(line)
        found[answer["trial"]] = Answer(answer["ok"], answer["detail"], answer["errno"])
    found["launcher"] = Answer(bool(found), problem or launcher())
    return found


def trial_environment() -> dict[str, str]:
    """Return the variables of the trials, which import the guest's side alone."""
    from ringfence.host.uids import FIRST
    from ringfence.plan.rootfs.interpreter import interpreter
    from ringfence.plan.seccomp.compiler import guest_filter

    return {
        "RINGFENCE_TRIAL_PYTHON": interpreter().executable,
        "RINGFENCE_TRIAL_FILTER": guest_filter().hex(),
        "RINGFENCE_TRIAL_UID": str(FIRST),
    }


def run_whole() -> Answer:
    """Run `ringfence.run("print(1)")` as a program would, with every control on."""
    return _run_here("run", _WHOLE_S)


def make_cgroup() -> Answer:
    """Try which cgroups can be made here: one is made, limited and removed."""
    return _run_here("cgroup", _CGROUP_S)


def _run_here(name: str, timeout_s: float) -> Answer:
    """Call `main(name)` of this module in a fresh interpreter of the caller's kind."""
    code = f"{own_package()}; from ringfence.doctor.process import main; main({name!r})"
    out, problem = _run([sys.executable, "-I", "-W", "ignore", "-c", code], dict(os.environ), timeout_s)
    lines = out.splitlines()
    if not lines:
        return Answer(False, problem or "no answer")
    answer = json.loads(lines[-1])
    return Answer(answer["ok"], answer["detail"], answer.get("errno"), answer)


def _run(argv: list[str], env: dict[str, str], timeout_s: float) -> tuple[str, str]:
    """Run a program and return its output, and what went wrong: "" when nothing did."""
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


# ── what such a process does ─────────────────────────────────────────────────────────────────────────


def main(name: str) -> None:
    """Do what `name` says, "run" or "cgroup", in an interpreter of its own. Print one line of JSON."""
    from ringfence.errors import RingfenceError

    work: Callable[[], dict[str, object]] = {"run": _print_one, "cgroup": _make_and_remove_cgroup}[name]
    answer: dict[str, object]
    try:
        answer = work()
    except RingfenceError as error:
        answer = {"ok": False, "detail": str(error), "code": error.code, "fix": error.fix}
    except OSError as error:
        answer = {"ok": False, "detail": str(error), "errno": error.errno}
    print(json.dumps(answer), flush=True)


def _print_one() -> dict[str, object]:
    import ringfence

    begun = time.monotonic()
    result = ringfence.run("print(1)", timeout_s=20, backend="process")
    took = time.monotonic() - begun
    if result.status != "ok" or result.stdout != "1\n":
        return {"ok": False, "detail": f"print(1) ended as {result.status} ({result.reason}): {result.stderr[-200:]!r}"}
    enforcement = {name: _control(getattr(result.enforcement, name)) for name in type(result.enforcement).__fields__}
    detail = f"print(1) printed 1, {took * 1000:.0f} ms from nothing"
    return {"ok": True, "detail": detail, "enforcement": enforcement}


def _control(control: object) -> dict[str, str]:
    return {name: str(getattr(control, name)) for name in ("mechanism", "level", "note")}


def _make_and_remove_cgroup() -> dict[str, object]:
    """Make a cgroup with limits and remove it. No systemd scope is started for this: the whole run does that."""
    from ringfence.host import cgroups as groups
    from ringfence.host.cgroups.base import MOUNT

    if os.path.exists(f"{MOUNT}/cgroup.controllers"):
        mode = "v2"
    else:
        mode = "v1" if os.path.isdir(f"{MOUNT}/memory") else "none"
    tree = groups.find()
    if tree is None:
        scope = groups.delegable()
        lacks = [] if scope is None else _lacking(scope)
        how = "no group can be written" if scope is None else "by a systemd user scope"
        return {"ok": scope is not None, "detail": f"{mode}: {how}", "mode": mode, "lacks": lacks}
    tree.create("doctor", groups.GroupLimits(_MEMORY, 16, 1.0)).remove()
    tree.close()
    lacks = _lacking(tree)
    limited = [name for name in ("memory", "cpu", "processes") if name not in lacks]
    detail = f"{mode}: {', '.join(limited)}; one was made and removed"
    return {"ok": True, "detail": detail, "mode": mode, "lacks": lacks}


def _lacking(tree: Tree) -> list[str]:
    """Return what no controller of these cgroups limits."""
    by = tree.mechanisms
    mechanisms = {"memory": by.memory, "cpu": by.cpu, "cpu time": by.cpu_time, "processes": by.processes}
    return [name for name, mechanism in mechanisms.items() if mechanism is None]
