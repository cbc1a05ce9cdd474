"""Which parts of the backends this host has whose code is not in this version. None of them works yet."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

from ringfence.backends import host_programs
from ringfence.doctor import fixes
from ringfence.doctor.report import BackendReport, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
    found = host_programs.look_up(argv[0])
    if found.path is None:
        return Finding(what, "missing", f"there is no {argv[0]} that may be used{found.remark}", fix)
    env = host_programs.environment(found.path)
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
