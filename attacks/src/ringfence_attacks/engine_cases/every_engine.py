"""Attacks on every engine: on the root, guestd's files, mounts and memory file systems inside, and on limits."""

from __future__ import annotations

import os
import shutil

from ringfence import Limits, Mount, Policy
from ringfence.backends.engine import guestd_bundle
from ringfence_attacks.case import DOS, ESCAPE, HOST_CODE, READ, WRITE, NotApplicable, Seen, attack, cases
from ringfence_attacks.engine_arena import engine_arm, wall_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence_attacks.arena import Arm
    from ringfence_attacks.controls import Change

_SMALL = Policy(limits=Limits(timeout_s=20, memory="96M", processes=24, disk="1M", disk_files=200))
_USER_AND_LANDLOCK = ("own-user", "landlock-files")


@attack("A02-root", "the root is not written to", WRITE, off="read-only-root", behind=_USER_AND_LANDLOCK)
def write_root(arm: Arm) -> Seen:
    box = arm.sandbox()
    code = """
    for path in ("/planted", "/etc/planted", "/home/planted"):
        attempt(path, spill, path, "taken", os.O_CREAT)
    """
    report = arm.python(code, box=box)
    if engine_arm(arm).contained:
        changed = [each["Path"] for each in wall_of(box)._engine.api.diff(wall_of(box)._id) or ()]  # noqa: SLF001  # the engine's own list of changes
        return Seen(
            any(path.endswith("/planted") for path in changed),
            f"{report.words()}; changed: {', '.join(changed) or 'nothing'}",
        )
    root = f"{wall_of(box)._folder}/root"  # noqa: SLF001  # as above
    made = [path for path in ("planted", "etc/planted", "home/planted") if os.path.exists(f"{root}/{path}")]
    return Seen(bool(made), report.words())


@attack("A02-mount", "a mount that is read-only is not written", WRITE, off="binds-read-only")
def write_mount(arm: Arm) -> Seen:
    path = arm.host_file(mode=0o666)
    os.chmod(arm.directory, 0o777)
    policy = _SMALL.replace(mounts=[Mount(arm.directory, target="/shown", mode="ro")])
    code = """
    attempt("write", spill, "/shown/canary", "taken")
    attempt("proc", spill, "/proc/self/root/shown/canary", "taken")
    attempt("link", lambda: (os.symlink("/shown/canary", "/workspace/l"), spill("/workspace/l", "taken")))
    """
    report = arm.python(code, policy=policy)
    with open(path, encoding="utf-8") as file:
        return Seen(file.read() != arm.canary, report.words())


@attack("B07-guestd", "guestd's own files and interpreter are not overwritten", ESCAPE, off="guestd-read-only")
def overwrite_guestd(arm: Arm) -> Seen:
    """CVE-2019-5736: the next sandbox would start the planted code. The control is the read-only mount, not the mode.

    A copy of guestd's package, which any user may write to, is mounted over the package, so that no arm can change the
    package that is used.
    """
    from ringfence.host import state

    copy = os.path.join(arm.directory, "guest")
    shutil.copytree(f"{guestd_bundle.folder(state.disk_directory('runtime'))}/ringfence/guest", copy)
    target = os.path.join(copy, "guestd", "engine_pid1.py")
    os.chmod(copy, 0o777)
    os.chmod(target, 0o666)
    before = _text(target)
    engine_arm(arm).also = _shown(copy, f"{guestd_bundle.INSIDE}/ringfence/guest", contained=engine_arm(arm).contained)
    code = """
    for path in ("/proc/1/exe", "/proc/self/exe", "/.ringfence/bin/python3", "/.ringfence/lib/ld.so"):
        attempt(path, spill, path, "taken")
    attempt("guestd", spill, "/.ringfence/ringfence/guest/guestd/engine_pid1.py", "# taken")
    """
    report = arm.python(code)
    return Seen(_text(target) != before, report.words())


def _shown(source: str, target: str, *, contained: bool) -> Change:
    """Return a change that adds a read-only bind."""

    def change(settings: dict[str, Any]) -> None:
        if contained:
            from docker.types import Mount as Bind

            settings["host_config"]["Mounts"].append(Bind(target, source, type="bind", read_only=True))
        else:
            options = ["rbind", "nosuid", "nodev", "ro"]
            settings["mounts"].append({"destination": target, "type": "bind", "source": source, "options": options})

    return change


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


