"""A caller with a closed umask: guests are another user, and can read their root all the same."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends_declared import DECLARED, missing
from ringfence.backends.engine import guestd_bundle
from ringfence.backends.gvisor import runsc


@pytest.fixture
def closed() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_gvisor_starts_under_a_closing_umask(closed: None) -> None:
    reason = missing("gvisor")
    if reason is not None:
        pytest.skip(reason)
    with DECLARED["gvisor"].make()() as box:
        assert box.exec(["cat", "/etc/hostname"]).stdout == "ringfence\n"
    path, platform = shutil.which("runsc"), runsc.find().platform
    assert path is not None
    assert runsc._probe(path, platform) is None  # an answer is kept for a boot, so it is asked for here


def test_what_guestd_runs_from_can_be_read_by_all_under_a_closing_umask(closed: None, tmp_path: Path) -> None:
    made = Path(guestd_bundle.folder(str(tmp_path)))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (made, *made.rglob("*")) if not path.is_symlink()}
    assert modes == {0o755, 0o644}
    assert os.access(made / "bin" / "python3", os.X_OK)
