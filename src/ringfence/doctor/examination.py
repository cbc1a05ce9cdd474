"""Owns the order of an examination and what "auto" would take."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

from ringfence.backends import registry
from ringfence.backends.auto import SHARED_KERNEL, is_only_slower, not_chosen, prepare
from ringfence.backends.contract import BackendReport, Finding
from ringfence.doctor import fixes
from ringfence.doctor.report import Report
from ringfence.errors import SandboxError, UnsupportedError
from ringfence.host import programs
from ringfence.values import frozen_map, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ringfence.policy.model import Policy


# MERGED: Which parts of the backends this host has whose code is not in this version. None of them works yet.


_ANSWER_S = 3.0
_KVM_GET_API_VERSION = 0xAE00
_KVM_CREATE_VM = 0xAE01
_NOT_HERE = Finding("backend", "missing", "not in this version")


def vm() -> list[Finding]:
    qemu = fixes.install("qemu-system-x86", "qemu-system-x86-core")
    return [_program("qemu", ["qemu-system-x86_64", "--version"], qemu), _kvm()]


def wasm() -> list[Finding]:
    # Python's own library before all else, and no folder that somebody works in (L12).
    code = f"import sys; sys.path += {sys.path!r}; import wasmtime; print('wasmtime', wasmtime.__version__)"
    return [_program("wasmtime", [sys.executable, "-I", "-c", code], "pip install wasmtime")]


def remote() -> list[Finding]:
    return []


OTHERS: dict[str, Callable[[], list[Finding]]] = {
    "vm": vm,
    "wasm": wasm,
    "remote": remote,
}


def examine_other(name: str) -> BackendReport:
    return BackendReport(name, False, (_NOT_HERE, *OTHERS[name]()))


def _program(what: str, argv: list[str], fix: str) -> Finding:
    """Started, not only found."""
    found = programs.look_up(argv[0])
    if found.path is None:
        return Finding(what, "missing", f"there is no {argv[0]} that may be used{found.remark}", fix)
    env = programs.environment(found.path)
    try:
        done = subprocess.run(
            [found.path, *argv[1:]],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(what, "missing", f"{argv[0]} does not run: {type(error).__name__}", fix)
    said = (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()
    if done.returncode != 0:
        return Finding(what, "missing", said[-1], fix)
    return Finding(what, "ok", said[0])


def _kvm() -> Finding:
    """Usable when a machine can be made, not when the device is there."""
    try:
        fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return Finding("/dev/kvm", "weaker", "not there: software emulation", "switch on virtualisation, modprobe kvm")
    except OSError as error:
        return Finding("/dev/kvm", "weaker", f"{error.strerror}: software emulation", "sudo usermod -aG kvm $USER")
    try:
        version = fcntl.ioctl(fd, _KVM_GET_API_VERSION)
        os.close(fcntl.ioctl(fd, _KVM_CREATE_VM, 0))
    except OSError as error:
        return Finding("/dev/kvm", "weaker", f"{error.strerror}: software emulation")
    finally:
        os.close(fd)
    return Finding("/dev/kvm", "ok", f"API {version}; a machine was made")


_ASK = "ringfence doctor"
# What a backend starts; the process backend's are for images.
_PROGRAMS = {
    "process": ("unshare", "mmdebstrap", "npm", "zstd"),
    "container": ("docker", "podman"),
    "gvisor": ("runsc",),
    "vm": ("qemu-system-x86_64",),
}
NAMES = (*registry.BUILT_IN, *OTHERS)


class _Examined(dict[str, "BackendReport"]):
    """Each backend's report, made when it is first asked for."""

    def __missing__(self, name: str) -> BackendReport:
        self[name] = _without_ourselves(_examine(name))
        return self[name]


def _examine(name: str) -> BackendReport:
    report = _tried(name)
    return replace(report, findings=(*report.findings, *_not_run(name)))


def _not_run(name: str) -> list[Finding]:
    """Programs that a shell might run for these names, and that we never do."""
    over = [each for program in _PROGRAMS.get(name, ()) for each in programs.passed_over(program)]
    return [Finding("passed over", "ok", f"{each.path}: {each.why}") for each in over]


def _tried(name: str) -> BackendReport:
    return registry.get(name).doctor() if name in registry.BUILT_IN else examine_other(name)


def _without_ourselves(report: BackendReport) -> BackendReport:
    """Who reads this has asked the doctor; that is no fix any more."""
    findings = tuple(
        replace(each, fix=None, script=None) if each.fix in (_ASK, f"{_ASK} {report.name}") else each
        for each in report.findings
    )
    return replace(report, findings=findings)


def examine(policy: Policy | None = None, backends: Sequence[str] = ()) -> Report:
    """Try what this host can do, and whether it keeps `policy` (the default: offline). About a second.

    `backends`: only these are reported; none means all. Every trial has a deadline. PolicyError for a policy that is
    wrong, or names a backend that does not exist.
    """
    from ringfence.errors import PolicyError
    from ringfence.policy.model import Policy as PolicyValue

    for name in backends:
        if name not in NAMES:
            raise PolicyError(f"unknown backend {name!r}", key="backend", fix=", ".join(NAMES))
    examined = _Examined()
    kept = policy if policy is not None else PolicyValue()
    auto, rejected = _choose(kept, examined)
    for name in backends:
        rejected |= _refused(kept, name, rejected)
    return Report(tuple(examined[name] for name in list(backends) or NAMES), auto, frozen_map(rejected))


def _refused(policy: Policy, name: str, rejected: dict[str, str]) -> dict[str, str]:
    """Return why a backend that was only passed over does not keep the policy either; {} where it would."""
    if name not in rejected or not is_only_slower(name, rejected[name]):
        return {}
    try:
        prepare(name, "host", policy).plan()
    except (UnsupportedError, SandboxError) as error:
        return {name: str(error)}
    return {}


def _choose(policy: Policy, examined: _Examined) -> tuple[str | None, dict[str, str]]:
    """Return the backend that "auto" would take here, and why not each other."""
    rejected: dict[str, str] = {}
    taken: str | None = None
    for name, backend in registry.BUILT_IN.items():
        if not registry.is_as_strong(backend.isolation, policy.isolation):
            rejected[name] = SHARED_KERNEL
        elif taken is not None:
            rejected[name] = not_chosen(name)
        else:
            try:
                prepare(name, "host", policy).plan()
            except (UnsupportedError, SandboxError) as error:  # the second: of this moment, and so is this report
                rejected[name] = str(error)
                continue
            if examined[name].works:
                taken = name
                continue
            missing = (each.detail for each in examined[name].findings if each.state == "missing")
            rejected[name] = next(missing, "it does not work here")
    return taken, rejected
