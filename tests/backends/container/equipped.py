"""An ordinary user with the Engine SDK, for tests of situations that only an ordinary user meets."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from accounts import OrdinaryUser

_PACKAGES = ("docker", "requests", "urllib3", "idna", "certifi", "charset_normalizer")


def sdk(user: OrdinaryUser) -> Path:
    """Return a folder that the user can read, with the packages of the extra `docker`."""
    folder = user.source.parent / "sdk"
    if not folder.exists():
        for name in _PACKAGES:
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            shutil.copytree(Path(found.origin).parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    return folder


def skip_unless_root() -> None:
    import os

    if os.geteuid() != 0:
        pytest.skip("only root can make an engine and let another user at it")
