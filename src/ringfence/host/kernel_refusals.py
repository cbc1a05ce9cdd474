"""Reasons why the kernel refuses a step of building a sandbox, and what the host's owner can do.

Reads a few files of /proc to tell one reason from another. Tries nothing and changes nothing.
"""

from __future__ import annotations

import errno
import os

from ringfence.errors import SandboxLostError
from ringfence.shared import proc
from ringfence.values import Struct, final

_SYS_ADMIN = 21
# What the kernel says where it lacks a feature or denies a right. It says the same the next time.
_LASTING = frozenset(
    (
        *(errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP),
        *(errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ENOPROTOOPT),
    )
)
_DELEGATED_ROOT = "the sandbox's uids (2000000 and up) are not part of this user namespace"
_NAMESPACES = {
    0x10000000: "user",
    0x00020000: "mnt",
    0x20000000: "pid",
    0x40000000: "net",
    0x08000000: "ipc",
    0x04000000: "uts",
    0x02000000: "cgroup",
}
DOCTOR = "ringfence doctor --fix"


@final
class Cause(Struct):
    """Why a step was refused. `fix` is a command, or says in words what to change; None if nothing is known to help.

    `passes`: the cause says nothing about the host, and the step may succeed the next time.
    """

    code: str
    what: str  # what is missing
    why: str  # one sentence
    fix: str | None
    passes: bool = False


def mounts_changed(what: str) -> SandboxLostError:
    """Return the error for a mounted folder that is not the folder of the plan. No other backend is tried after it."""
    return SandboxLostError(
        f"a mounted folder was changed while the sandbox was built: {what}",
        code="mounts-changed",
        fix="end what else writes to the mounted folder, and try again",
    )


def is_lasting(number: int | None) -> bool:
    """Return whether an error number means a missing feature or right.

    Other numbers mean something that passes: a process that ended, a name that was removed, a full table.
    """
    return number in _LASTING


def cause(text: str, number: object, *, out_of_memory: bool = False) -> Cause:
    """Return the likeliest cause of a refused step. `text` names the step as `shared.syscalls` does: `[unshare 0x1]`.

    `out_of_memory`: the sandbox's cgroup counted a process that was killed at the limit.
    """
    number = number if isinstance(number, int) else number_in(text)
    if "limits.memory" in text:
        return Cause("memory", "room for a Python", "its first process could not start", "a larger limits.memory")
    if out_of_memory:
        why = "limits.memory is too small: its first process was killed there"
        return Cause("memory", "room for a Python", why, "a larger limits.memory")
    if "mount proc" in text and number in (errno.EPERM, errno.EACCES):
        return _proc_masked()
    if "[unshare" in text and number in (errno.ENOSPC, errno.EUSERS):
        return _namespaces_used_up(text)
    if number in (errno.ENOSYS, errno.EINVAL) and "[" in text:
        why = f"this kernel ({os.uname().release}) does not know the call"
        return Cause("kernel", "Linux 5.12 or later with namespaces", why, "use a newer kernel")
    if number in (errno.EPERM, errno.EACCES):
        return _root_refused(text) if os.geteuid() == 0 else _user_refused(text)
    if number in _LASTING:
        return Cause("build", "a sandbox that can be built", "the host refused a step", "ringfence doctor")
    return Cause("start", "a sandbox that can be built", "a step failed", _fix_of(number), passes=True)


def _fix_of(number: int | None) -> str:
    """Return what to do about an error that passes."""
    if number in (errno.EMFILE, errno.ENFILE):
        return "close sandboxes, or raise the limit on open files, then try again"
    if number in (errno.EAGAIN, errno.ENOMEM):
        return "end some processes of this machine, then try again"
    return "try again"


def number_in(text: str) -> int | None:
    """Return the error number in a text with `[Errno 1] …`, or None."""
    _, found, tail = text.partition("[Errno ")
    digits = tail.partition("]")[0] if found else ""
    return int(digits) if digits.isdigit() else None


