"""Output that a cell printed before a message reaches the host before the message, even when both come at once."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from ringfence.guest.guestd import job
from ringfence.shared import framing


class Guestd:
    """A guestd that records the order in which messages and output are passed on."""

    congested = False

    def __init__(self) -> None:
        self.passed: list[tuple[int, bytes]] = []

    def relay(self, kind: int, _: int, data: bytes) -> None:
        self.passed.append((kind, data))

    def watch(self, *_: object) -> None:
        """Do nothing: these tests wait for no descriptor."""

    unwatch = watch


@pytest.fixture
def cell() -> Any:
    one = job.Job.__new__(job.Job)
    one._guestd = Guestd()  # type: ignore[assignment]  # stands in for it
    one.id, one.alone, one._credit, one._paused, one._status, one._said = 1, False, 1 << 20, False, None, b""
    return one


def test_what_is_printed_while_a_message_is_read_comes_before_the_next_message(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest prints and says that it is done at the moment when guestd has just found nothing printed."""
    out, printing = os.pipe2(os.O_NONBLOCK)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    cell._outputs = {out: framing.STDOUT, ours.fileno(): framing.LINE}
    theirs.send(b"display ")
    read = os.read
    looks: list[int] = []

    def reading(fd: int, count: int) -> bytes:
        try:
            return read(fd, count)
        finally:
            if fd == out and not looks:
                looks.append(fd)
                os.write(printing, b"after")
                theirs.send(b"done")

    monkeypatch.setattr(os, "read", reading)
    cell._read_line(ours.fileno())
    cell._read_line(ours.fileno())
    assert cell._guestd.passed == [(framing.LINE, b"display "), (framing.STDOUT, b"after"), (framing.LINE, b"done")]
    for fd in (out, printing):
        os.close(fd)
    ours.close()
    theirs.close()


def test_a_message_that_was_read_waits_for_credit_behind_what_was_printed(cell: Any) -> None:
    out, printing = os.pipe2(os.O_NONBLOCK)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    cell._outputs = {out: framing.STDOUT, ours.fileno(): framing.LINE}
    cell._credit = 10
    os.write(printing, b"x" * 10)
    theirs.send(b"done")
    cell._read_line(ours.fileno())
    assert cell._guestd.passed == [(framing.STDOUT, b"x" * 10)]
    cell.add_credit(1 << 20)
    assert cell._guestd.passed == [(framing.STDOUT, b"x" * 10), (framing.LINE, b"done")]
    for fd in (out, printing):
        os.close(fd)
    ours.close()
    theirs.close()
