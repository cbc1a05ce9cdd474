"""Objects of the host's kernel that a guest could hold, leave behind or use up, seen from outside."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ringfence import Mount, Policy, Sandbox

_LEASE = """
import fcntl, os, time
fd = os.open("/shared/file", os.O_RDONLY)
try:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
except OSError as error:
    print(error.errno, flush=True)
else:
    print("held", flush=True)
    time.sleep(20)
"""
_WHITEOUT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
open("/shared/old", "w").close()
print(libc.renameat2(-100, b"/shared/old", -100, b"/shared/new", 4), ctypes.get_errno())
"""
_HUGE = """
import ctypes, mmap, os
tried = []
for make in (lambda: mmap.mmap(-1, 1 << 21, flags=0x40022), lambda: os.memfd_create("huge", 4)):
    try:
        make()
        tried.append("ok")
    except OSError as error:
        tried.append(error.errno)
print(tried)
"""
_TERMINALS = """
import os
held = []
try:
    while len(held) < 200: held.append(os.open("/dev/ptmx", os.O_RDWR))
except OSError as error:
    print(len(held), error.errno, flush=True)
else:
    print("no end", flush=True)
input()
"""


def _sharing(folder: Path) -> Sandbox:
    return Sandbox(policy=Policy(mounts=[Mount(str(folder), "/shared", mode="rw")]))


def test_the_host_opens_a_file_without_waiting_for_a_guest_that_has_it_open(tmp_path: Path) -> None:
    """A lease makes a process that opens the file wait until the holder gives the lease up, 45 s by default."""
    (tmp_path / "file").write_text("x")
    with _sharing(tmp_path) as box, box.spawn(["python3", "-c", _LEASE]) as process:
        said = next(iter(process))
        os.close(os.open(tmp_path / "file", os.O_WRONLY | os.O_NONBLOCK))  # BlockingIOError: a process has a lease
        assert getattr(said, "text", None) == "1\n"


def test_a_rename_leaves_no_device_on_the_host(tmp_path: Path) -> None:
    """A15: RENAME_WHITEOUT puts a character device in the old name's place."""
    with _sharing(tmp_path) as box:
        told = box.exec(["python3", "-c", _WHITEOUT]).stdout
    assert [name for name in os.listdir(tmp_path) if stat.S_ISCHR(os.lstat(tmp_path / name).st_mode)] == []
    assert told == "-1 1\n"


def test_a_guest_gets_none_of_the_hosts_huge_pages() -> None:
    """No memory limit counts huge pages. Without the filter a file of huge pages is made even where none are free."""
    with Sandbox() as box:
        assert box.exec(["python3", "-c", _HUGE]).stdout == "[12, 12]\n"


def test_a_guest_takes_few_of_the_hosts_terminals_and_leaves_its_neighbours_theirs() -> None:
    """The kernel has 3072 for all file systems of terminals but the host's own: those of sandboxes and containers."""
    with Sandbox() as box, Sandbox() as other, box.spawn(["python3", "-c", _TERMINALS]) as greedy:
        said = next(iter(greedy))
        assert getattr(said, "text", None) == f"64 {errno.ENOSPC}\n"
        assert other.run("import os; print(len(os.openpty()))").stdout == "2\n"
