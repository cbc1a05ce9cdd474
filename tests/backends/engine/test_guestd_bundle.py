"""The folder that guestd runs from: made completely or not at all, and swept after a process that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.backends.engine import guestd_bundle
from ringfence.host import process_id

KILLED = """
import os, sys
from ringfence.backends.engine import guestd_bundle as onefile, guestd_bundle as runtime
onefile.make = lambda *_: os.kill(os.getpid(), 9)
runtime.folder(sys.argv[1])
"""


def test_what_a_killed_maker_left_goes_when_the_next_one_makes_it(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=60).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    made = guestd_bundle.folder(str(tmp_path))
    assert os.listdir(tmp_path) == [os.path.basename(made)]


def test_what_another_makes_just_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guestd_bundle, "_make", os.mkdir)
    theirs = tmp_path / f"guestd-0.{process_id.name()}_abc"
    theirs.mkdir()
    guestd_bundle.folder(str(tmp_path))
    assert theirs.exists()
