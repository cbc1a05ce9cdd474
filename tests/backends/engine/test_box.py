"""A box that an engine isolates leaves nothing, whatever fails while it starts or ends."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.engine.box import EngineBox
from ringfence.backends.gvisor.backend import GvisorWall
from ringfence.backends.gvisor.bundle import MadeBundle
from ringfence.backends.gvisor.runsc import Runsc


class FailingWall:
    """A box's place that cannot be killed."""

    removed = False

    def kill(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def remove(self) -> None:
        self.removed = True


def test_a_box_whose_kill_fails_is_removed_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    wall: Any = FailingWall()
    stand_in: Any = None
    ended: list[bool] = []
    box = EngineBox("gvisor", wall, ours, enforcement=stand_in, env={})
    box.on_destroyed.append(lambda: ended.append(True))
    with theirs, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        box.close()
    assert (box.wait_destroyed(5), wall.removed, ended, ours.fileno()) == (True, True, [True], -1)


def test_a_runsc_that_cannot_be_started_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    class Group:
        def join_fds(self) -> list[int]:
            return [os.open("/", os.O_PATH), os.open("/", os.O_PATH)]

        def thaw(self) -> None: ...

        def remove(self) -> None: ...

    group: Any = Group()
    made = MadeBundle(binds=(), mounted=False, network="none")
    before = sorted(os.listdir("/proc/self/fd"))
    wall = GvisorWall(Runsc("/usr/bin/runsc", "fake", "ptrace"), str(tmp_path / "bundle"), group, made)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(BlockingIOError):
        wall.start()
    wall.kill()
    wall.remove()
    assert sorted(os.listdir("/proc/self/fd")) == before
