"""Run the benchmarks as a user without rights, from a copy of the project that this user can read."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.starting import zerobox

USER = "ringfence-test"
ROOT = Path(__file__).resolve().parents[1]


def run_as_user(arguments: list[str]) -> int:
    """Run the benchmarks and return their exit code. Needs root, unless this process already runs as that user."""
    if os.geteuid() != 0:
        return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT).returncode
    user = _account()
    with tempfile.TemporaryDirectory(prefix="rf-bench-") as folder:
        os.chmod(folder, 0o755)
        for name in ("src", "benchmarks", "bin"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        env = {"HOME": user.pw_dir, "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": f"{folder}/src"}
        temporary = Path(folder, "tmp")  # the peers write there, and not every /tmp is for all
        temporary.mkdir()
        os.chown(temporary, user.pw_uid, user.pw_gid)
        env["TMPDIR"] = str(temporary)
        runtime = f"/run/user/{user.pw_uid}"
        if os.path.isdir(runtime):
            env["XDG_RUNTIME_DIR"] = runtime
        peer = zerobox()
        if peer is not None:
            env["ZEROBOX_BIN"] = shutil.copy(peer, f"{folder}/zerobox")
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        python = _interpreter(user)
        # Written by root, so that both sides of a comparison start from compiled modules.
        subprocess.run([python, "-m", "compileall", "-q", folder], check=True)
        done = subprocess.run(
            [python, "-m", "benchmarks", *arguments], cwd=folder, env=env, user=user.pw_uid, group=user.pw_gid,
            extra_groups=[], start_new_session=True,
        )  # fmt: skip
    return done.returncode


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", USER], check=True, capture_output=True)
        return pwd.getpwnam(USER)


def _interpreter(user: pwd.struct_passwd) -> str:
    """Return this interpreter if that user can start it, else another: this one may be below root's home."""
    for path in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([path, "-c", "1"], user=user.pw_uid, group=user.pw_gid, capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return path
    raise SystemExit(f"no Python that {user.pw_name} could start")
