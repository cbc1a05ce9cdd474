"""Mounts of the host below the source of a mount are read-only when the mount is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.container import equipped
from backends_declared import DECLARED, missing
from ringfence import Mount, Policy, Sandbox


@pytest.fixture(scope="module", params=["process", "container", "podman", "gvisor"])
def make(request: pytest.FixtureRequest) -> Callable[..., Sandbox]:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return DECLARED[request.param].make()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """Make a folder with file systems mounted below, nested, which any user may write to."""
    equipped.skip_unless_root()
    tmp_path.chmod(0o755)
    folder = tmp_path / "project"
    places = [folder / "a disk", folder / "a disk" / "deeper", folder / ".vscode" / "disk"]
    try:
        for place in places:
            place.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "tmpfs", place], check=True)
            (place / "kept").write_text("the host's")
            (place / "kept").chmod(0o666)
        yield folder
    finally:
        for place in reversed(places):
            subprocess.run(["umount", "-l", place], check=False)


def write(box: Sandbox, path: str) -> tuple[int | None, str]:
    done = box.exec(["sh", "-c", f"cat '{path}/kept' && echo guest > '{path}/kept'"])
    return done.exit_code, done.stdout


def test_a_read_only_mount_is_read_only_below_other_file_systems_too(
    make: Callable[..., Sandbox], project: Path
) -> None:
    with make(policy=Policy(mounts=[Mount(project, target="/p", mode="ro")])) as box:
        for name in ("a disk", "a disk/deeper", ".vscode/disk"):
            code, shown = write(box, f"/p/{name}")
            assert (code != 0, shown) == (True, "the host's")
            assert (project / name / "kept").read_text() == "the host's"


def test_a_protected_folder_of_a_writable_mount_is_too(make: Callable[..., Sandbox], project: Path) -> None:
    with make(policy=Policy(mounts=[Mount(project, target="/p", mode="rw")])) as box:
        code, shown = write(box, "/p/.vscode/disk")
        assert (code != 0, shown) == (True, "the host's")
        assert (project / ".vscode" / "disk" / "kept").read_text() == "the host's"
        assert write(box, "/p/a disk/deeper") == (0, "the host's")