def sysctl(name: str) -> str | None:
    """Return a kernel setting as this process sees it, or None when this kernel does not have the setting."""
    try:
        with open(f"/proc/sys/{name.replace('.', '/')}", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def container() -> str | None:
    """Return the engine of the container that this process runs in, if the engine left a mark."""
    if os.environ.get("KUBERNETES_SERVICE_HOST") or os.path.isdir("/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    return "docker" if os.path.exists("/.dockerenv") else None


def container_fix() -> str:
    """Return what lets the process backend run in a container (kernel facts 9, 14). Root would need CAP_SYS_ADMIN."""
    match container():
        case "kubernetes":
            return (
                "in the pod: hostUsers: false; in the container's securityContext: procMount: Unmasked, "
                "seccompProfile: {type: Unconfined}, appArmorProfile: {type: Unconfined}, runAsNonRoot: true"
            )
        case "podman":
            return "podman run --user 1000 --security-opt seccomp=unconfined --security-opt unmask=ALL …"
        case _:
            return (
                "docker run --user 1000 --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
                "--security-opt systempaths=unconfined …"
            )


def proc_fix() -> str:
    """Return what lets a fresh /proc be mounted in a container (kernel fact 9)."""
    match container():
        case "kubernetes":
            return "in the container's securityContext: procMount: Unmasked; in the pod: hostUsers: false"
        case "podman":
            return "podman run --security-opt unmask=ALL …"
        case "docker":
            return "docker run --security-opt systempaths=unconfined …"
        case _:
            return (
                "in Docker: --security-opt systempaths=unconfined; in Podman: --security-opt unmask=ALL; "
                "in Kubernetes: procMount: Unmasked"
            )


def _proc_masked() -> Cause:
    why = "parts of this container's /proc are covered, so the kernel refuses a fresh one inside the sandbox"
    return Cause("proc-masked", "an unmasked /proc", why, proc_fix())


def _namespaces_used_up(text: str) -> Cause:
    """Return the cause of ENOSPC: a limit of this user namespace or of an outer one, or 32 levels of nesting."""
    for kind in _asked_for(text):
        name = f"user.max_{kind}_namespaces"
        if sysctl(name) == "0":
            why = f"{kind} namespaces are switched off: {name} is 0"
            return Cause("userns-restricted", f"{kind} namespaces", why, f"sudo sysctl -w {name}=15000")
    allowed = sysctl("user.max_user_namespaces")
    why = (
        f"no further namespace is allowed: user.max_user_namespaces ({allowed} here, perhaps fewer outside this "
        "container) is used up, or namespaces are nested too deep"
    )
    fix = "close sandboxes, or: sudo sysctl -w user.max_user_namespaces=15000"
    return Cause("namespaces-used-up", "more user namespaces", why, fix, passes=True)


def _asked_for(text: str) -> list[str]:
    flags = text.partition("[unshare ")[2].partition("]")[0]
    try:
        value = int(flags, 16)
    except ValueError:
        return []
    return [kind for flag, kind in _NAMESPACES.items() if value & flag]


def _root_refused(text: str) -> Cause:
    if not has_capability(_SYS_ADMIN):
        why = "root in this container lacks CAP_SYS_ADMIN"
        fix = f"run as an ordinary user in it: {container_fix()}"
        return Cause("userns-restricted", "the rights of root, or an ordinary user", why, fix)
    if "uid_map" in text or "gid_map" in text:
        return Cause("userns-restricted", "uids for sandboxes", _DELEGATED_ROOT, "run as an ordinary user")
    return Cause("userns-restricted", "mounts and namespaces", "a security module refuses them", container_fix())


def _user_refused(text: str) -> Cause:
    missing = "user namespaces with mounts inside"
    if (
        ("[mount bind /" in text or "[open_tree" in text)
        and number_in(text) == errno.EACCES
        and not apparmor_restricts()
    ):
        why = "a folder to be shown inside cannot be entered by this user"
        return Cause("mount-source", "folders that this user may enter", why, "show another folder, or chmod this one")
    if sysctl("kernel.unprivileged_userns_clone") == "0":
        why = "user namespaces are for root alone: kernel.unprivileged_userns_clone is 0"
        return Cause("userns-restricted", missing, why, "sudo sysctl -w kernel.unprivileged_userns_clone=1")
    if apparmor_restricts():
        why = "AppArmor lets a user namespace be made and denies what is done in it"
        return Cause("userns-restricted", missing, why, DOCTOR)
    if container() is not None or ("[unshare" in text and is_filtered()):
        why = "a filter around this process (a container's, mostly) refuses it"
        return Cause("userns-restricted", missing, why, container_fix())
    profile = apparmor_profile()
    if profile is not None:
        why = f"this process is confined by AppArmor's profile {profile}, which denies it"
        return Cause("userns-restricted", missing, why, DOCTOR)
    why = "a security module, or a chroot around this process, refuses it"
    return Cause("userns-restricted", missing, why, "ask who set up SELinux, or the chroot, on this machine")


def apparmor_restricts() -> bool:
    """Return whether AppArmor allows user namespaces only for programs with a profile, as on Ubuntu 23.10 and later."""
    return sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1"


def apparmor_profile() -> str | None:
    """Return the name of the AppArmor profile that confines this process, or None."""
    for path in ("/proc/self/attr/apparmor/current", "/proc/self/attr/current"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                name, _, mode = file.read().strip().rpartition(" ")
        except OSError:
            continue
        return name if mode in ("(enforce)", "(kill)") else None
    return None


def has_capability(number: int) -> bool:
    """Return whether this process has a capability in its user namespace."""
    return bool(int(proc.fields("/proc/self/status").get("CapEff", "0"), 16) >> number & 1)


def is_filtered() -> bool:
    """Return whether a seccomp filter applies to this process."""
    return proc.fields("/proc/self/status").get("Seccomp") == "2"
