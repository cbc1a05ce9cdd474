"""Puts a process into a host that refuses something, then executes Python there. Run as a program, as any user.

    python situations.py NAME CODE

Made with namespaces and filters that a user may make for itself, so the host is not touched.
"""

from __future__ import annotations

import os
import struct
import sys

from ringfence.shared import syscalls as k

_UNSHARE, _CLONE, _MOUNT = 272, 56, 165
_EPERM, _EACCES = 1, 13


def refuse(*calls: int, error: int) -> None:
    """Install a filter like a container engine's: these calls fail, all other calls pass."""
    load_number = struct.pack("HBBI", 0x20, 0, 0, 0)
    program = load_number
    for position, number in enumerate(calls):
        to_refusal = len(calls) - position
        program += struct.pack("HBBI", 0x15, to_refusal, 0, number)
    program += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    program += struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error)
    k.no_new_privileges()
    k.Filter(program).install()


def own_namespaces() -> None:
    """A user namespace with this user's own number, and a mount namespace in it. Rights last until the next exec."""
    uid, gid = os.geteuid(), os.getegid()
    k.unshare(k.CLONE_NEWUSER | k.CLONE_NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        write(f"/proc/self/{name}", text)


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def pretend_settings(**settings: str) -> None:
    """Kernel settings that this kernel may not have, laid over the real ones."""
    own_namespaces()
    k.mount("tmpfs", "/proc/sys/kernel", "tmpfs", 0)
    for name, value in settings.items():
        write(f"/proc/sys/kernel/{name}", f"{value}\n")


def no_user_namespaces() -> None:
    own_namespaces()
    write("/proc/sys/user/max_user_namespaces", "0")


def container_filter() -> None:
    refuse(_UNSHARE, error=_EPERM)


def masked_proc() -> None:
    own_namespaces()
    k.mount("/dev/null", "/proc/timer_list", None, k.MS_BIND)


def apparmor() -> None:
    """Pretend to be Ubuntu since 23.10: unshare succeeds, and everything that needs a right inside is denied."""
    pretend_settings(apparmor_restrict_unprivileged_userns="1")
    refuse(_MOUNT, error=_EACCES)


def debian_switch() -> None:
    pretend_settings(unprivileged_userns_clone="0")
    refuse(_UNSHARE, error=_EPERM)


def no_landlock() -> None:
    refuse(444, error=38)


def open_host() -> None:
    return


def main(name: str, code: str) -> None:
    globals()[name]()
    os.execv(sys.executable, [sys.executable, "-W", "ignore", "-c", code])


if __name__ == "__main__":
    main(*sys.argv[1:])
