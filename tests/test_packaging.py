"""The released files: the sdist has everything that the Makefile and tests use, the wheel has the whole package."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tracked(*patterns: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\0")) - {""}


def built(kind: str, folder: Path, project: Path = ROOT) -> Path:
    code = f"import hatchling.build as b; print(b.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    return folder / done.stdout.split()[-1]


@pytest.fixture(autouse=True)
def _needs_a_clone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: what belongs to the project is not known")


def test_the_sdist_holds_every_file_of_the_project(tmp_path: Path) -> None:
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in tracked() if not name.startswith(".ci")} - names == set()


def test_the_wheel_holds_the_whole_package_and_the_command(tmp_path: Path) -> None:
    with zipfile.ZipFile(built("wheel", tmp_path)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        modes = {name: archive.getinfo(name).external_attr >> 16 & 0o111 for name in names}
    package = {name.removeprefix("src/") for name in tracked("src")}
    script = next(name for name in names if name.endswith(".data/scripts/ringfence"))
    assert names - {script} == package
    assert (modes["ringfence/guest/launch/launch"], modes["ringfence/guest/launch/trial"]) == (0o111, 0o111)


def test_the_attacks_are_a_wheel_of_their_own(tmp_path: Path) -> None:
    with zipfile.ZipFile(built("wheel", tmp_path, ROOT / "attacks")) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("attacks/src/") for name in tracked("attacks/src")}


def test_the_attacks_are_of_the_same_version_and_fit_it_alone() -> None:
    """Cases reach behind the public names, which change from version to version."""
    ours, theirs = (
        tomllib.loads((ROOT / name).read_text())["project"] for name in ("pyproject.toml", "attacks/pyproject.toml")
    )
    pin = f"=={ours['version']}"
    assert theirs["version"] == ours["version"]
    assert theirs["dependencies"] == [ours["name"] + pin]
    assert ours["optional-dependencies"]["attack"] == [theirs["name"] + pin]
