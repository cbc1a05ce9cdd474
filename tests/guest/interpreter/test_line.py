"""The line of an interpreter to the host: what a guest could do through it to the monitor, which sandboxes share."""

from __future__ import annotations

import threading

import pytest

import ringfence
from programs import read_program

_SOCKETS = """
import os, stat
found = [fd for fd in range(64) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)]
"""
# Whoever takes the last reference to a connection that lingers waits until its peer has read everything.
_LINGERS = _SOCKETS + read_program("guest/line_lingers.py")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_guest_holds_no_socket_by_which_it_could_hand_us_files(fresh: bool) -> None:
    """D03: the host would have to close the descriptors received, and the guest would choose how long that takes."""
    backend = ringfence.backends.Process(fresh=fresh)
    assert ringfence.run(f"{_SOCKETS}\nprint(found)", backend=backend).stdout == "[]\n"
    with ringfence.Sandbox(backend=backend) as box:
        assert box.run(f"{_SOCKETS}\nprint(found)").stdout == "[]\n"


def test_a_guest_that_hands_out_a_lingering_connection_holds_up_no_neighbour() -> None:
    with ringfence.Sandbox() as box, ringfence.Sandbox() as neighbour:
        neighbour.run("pass")
        box.run("pass")
        worker = threading.Thread(target=box.run, args=(_LINGERS,), kwargs={"timeout_s": 2})
        worker.start()
        try:
            answers = [neighbour.run("import time; time.sleep(0.3); 6 * 7", timeout_s=2) for _ in range(4)]
        finally:
            worker.join()
        assert [(answer.status, answer.value) for answer in answers] == [("ok", "42")] * 4
