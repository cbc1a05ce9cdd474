"""The process backend's part of an examination: the answers of its trials, judged, with the fix for each."""

from __future__ import annotations

import os
import sys

from ringfence.backends.contract import BackendReport, Finding
from ringfence.doctor import fixes, trial_runner
from ringfence.doctor.report import with_passed_over
from ringfence.host import kernel_refusals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.doctor.trial_runner import Answer

_OLDEST = (5, 12)  # mount_setattr
_EXACT = (5, 14)  # RLIMIT_NPROC counts for each user namespace
_SCOPES_ABI = 6
# Without these a sandbox runs; what is refused or held less well then.
_OPTIONAL = {
    "Landlock": "files are fenced by mounts alone, and PID 1 only by being non-dumpable",
    "idmapped mounts": "writable mounts, and files only root can read, are refused",
    "overlay": "mounts with mode copy, and `hide` in read-only mounts, are refused",
}


def examine_process() -> BackendReport:
    """Starts some processes, of which none stays; about half a second."""
    return with_passed_over(_process(), "unshare", "mmdebstrap", "npm", "zstd")


def _process() -> BackendReport:
    if sys.platform != "linux":
        finding = Finding("Linux", "missing", f"this is {sys.platform}", "run it in a Linux machine or container")
        return BackendReport("process", False, (finding,))
    system = [_kernel(os.uname().release), _machine(os.uname().machine)]
    if any(each.state == "missing" for each in system):
        return BackendReport("process", False, tuple(system))
    answers = trial_runner.trials()
    run = trial_runner.whole()
    found = [*system, *_tried(answers), _cgroup(trial_runner.cgroup()), _whole(run), *_held(run), _images(answers)]
    return BackendReport("process", run.ok, tuple(found))


def _images(answers: dict[str, Answer]) -> Finding:
    """Whether images can be built here; importing them needs nothing."""
    if os.geteuid() != 0 and "user namespaces" in answers and not answers["user namespaces"].ok:
        # `unshare` would wait for its deadline where it is refused one.
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
        detail = f"Linux {release}: before 5.14 the limit of processes counts the user's others too"
        return Finding("kernel", "weaker", detail, "use a newer kernel")
    return Finding("kernel", "ok", f"Linux {release}")


def _machine(machine: str) -> Finding:
    if machine == "x86_64":
        return Finding("machine", "ok", machine)
    detail = f"{machine}: the list of system calls of this version is for x86_64"
    return Finding("machine", "missing", detail, "use a machine with x86_64")


def _tried(answers: dict[str, Answer]) -> list[Finding]:
    launcher = answers.pop("launcher")
    if not launcher.ok:
        fix = "reinstall ringfence where programs may be executed (not on a noexec mount)"
        return [Finding("launcher", "missing", launcher.detail, fix, fixes.comment(fix))]
    found = [Finding("launcher", "ok", launcher.detail)]
    for name, answer in answers.items():
        if name != "idmapped mounts" or os.geteuid() == 0:
            found.append(_judged(name, answer, launcher.detail))
    return found


def _judged(name: str, answer: Answer, launcher: str) -> Finding:
    if answer.ok:
        return _landlock(answer.detail) if name == "Landlock" else Finding(name, "ok", answer.detail)
    if name in _OPTIONAL:
        fix = _landlock_fix() if name == "Landlock" else None
        return Finding(name, "weaker", f"{_OPTIONAL[name]}: {answer.detail}", fix, fix and fixes.comment(fix))
    cause = kernel_refusals.cause(answer.detail, answer.errno)
    fix, script = fixes.for_cause(cause, launcher)
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
    return Finding("cgroup", "weaker", f"{answer.detail}{missing}: rlimits hold what no group holds", fix, script)


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


def _held(run: Answer) -> list[Finding]:
    """What held each promise of the run."""
    held = (run.facts or {}).get("enforcement")
    if not isinstance(held, dict):
        return []
    found = []
    for name, control in held.items():
        if control["level"] == "weaker":
            found.append(Finding(name, "weaker", f"{control['mechanism']}: {control['note']}"))
        else:
            found.append(Finding(name, "ok", control["mechanism"]))
    return found
