"""The listeners that a sandbox with a network passes to the host: all of them, or the sandbox does not start."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from ringfence.backends.process.box import ProcessBox
from ringfence.errors import SandboxLostError
from ringfence.plan.model import Outlets
from ringfence.shared import fast_stdlib

OUTLETS = Outlets(ports=(80, 443), proxy=3128, streams=64)  # and the resolver's two, and the proxy


def taken(count: int) -> list[int]:
    """Send `count` listeners to a sandbox and return the descriptors that it keeps."""
    box = object.__new__(ProcessBox)
    box.plan = SimpleNamespace(outlets=OUTLETS)  # type: ignore[assignment]  # all that is asked of it
    ours, theirs = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
    sent = [os.dup(0) for _ in range(count)]
    try:
        if count:
            fast_stdlib.send_fds(theirs, b"listeners", sent)
        box._take_listeners(ours)
        return box.listeners
    finally:
        for fd in sent:
            os.close(fd)
        theirs.close()


def test_all_listeners_are_kept() -> None:
    found = taken(5)
    assert len(found) == 5
    for fd in found:
        os.close(fd)


def test_fewer_than_were_sent_are_an_error_of_the_callers_descriptors_and_none_is_kept() -> None:
    """The kernel hands over as many as there is room for: the sandbox started, and nothing answered its guest."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many open files") as caught:
        taken(3)
    assert (caught.value.errno, len(os.listdir("/proc/self/fd"))) == (errno.EMFILE, before)


def test_none_at_all_is_a_sandbox_that_was_lost() -> None:
    with pytest.raises(SandboxLostError, match="came without its listeners"):
        taken(0)
