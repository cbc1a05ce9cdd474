"""Fixtures: an empty store for every test, and a small Debian image that is built once and kept in .cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import images
from ringfence.images.store import ImageStore

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "images"
PACKAGES = ["python3"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageStore]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    yield ImageStore()
    for info in images.list_images():
        images.remove(info.name)


@pytest.fixture(scope="session")
def debian_archive() -> Path:
    """Return an archive of Debian with Python, which the package itself builds once."""
    path = CACHE / f"debian-{'-'.join(PACKAGES)}.tar"
    if path.exists():
        return path
    if os.geteuid() != 0:
        pytest.skip("building the test image needs root once; then it is in .cache")
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is missing: make system")
    CACHE.mkdir(parents=True, exist_ok=True)
    program = (
        "import sys; from ringfence import images; from ringfence.images.builder import Recipe\n"
        f"images.build('debian', Recipe(apt={PACKAGES!r}, env={{'GREETING': 'hello'}}))\n"
        "images.export('debian', sys.argv[1])"
    )
    scratch = CACHE / "store"
    try:
        subprocess.run(
            [sys.executable, "-c", program, str(path)],
            check=True,
            timeout=280,
            env={**os.environ, "XDG_DATA_HOME": str(scratch), "PYTHONPATH": str(CACHE.parents[1] / "src")},
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


@pytest.fixture(scope="module")
def debian(debian_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of that image in a store of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        images.import_image("debian", debian_archive)
        yield "debian"
        for info in images.list_images():
            images.remove(info.name)
