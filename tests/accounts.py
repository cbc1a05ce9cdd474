"""A user without rights for tests that run as root, and how to run Python as that user."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path
from typing import NamedTuple

USER_NAME = "ringfence-test"


def let_others_through(folder: Path) -> None:
    """Open a folder of pytest to other users, and the pytest folders above it. /tmp itself keeps its mode."""
    for path in (folder, *folder.parents):
        if path == folder or path.name.startswith("pytest-"):
            path.chmod(0o755)


class OrdinaryUser(NamedTuple):
    """A user without rights, and a copy of the source that it can read."""

    name: str
    uid: int
    gid: int
    home: Path
    source: Path
    python: str

    def run(
        self, code: str | Path, *args: str, stdin: str | None = None, timeout_s: float = 50
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code, or a file of code, as this user, with only the variables that a login would set."""
        mine = os.geteuid() == self.uid
        command = [self.python, "-c", code] if isinstance(code, str) else [self.python, str(code)]
        return subprocess.run(
            [*command, *args],
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            cwd=self.home,
            env=self.environment(),
            timeout=timeout_s,
            check=False,
            start_new_session=True,
            user=None if mine else self.uid,
            group=None if mine else self.gid,
            extra_groups=None if mine else [],
        )

    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "USER": self.name,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(self.source),
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def account() -> pwd.struct_passwd:
    """Return the tests' account when this process is root, made if missing; else the account of this process."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    try:
        return pwd.getpwnam(USER_NAME)
    except KeyError:
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", USER_NAME], check=True, capture_output=True)
        return pwd.getpwnam(USER_NAME)
