"""What a container needs besides, when its policy has a network: a resolver's file, an address for loopback."""

from __future__ import annotations

import hashlib
import os
import threading

from ringfence.backends.engine import guestd_bundle
from ringfence.guest.launch import listeners
from ringfence.host import state
from ringfence.shared import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ringfence.plan.model import LinuxPlan


# MERGED: Gives a container's loopback one address more, from outside: inside, nobody has the right to.
#
# Without the address, `getaddrinfo` with AI_ADDRCONFIG finds nothing (kernel fact 13). Only root can add it; for other
# callers the proxy stands in.


_WITHIN_S = 5.0


def give_address(pid: int, guestd: str) -> None:
    """To the container of that first process, before there is a guest. Where it cannot be done, nothing happens.

    An engine may count processes otherwise than we do: it is the right one when it sees our guestd's files.
    """
    if os.geteuid() != 0 or pid <= 0:
        return
    try:
        if not os.path.samestat(os.stat(f"/proc/{pid}/root{guestd_bundle.INSIDE}"), os.stat(guestd)):
            return
        found = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    # In a thread that ends there: a namespace is a thread's.
    thread = threading.Thread(target=_give, args=(found,), name="ringfence-loopback", daemon=True)
    thread.start()
    thread.join(_WITHIN_S)


def _give(found: int) -> None:
    try:
        if os.path.samestat(os.fstat(found), os.stat("/proc/self/ns/net")):
            return  # the host's own
        syscalls.setns(found, syscalls.CLONE_NEWNET)
        listeners.add_address()
    except OSError:
        return  # as for those that are not root
    finally:
        os.close(found)


RESOLVER = "etc/resolv.conf"


class Egress:
    """For one start of one container. Nothing of it is there when the plan has no network."""

    def __init__(self, plan: LinuxPlan, resolver: str | None) -> None:
        """`resolver` is the text of the file that names it."""
        self.outlets = plan.outlets
        self._resolver = resolver

    def mounts(self) -> list[Any]:
        """Engines put a file of their own over the image's, and it names no resolver."""
        if self.outlets is None or self._resolver is None:
            return []
        from docker.types import Mount

        return [Mount(f"/{RESOLVER}", _kept(self._resolver), type="bind", read_only=True)]

    def give_address(self, pid: Callable[[], int], guestd: str) -> None:
        if self.outlets is not None:
            give_address(pid(), guestd)


def _kept(text: str) -> str:
    """A file of ours with that text."""
    path = f"{state.disk_directory('resolver')}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not os.path.exists(path):
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.rename(file.name, path)
    return path
