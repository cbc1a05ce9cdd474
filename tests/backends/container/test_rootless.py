"""Podman of an ordinary user, without root: Ringfence starts the service and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accounts import OrdinaryUser
from backends.container import equipped
from programs import read_program

PROBE = read_program("backends/rootless_probe.py")


@pytest.fixture(scope="module")
def places(ordinary_user: OrdinaryUser) -> Iterator[dict[str, str]]:
    """Return variables that keep all of Podman's files in one folder, removed after Podman's last process."""
    equipped.skip_unless_root()
    for program in ("podman", "newuidmap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if f"{ordinary_user.name}:" not in Path("/etc/subuid").read_text():
        pytest.skip(f"{ordinary_user.name} has no line in /etc/subuid")
    folder = Path(tempfile.mkdtemp(prefix="rf-tests-rootless-", dir="/var/tmp"))
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()  # crun runs nothing where both versions are mounted
    runtime = "crun" if unified else "runc"
    (folder / "containers.conf").write_text(f'[engine]\nruntime = "{runtime}"\ncgroup_manager = "cgroupfs"\n')
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/data"\nrunroot = "{folder}/run"\n'
    )
    shutil.chown(folder, ordinary_user.uid, ordinary_user.gid)
    yield {
        "CONTAINERS_CONF": f"{folder}/containers.conf",
        "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
        "XDG_RUNTIME_DIR": str(folder),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    for pid, _, _ in _processes(str(folder)):  # Podman's own holder of the user's namespace stays by design
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    time.sleep(0.2)
    subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=False)


@pytest.fixture(scope="module")
def said(ordinary_user: OrdinaryUser, places: dict[str, str]) -> dict[str, Any]:
    code = f"SDK = {str(equipped.sdk(ordinary_user))!r}\nVARIABLES = {places!r}{PROBE}"
    done = ordinary_user.run(code, timeout_s=180)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_sandbox_runs_and_nobody_inside_is_a_user_of_the_host(said: dict[str, Any]) -> None:
    assert (said["whole"], said["value"]) == (True, "42")
    assert said["inside"][-2:] == ["user", "closed"]
    assert said["inside"][:3] != ["0", "0", "4294967295"]


def test_limits_that_no_cgroup_holds_are_said_to_be_weaker_and_refused_by_a_strict_policy(said: dict[str, Any]) -> None:
    """On a host that delegates cgroups to its users the engine enforces the limits: then the test ends early."""
    if said["memory"][1] == "full":
        assert said["peak"] is not None
        return
    assert said["memory"] == ["RLIMIT_DATA", "weaker"]
    assert said["weaker"] == ["cpu", "memory", "disk"]
    assert (said["limit"], said["peak"]) == (str(512 << 10), None)
    assert "a weaker mechanism would enforce" in said["strict"]


def test_the_service_that_we_started_ends_with_us(said: dict[str, Any], places: dict[str, str]) -> None:
    assert said["value"] == "42"
    deadline = time.monotonic() + 30
    while (left := _services(places["XDG_RUNTIME_DIR"])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


HOLDERS = ("catatonit", "podman pause")  # the second where the first is not installed
_START = """
import os, sys
sys.path.append({sdk!r})
os.environ.pop("XDG_RUNTIME_DIR", None)
os.environ.update({variables!r})
from ringfence import Sandbox
from ringfence.backends import Container
with Sandbox(backend=Container(engine="podman")) as box:
    print(box.backend, flush=True)
if sys.argv[1] == "killed": os._exit(0)
"""


def test_without_a_runtime_directory_its_holder_ends_too(ordinary_user: OrdinaryUser, places: dict[str, str]) -> None:
    """The holder of the namespace ends with the library, or, when the library was killed, with the next start."""
    variables = {name: value for name, value in places.items() if name != "XDG_RUNTIME_DIR"}
    code = _START.format(sdk=str(equipped.sdk(ordinary_user)), variables=variables)
    for how in ("killed", "by itself"):
        done = ordinary_user.run(code, how, timeout_s=60)
        assert (done.returncode, done.stdout) == (0, "container\n"), done.stderr
    held = f"{ordinary_user.home}/.local/state/ringfence/podman/"
    deadline = time.monotonic() + 20
    while (left := [name for _, name, _ in _processes(held) if name in HOLDERS]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _services(folder: str) -> list[str]:
    """Less what holds the user's namespace: in a runtime directory of the user's it is Podman's own, and stays."""
    return [words for _, name, words in _processes(folder) if name not in HOLDERS]


def _processes(folder: str) -> list[tuple[int, str, str]]:
    """Return pid, name and command line of each process with this runtime directory: Podman's service, its containers,
    and the process that holds the user's namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if f"XDG_RUNTIME_DIR={folder}".encode() in (entry / "environ").read_bytes():
                    found.append((int(entry.name), (entry / "comm").read_text().strip(), words))
    return found
