"""Workspaces on disk: as root an image with an exact quota that nothing outlives, else a folder that has none."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import leftovers
from accounts import OrdinaryUser
from behaviour import host
from behaviour.host import Host
from programs import read_program
from ringfence import Limits, Mount, Policy, PolicyError, Sandbox, UnsupportedError
from ringfence.host import loop_disk, programs
from ringfence.plan.model import LinuxPlan
from ringfence.types import DiskUsage

MIB = 1 << 20
POLICY = Policy(limits=Limits(disk="1M", disk_files=50))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="an image needs root")
FILL = """
import os
fd = os.open("f", os.O_WRONLY | os.O_CREAT)
n = 0
try:
    while True: n += os.write(fd, b"x" * 4096)
except OSError as e: reason = e.strerror
os.close(fd)
(n, reason)
"""


def loops() -> list[str]:
    """Return the loop devices with an image of Ringfence."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            text = path.read_text()
        except OSError:
            continue
        found += [path.parts[3]] if "/ringfence/" in text else []
    return found


def wait_for_no_loops(before: list[str]) -> None:
    deadline = time.monotonic() + 5
    while set(loops()) - set(before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(loops()) - set(before) == set()


@needs_root
def test_exactly_so_many_bytes_fit_and_the_next_is_no_space() -> None:
    with Sandbox(policy=POLICY, workspace="disk") as box:
        assert box.files.usage() == DiskUsage(0, MIB, 0, 50)
        assert box.run(FILL).value == f"({MIB}, 'No space left on device')"
        assert box.files.usage() == DiskUsage(MIB, MIB, 1, 50)
        with pytest.raises(OSError, match="No space left"):
            box.files.write("g", b"x" * 5000)
        box.files.remove("f")
        assert box.run(FILL).value == f"({MIB}, 'No space left on device')"


@needs_root
@pytest.mark.parametrize("make", ["open(f'f{n}', 'w').close()", "os.mkdir(f'f{n}')", "os.mkfifo(f'f{n}')"])
def test_exactly_so_many_files_fit(make: str) -> None:
    loop = f"try:\n    while True:\n        {make}\n        n += 1\nexcept OSError as e: r = e.strerror\n(n, r)"
    with Sandbox(policy=POLICY, workspace="disk") as box:
        assert box.run(f"import os\nn = 0\n{loop}").value == "(50, 'No space left on device')"


@needs_root
@pytest.mark.parametrize(("size", "files"), [(4096, 1), (MIB, 50), (300 * MIB, 12_345), (3 << 30, 1_000)])
def test_an_image_of_any_size_is_exact(size: int, files: int) -> None:
    mount = loop_disk.make_image(size, files, 2_000_000)
    try:
        found = os.statvfs(mount)
        assert (found.f_bavail * found.f_frsize, found.f_favail) == (size, files)
        owner = os.stat("workspace", dir_fd=mount)
        assert (owner.st_uid, owner.st_gid, owner.st_mode) == (2_000_000, 2_000_000, 0o40755)
    finally:
        os.close(mount)


@needs_root
def test_memory_is_not_shared_with_it() -> None:
    """In memory the guest would be killed, or the memory limit would have to include the disk limit."""
    policy = Policy(limits=Limits(memory="64M", disk="300M"))
    with Sandbox(policy=policy, workspace="disk", backend="process") as box:
        assert box._box is not None
        write = "with open('f', 'wb') as f:\n    for _ in range(200): f.write(bytes(1 << 20))"
        assert box.run(write).status == "ok"
        assert box.files.stat("f").size == 200 * MIB
        in_memory = Sandbox(policy=policy, backend="process")._launcher.sandbox_plan()
        on_disk = box._launcher.sandbox_plan()
        assert isinstance(in_memory, LinuxPlan)
        assert isinstance(on_disk, LinuxPlan)
        assert in_memory.memory_bytes - on_disk.memory_bytes == 300 * MIB
        assert str(box.enforcement.disk) == "ext4 in an image file: its blocks and inodes"
        assert "disk" not in box.enforcement.weaker


@needs_root
def test_a_guest_sees_its_folder_and_nothing_else_of_the_image() -> None:
    look = "ls -A /workspace /.disk; find / -xdev -name surplus 2>/dev/null; ls /dev; cat /proc/self/mountinfo"
    with Sandbox(workspace="disk") as box:
        told = box.exec(["sh", "-c", look]).stdout
        assert told.startswith("/.disk:\n\n/workspace:\n")
        assert "surplus" not in told
        assert "loop-control" not in told
        (line,) = [line for line in told.splitlines() if " /workspace " in line]
        assert {"rw", "nosuid", "nodev"} <= set(line.split()[5].split(","))


@needs_root
def test_copies_of_mounts_share_its_quota(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("host")
    os.chmod(tmp_path, 0o755)
    policy = Policy(limits=Limits(disk="2M"), mounts=[Mount(tmp_path, target="/data", mode="copy")])
    with Sandbox(policy=policy, workspace="disk") as box:
        assert box.run("open('/data/f', 'a').write('!')\nopen('/data/f').read()").value == "'host!'"
        box.run("open('/data/big', 'wb').write(bytes(1_500_000))").check()
        result = box.run("try: open('big', 'wb').write(b'x' * 1_000_000)\nexcept OSError as e: r = e.strerror\nr")
        assert result.value == "'No space left on device'"
    assert (tmp_path / "f").read_text() == "host"


@needs_root
def test_snapshots_and_copies_work_the_same() -> None:
    with Sandbox(policy=POLICY, workspace="disk") as box:
        box.files.write("d/f", "one")
        box.exec(["ln", "d/f", "hard"]).check()
        made = box.snapshot()
        box.files.write("d/f", "two")
        box.rollback(made)
        assert box.files.read_text("hard") == "one"
        with box.fork(memory=False) as twin, Sandbox(policy=POLICY, snapshot=made) as in_memory:
            assert twin.enforcement.disk == box.enforcement.disk
            assert (twin.files.read_text("d/f"), in_memory.files.read_text("d/f")) == ("one", "one")
        made.delete()


@needs_root
def test_nothing_is_left_when_it_ends() -> None:
    before, mounts = loops(), Path("/proc/self/mountinfo").read_text()
    with Sandbox(workspace="disk") as box:
        box.run("open('f', 'wb').write(bytes(1_000_000))")
        assert len(set(loops()) - set(before)) == 1
        assert Path("/proc/self/mountinfo").read_text() == mounts, "no mount of the host's"
        assert list(Path("/var/lib/ringfence/workspaces").iterdir()) == []
    wait_for_no_loops(before)


@needs_root
@pytest.mark.parametrize("delay_ms", [0, 20, 60, 120, 400])
def test_nothing_is_left_after_a_kill(delay_ms: int) -> None:
    code = """
import ringfence
print("go")
boxes = []
for n in range(3):
    boxes.append(ringfence.Sandbox(workspace="disk").start())
    boxes[-1].run("open('f', 'wb').write(bytes(1_000_000))")
boxes[0].exec(["sleep", "60"])
"""
    before = loops()
    with Host(code) as process:
        assert process.line() == "go"
        time.sleep(delay_ms / 1000)
        mine = host.belongings(process.pid)
        process.kill()
    assert host.wait_until_gone(host.Belongings(mine.processes, frozenset(), frozenset())) == []
    wait_for_no_loops(before)
    assert list(Path("/var/lib/ringfence/workspaces").iterdir()) == []


@needs_root
def test_without_mkfs_it_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", ("/nonexistent",))
    with pytest.raises(UnsupportedError, match=r"mkfs.ext4") as raised:
        Sandbox(workspace="disk").start()
    assert raised.value.fix == "install the package e2fsprogs"
    assert raised.value.missing[0].what == "mkfs.ext4"


@needs_root
def test_more_than_the_host_has_free_is_refused() -> None:
    """The image is sparse: data for which the disk has no room would be lost without an error to the guest."""
    info = os.statvfs("/var/lib")
    policy = Policy(limits=Limits(disk=info.f_bavail * info.f_frsize + (8 << 30)))
    with pytest.raises(UnsupportedError, match="bytes free for workspaces") as refused:
        Sandbox(workspace="disk", policy=policy).start()
    assert refused.value.fix == "free some, or set a smaller limits.disk"


@needs_root
def test_a_host_that_does_not_let_us_set_the_size_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only /sys, as in many containers, does not let Ringfence set the size."""

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system", "/sys/fs/ext4/loop0/reserved_clusters")

    monkeypatch.setattr(loop_disk, "_fit", read_only)
    with pytest.raises(UnsupportedError, match=r"could not be made: .*Read-only file system"):
        loop_disk.make_image(MIB, 50, 0)


@needs_root
def test_a_strict_policy_is_kept_by_an_image() -> None:
    with Sandbox(policy=Policy(strict=True, limits=Limits(disk="4M")), workspace="disk") as box:
        assert box.enforcement.disk.level == "full"


def test_an_unknown_workspace_is_refused() -> None:
    with pytest.raises(PolicyError, match="unknown workspace"):
        Sandbox(workspace="tape")  # type: ignore[arg-type]  # a wrong one is the point


def test_auto_is_memory() -> None:
    assert str(Sandbox().enforcement.disk) == "tmpfs size and inodes"


# ── as an ordinary user ──────────────────────────────────────────────────────────────────────────

HEAD = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
from ringfence import Limits, Policy, PolicyError, Sandbox, UnsupportedError
PLACE = os.path.expanduser("~/.local/state/ringfence/workspaces")
def say(*what): print(json.dumps(what), flush=True)
"""


def told(user: OrdinaryUser, code: str) -> list[list[object]]:
    done = user.run(HEAD + code)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_folder_for_users_without_rights(ordinary_user: OrdinaryUser) -> None:
    code = read_program("behaviour/workspaces_as_user.py")
    note = "RLIMIT_FSIZE limits each file to limits.disk; the sum of all files and their number are not limited"
    assert told(ordinary_user, code) == [
        [True, note],
        [[["d", "directory"], ["d/f", "file"]], "1000 700\n1000 644\n"],
        [True, MIB, 2, 10_000],
        [True, "0o40700", "0o40700"],
        ["'File too large'"],
        ["a file would be larger than limits.disk; write less, or raise the limit"],
        [True, 2],
        [[], True],
    ]


def test_a_folder_is_refused_when_the_policy_is_strict(ordinary_user: OrdinaryUser) -> None:
    code = """
try: Sandbox(policy=Policy(strict=True), workspace="disk").start()
except UnsupportedError as e: say(e.code, "disk: only a folder" in str(e), bool(e.fix))
"""
    assert told(ordinary_user, code) == [["strict", True, True]]


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(0)", "sys.exit(0)"])
def test_a_folder_is_gone_after_its_library(ordinary_user: OrdinaryUser, how: str) -> None:
    """The folder is removed by the sweep that the zygote starts, or by the sweep of the next start."""
    code = f"""
box = Sandbox(workspace="disk").start()
box.exec(["sh", "-c", "mkdir -p a/b; chmod 0 a; ln -s / out"])
say(len(os.listdir(PLACE)))
sys.stdout.flush()
{how}
"""
    others = leftovers.orphans()
    done = ordinary_user.run(HEAD + code)
    assert done.stdout == "[1]\n", done.stderr
    place = ordinary_user.home / ".local/state/ringfence/workspaces"
    deadline = time.monotonic() + 5
    while list(place.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    told(ordinary_user, "from ringfence.host import state; state.sweep()")
    assert list(place.iterdir()) == []
    deadline = time.monotonic() + 3
    while (left := leftovers.orphans() - others) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == frozenset()


def test_the_folders_of_workspaces_are_in_no_mount(ordinary_user: OrdinaryUser) -> None:
    code = """
from ringfence import Mount
with Sandbox(workspace="disk") as box:
    box.files.write("f", "secret")
    home = os.path.expanduser("~")
    try: Sandbox(policy=Policy(mounts=[Mount(home, mode="rw", credentials=True)])).start()
    except PolicyError as e: say("Ringfence's own state" in str(e))
"""
    assert told(ordinary_user, code) == [[True]]
