"""Gives a container's loopback one address more, from outside: inside, nobody has the right to.

Without it `getaddrinfo` with AI_ADDRCONFIG finds nothing (M13). Only root can; for others the proxy stands in.
"""

from __future__ import annotations

import os
import threading

from ringfence.backends.walled import runtime
from ringfence.guest import kernel, outlets

_WITHIN_S = 5.0


def give_address(pid: int, guestd: str) -> None:
    """To the container of that first process, before there is a guest. Where it cannot be done, nothing happens.

    An engine may count processes otherwise than we do: it is the right one when it sees our guestd's files.
    """
    if os.geteuid() != 0 or pid <= 0:
        return
    try:
        if not os.path.samestat(os.stat(f"/proc/{pid}/root{runtime.INSIDE}"), os.stat(guestd)):
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
        kernel.setns(found, kernel.CLONE_NEWNET)
        outlets.add_address()
    except OSError:
        return  # as for those that are not root
    finally:
        os.close(found)
