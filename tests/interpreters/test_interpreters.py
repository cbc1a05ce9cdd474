"""The package on every other Python of this machine: runs, sessions, forks with memory, snapshots, the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import weaker

SMOKE = Path(__file__).with_name("smoke.py")
SOURCE = SMOKE.parents[2] / "src"
OLDEST = (3, 11)
_TELL = "import sys; print(*sys.version_info[:2], sys.implementation.name)"


def found() -> dict[str, str]:
    """Return, by version, the interpreters of other versions than this one that are not too old."""
    folders = [folder for folder in (*os.get_exec_path(), "/usr/bin", "/usr/local/bin") if os.access(folder, os.R_OK)]
    paths = [path for folder in folders for path in sorted(Path(folder).glob("python3.*[0-9]"))]
    paths += sorted(Path.home().glob(".pyenv/versions/*/bin/python3"))
    versions: dict[str, str] = {}
    for path in paths:
        told = subprocess.run([path, "-c", _TELL], capture_output=True, text=True, check=False, timeout=60)
        words = told.stdout.split()
        if told.returncode or words[2:] != ["cpython"]:
            continue
        version = (int(words[0]), int(words[1]))
        if version >= OLDEST and version != sys.version_info[:2]:
            versions.setdefault(".".join(words[:2]), str(path))
    return versions


FOUND = found()


@pytest.mark.skipif(not FOUND, reason="no other Python of 3.11 or later on this machine")
def test_other_interpreters_were_found() -> None:
    assert FOUND.keys() <= {"3.11", "3.12", "3.13", "3.14"}, "declare it in pyproject.toml, and here"


@pytest.mark.parametrize("version", FOUND)
def test_the_package_works_on(version: str) -> None:
    done = subprocess.run(
        [FOUND[version], "-W", "error::DeprecationWarning", str(SMOKE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    number = [int(part) for part in version.split(".")]
    assert json.loads(done.stdout) == {
        "python": number,
        "run": ["ok", f"{number[0]} {number[1]}\n", "42"],
        "session": ["2", "a,b\n1,2\n", "a,b\n1,2\n"],
        "fork": ["(3, 499500)", "2"],
        "snapshot": "a,b\n1,2\n",
        "gateway": ["b'hello'\n", "error"],
    }


_IMPORT = """
import ringfence
done = ringfence.run("import mine; mine.word")
print(done.value, done.backend)
"""


@pytest.mark.parametrize("above", ["/var/tmp", "/tmp", "/opt"])
def test_a_virtual_environment_works_wherever_it_lies(above: str) -> None:
    """/var/tmp is a link to /tmp in a sandbox, and /tmp is the guest's own."""
    if not os.access(above, os.W_OK):
        pytest.skip(f"{above} is not ours to write to")
    with tempfile.TemporaryDirectory(prefix="rf-tests-", dir=above) as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
        (module,) = [Path(folder, path) / "mine.py" for path in Path(folder).glob("lib/python3*/site-packages")]
        module.write_text("word = 'mine'\n")
        done = subprocess.run(
            [f"{folder}/bin/python", "-W", weaker.SILENT, "-c", _IMPORT],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        assert (done.stdout, done.stderr) == ("'mine' process\n", "")