@attack("A01-user", "a file of root's in a mount is not read", READ, off="own-user")
def read_as_root(arm: Arm) -> Seen:
    arm.host_file(mode=0o600)
    policy = _SMALL.replace(mounts=[Mount(arm.directory, target="/shown", mode="ro")])
    return arm.stolen(arm.python('steal("/shown/canary")', policy=policy))


_FILL = """
def fill(path, total):
    fd, done = os.open(path, os.O_CREAT | os.O_WRONLY), 0
    try:
        while done < total:
            done += os.write(fd, b"x" * 65536)
    finally:
        tell(done=done)
"""


def _fill(arm: Arm, path: str, total: int, limit: int) -> Seen:
    """Judge by the file's size. The host reads the size in the root of the first process; on gVisor the guest does."""
    box = arm.sandbox(_SMALL)
    report = arm.python(f"{_FILL}\nattempt('fill', fill, path, total)", box=box, path=path, total=total)
    if engine_arm(arm).contained:
        size = os.stat(f"/proc/{wall_of(box).pid}/root{path}").st_size
    else:
        size = int(str(report.said("done") or 0))
    return Seen(size > limit, f"{size} bytes of {limit}; {report.words()}")


@attack("F12-workspace", "files end at limits.disk", DOS, off="tmpfs-bytes")
def fill_workspace(arm: Arm) -> Seen:
    return _fill(arm, "/workspace/big", 3 << 20, 1 << 20)


@attack("F12-tmp", "files in /tmp end at limits.disk", DOS, off="tmpfs-bytes")
def fill_tmp(arm: Arm) -> Seen:
    return _fill(arm, "/tmp/big", 3 << 20, 1 << 20)


@attack("F03-shm", "shared memory has a size of its own", DOS, off="shm-size")
def fill_shared_memory(arm: Arm) -> Seen:
    return _fill(arm, "/dev/shm/big", 60 << 20, 48 << 20)


@attack("F12-files", "the number of files ends at limits.disk_files", DOS, off="tmpfs-files")
def many_files(arm: Arm) -> Seen:
    """The host counts the names: in the root of a container's first process, or in gVisor's own mount namespace."""
    if not engine_arm(arm).contained and os.geteuid() != 0:
        raise NotApplicable("a file system of the host counts gVisor's files, and making that takes root")
    policy = _SMALL if engine_arm(arm).contained else _SMALL.replace(strict=True)
    box = arm.sandbox(policy)
    code = """
    def many():
        for i in range(400):
            os.close(os.open(f"/workspace/f{i}", os.O_CREAT | os.O_WRONLY))
    attempt("create", many)
    """
    report = arm.python(code, box=box)
    count = _names_at(box, contained=engine_arm(arm).contained)
    return Seen(count > 200, f"{count} names of 200; {report.words()}")


def _names_at(box: Any, *, contained: bool) -> int:
    wall = wall_of(box)
    if contained:
        return len(os.listdir(f"/proc/{wall.pid}/root/workspace"))
    outer = f"/proc/{wall._process.pid}/root{wall._folder}"  # noqa: SLF001  # no public name leads there
    return max(len(os.listdir(f"{outer}/{name}")) for name in os.listdir(outer) if name.startswith("memory"))


@attack("F10-tree", "CPU time of many short processes ends at limits.cpu_time_s", DOS, off=HOST_CODE)
def burn_in_children(arm: Arm) -> Seen:
    """The processes together use more than the limit, which no process reaches alone. Off: a limit far above that."""
    cpu_s = 20 if arm.off else 0.5
    code = """
    def burn(seconds):
        while time.process_time() < seconds:
            pass
    for i in range(8):
        if os.fork() == 0:
            burn(0.3); os._exit(0)
        os.wait()
    """
    report = arm.python(code, box=arm.sandbox(Policy(limits=Limits(timeout_s=30, cpu_time_s=cpu_s))), timeout_s=25)
    return Seen(report.status == "ok", f"{report.status}, limit {cpu_s} s")


CASES = cases(globals())
