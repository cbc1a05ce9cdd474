"""The launcher starts our zygote with a Python and does nothing else, however it is called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accounts import OrdinaryUser
from ringfence.host import zygote_start

PYTHON = os.path.realpath(sys.executable)


def launch(*argv: str, launcher: str | None = None) -> tuple[int, str]:
    """Return exit code and output. Descriptor 3 is closed, therefore a zygote that does start ends at once."""
    program = launcher or zygote_start.launcher()
    done = subprocess.run([program, *argv], capture_output=True, text=True, env={}, timeout=10, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("argv", [(), (PYTHON, "-c", "print(1)"), (PYTHON, "")])
def test_it_takes_one_argument(argv: tuple[str, ...]) -> None:
    assert launch(*argv) == (126, "ringfence launch: it takes one argument, the Python to start\n")


@pytest.mark.parametrize("program", ["/bin/sh", "python3", "", "-c", "../python3", "/usr/bin/env", "/python3/sh"])
def test_it_starts_nothing_but_a_python(program: str) -> None:
    assert launch(program) == (126, f"ringfence launch: {program} is not the absolute path of a Python\n")


def test_a_link_to_it_does_not_make_other_files_ours(tmp_path: Path) -> None:
    """The zygote is the file beside the launcher: beside a link any user could put a file."""
    link = tmp_path / "launch"
    link.symlink_to(zygote_start.launcher())
    (tmp_path / "__main__.py").write_text("print('foreign code')")
    assert launch(PYTHON, launcher=str(link)) == (126, f"ringfence launch: it was called through a link, {link}\n")


def test_it_starts_the_zygote_with_the_python_named() -> None:
    code, said = launch(PYTHON)
    assert (code, "ringfence launch" in said, "ringfence/guest/launch/zygote.py" in said) == (1, False, True)


_FOREIGN = """
import subprocess, sys
for program in sys.argv[2:]:
    done = subprocess.run([sys.argv[1], program], capture_output=True, text=True, env={})
    print(done.returncode, "chosen by the caller" in done.stdout, "can be changed by this user" in done.stderr)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root owns the launcher here, and another user calls it")
def test_who_may_not_change_the_launcher_does_not_choose_its_program(ordinary_user: OrdinaryUser) -> None:
    launcher = str(ordinary_user.source / "ringfence" / "guest" / "launch" / "launch")
    mine, open_to_all = ordinary_user.home / "my-python3", Path(ordinary_user.source, "python3")
    try:
        for path in (mine, open_to_all):
            path.write_text("#!/bin/sh\necho chosen by the caller\n")
            path.chmod(0o755)
        shutil.chown(mine, ordinary_user.uid, ordinary_user.gid)
        open_to_all.chmod(0o777)
        done = ordinary_user.run(_FOREIGN, launcher, str(mine), str(open_to_all), "/usr/bin/python3")
    finally:
        mine.unlink()
        open_to_all.unlink()
    assert done.stdout.splitlines() == ["126 False True", "126 False True", "1 False False"], done.stderr
