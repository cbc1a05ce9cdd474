"""The programs of the host that a build starts: their arguments, and that no program outlives the build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringfence.images import packages


@pytest.mark.skipif(os.geteuid() != 0, reason="without uids to map an ordinary user cannot build")
def test_maintainers_scripts_see_none_of_the_callers_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "private")
    monkeypatch.setenv("https_proxy", "http://proxy.example.org")
    running = packages._start(["env"], str(tmp_path))
    told = running.communicate(timeout=60)[0].decode().splitlines()
    assert "https_proxy=http://proxy.example.org" in told
    assert "DEBIAN_FRONTEND=noninteractive" in told
    assert [line for line in told if "private" in line] == []
    known = {"HOME", "USER", "LOGNAME", "LANG", "APT_CONFIG", "SOURCE_DATE_EPOCH", "PATH", "TMPDIR", "LC_ALL", "_"}
    names = {line.partition("=")[0] for line in told} - known - {"DEBIAN_FRONTEND"}
    assert {name for name in names if not name.lower().endswith("_proxy")} == set()


_DOWNLOAD = """
from ringfence.images import packages
packages._run(["/bin/sh", "-c", "echo $$ > pid.new; mv pid.new pid; exec sleep 600"], {folder!r})
"""


def test_a_download_ends_with_the_build_that_was_killed(tmp_path: Path) -> None:
    """Else the download would go on writing into a folder that the next start removes."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    code = _DOWNLOAD.format(folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}) as build:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        started = int((tmp_path / "pid").read_text())
        build.kill()
    try:
        while Path(f"/proc/{started}/cwd").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{started}/cwd").exists()
    finally:
        if Path(f"/proc/{started}/cwd").exists():
            os.kill(started, signal.SIGKILL)
