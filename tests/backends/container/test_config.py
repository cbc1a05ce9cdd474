"""The settings that a container is created with, by the engine's own account and from inside; no option opens any."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from programs import read_program
from ringfence import Limits, Mount, Policy, PolicyError, Sandbox, SandboxManager
from ringfence.backends import Container
from ringfence.backends.container import api as engines

POLICY = Policy(limits=Limits(memory="256M", processes=32, cpus=0.5, disk="8M", disk_files=500))


def inspected(backend: Container) -> dict[str, Any]:
    api = engines.find(backend.engine, backend.socket).api
    (mine,) = [one for one in api.containers(all=True) if "ringfence.owner" in (one.get("Labels") or {})]
    found: dict[str, Any] = api.inspect_container(mine["Id"])
    return found


def test_the_engine_says_that_everything_is_closed(contained: Container) -> None:
    with Sandbox(backend=contained, policy=POLICY):
        found = inspected(contained)
    host, config = found["HostConfig"], found["Config"]
    assert {
        "network": host["NetworkMode"],
        "read-only root": host["ReadonlyRootfs"],
        "privileged": host["Privileged"],
        "capabilities added": host["CapAdd"] or [],
        "pids": host["PidsLimit"],
        "swap": host["MemorySwap"] - host["Memory"],
        "pid namespace": host["PidMode"] in ("", "private"),
        "ipc namespace": host["IpcMode"] in ("private", "shareable"),  # the second is Podman's: its own all the same
        "uts namespace": host["UTSMode"] in ("", "private"),
        "devices": host["Devices"] or [],
        "ports": host["PortBindings"] or {},
        "log driver": host["LogConfig"]["Type"],
        "restart": host["RestartPolicy"]["Name"] in ("", "no"),
        "no-new-privileges": any(option.startswith("no-new-privileges") for option in host["SecurityOpt"]),
        "unconfined": [option for option in host["SecurityOpt"] if "unconfined" in option],
        "terminal": config["Tty"],
    } == {
        "network": "none",
        "read-only root": True,
        "privileged": False,
        "capabilities added": [],
        "pids": 32 + 12,
        "swap": 0,
        "pid namespace": True,
        "ipc namespace": True,
        "uts namespace": True,
        "devices": [],
        "ports": {},
        "log driver": "none",
        "restart": True,
        "no-new-privileges": True,
        "unconfined": [],
        "terminal": False,
    }
    assert not config["User"].startswith(("0", "root"))
    assert {mount["Destination"] for mount in found["Mounts"] if mount["RW"]} <= {"/tmp", "/workspace"}
    assert not any("sock" in mount["Source"] for mount in found["Mounts"])


INSIDE = read_program("backends/config_inside.py")


DEVICES = ["fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]


def test_inside_nothing_is_left_to_give_up(contained: Container) -> None:
    with Sandbox(backend=contained) as box:
        seen = box.exec(["python3", "-c", INSIDE]).check().stdout.splitlines()
    assert seen == [
        f"{0:016x} {0:016x} 1 2",
        "True True ['lo']",
        str(DEVICES),
        "user True",
    ]


def test_two_sandboxes_are_two_users_so_that_neither_meets_the_others_limits(contained: Container) -> None:
    with Sandbox(backend=contained, policy=POLICY) as one, Sandbox(backend=contained, policy=POLICY) as other:
        with one.spawn(["sh", "-c", "for i in $(seq 25); do sleep 60 & done; echo up; wait"]) as busy:
            next(iter(busy))
            assert other.exec(["sh", "-c", "for i in $(seq 25); do sleep 1 & done; wait; echo ok"]).stdout == "ok\n"
        assert len({box.exec(["id", "-u"]).stdout for box in (one, other)}) == 2


def test_the_engines_socket_is_no_mount(contained: Container) -> None:
    assert contained.socket is not None
    with pytest.raises(PolicyError, match="a socket"):
        Sandbox(backend=contained, policy=Policy(mounts=[Mount(contained.socket, target="/run/engine.sock")])).start()


def test_a_warm_sandbox_is_taken_and_nothing_stays_in_the_engine(contained: Container) -> None:
    api = engines.find(contained.engine, contained.socket).api
    with SandboxManager(backend=contained, policy=POLICY, warm=2) as manager:
        manager.environment("a")  # the first thing asked of it fills the shelf
        waiting = {one["Id"] for one in api.containers()}
        with manager.sandbox() as box:
            assert box.run("6 * 7").value == "42"
    assert (len(waiting) >= 2, api.containers(all=True)) == (True, [])


def test_mounts_are_shown_read_only_or_writable(contained: Container, tmp_path: Path) -> None:
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
        (tmp_path / name / "f").write_text(name)
    mounts = [Mount(tmp_path / "ro", target="/ro"), Mount(tmp_path / "rw", target="/rw", mode="rw")]
    with Sandbox(backend=contained, policy=Policy(mounts=mounts)) as box:
        assert box.exec(["cat", "/ro/f", "/rw/f"]).stdout == "rorw"
        assert "Read-only" in box.exec(["touch", "/ro/new"]).stderr
        box.exec(["sh", "-c", "echo new > /rw/new"]).check()
    assert (tmp_path / "rw" / "new").read_text() == "new\n"


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"])
def test_what_is_mounted_right_below_tmp_is_seen_at_every_start(contained: Container, place: str) -> None:
    """Podman mounts targets of equal depth in any order, and has its own file systems at that depth."""
    with tempfile.TemporaryDirectory(prefix="rf-tests-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o777)
        policy = Policy(mounts=[Mount(folder, target=f"{place}/project", mode="rw")])
        for turn in range(6):
            with Sandbox(backend=contained, policy=policy) as box:
                box.exec(["touch", f"{place}/project/{turn}"]).check()
            assert os.path.exists(f"{folder}/{turn}")


def test_more_cpus_than_there_are_is_all_of_them(contained: Container) -> None:
    """Docker refuses a container with more CPUs than the host has."""
    many = 4 * (os.cpu_count() or 1)
    with Sandbox(backend=contained, policy=Policy(limits=Limits(cpus=many))) as box:
        assert inspected(contained)["HostConfig"]["NanoCpus"] == (os.cpu_count() or 1) * 1_000_000_000
        assert box.exec(["true"]).ok


MANY = """
import os
made = 0
try:
    for made in range(2000):
        os.close(os.open(f"/dev/shm/{made}", os.O_CREAT | os.O_WRONLY))
except OSError as error:
    print(error.strerror)
print(made)
"""


def test_files_in_shared_memory_are_counted(contained: Container) -> None:
    if contained.engine != "docker":
        pytest.skip("Podman takes no number of files for it")
    with Sandbox(backend=contained, policy=POLICY) as box:
        assert box.exec(["python3", "-c", MANY]).stdout.split("\n") == ["No space left on device", "500", ""]
        shown = box.exec(["sh", "-c", "grep ' /dev/shm ' /proc/mounts"]).stdout
        assert {"rw", "nosuid", "nodev", "noexec", "size=65536k"} <= set(shown.split()[3].split(","))
        assert box.exec(["stat", "-c", "%a", "/dev/shm"]).stdout == "1777\n"
