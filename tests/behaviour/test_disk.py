"""The workspace has a real quota: exact in bytes and in files, whatever way a guest fills it."""

from __future__ import annotations

import pytest

import ringfence
from ringfence import DiskUsage, Limits, Policy, Sandbox

PAGE = 4096
POLICY = Policy(limits=Limits(disk="1M", disk_files=50))

WAYS = {
    "write": """
fd = os.open("f", os.O_WRONLY | os.O_CREAT)
n = 0
try:
    while True: n += os.write(fd, b"x" * 4096)
except OSError as e: reason = e.strerror
""",
    "fallocate": """
fd = os.open("f", os.O_RDWR | os.O_CREAT)
n = 0
try:
    while True: os.posix_fallocate(fd, n, 4096); n += 4096
except OSError as e: reason = e.strerror
""",
    "mmap": """
import mmap
fd = os.open("f", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4 << 20)
os.close(fd)
n = 0
fd = os.open("f", os.O_RDWR)
try:
    while True: n += os.pwrite(fd, b"x" * 4096, n)
except OSError as e: reason = e.strerror
""",
    "many files": """
n, i = 0, 0
try:
    while True:
        fd = os.open(f"f{i}", os.O_WRONLY | os.O_CREAT); i += 1
        n += os.write(fd, b"x" * 4096 * 8); os.close(fd)
except OSError as e: reason = e.strerror
""",
}


@pytest.mark.parametrize("place", ["/workspace", "/tmp"])
@pytest.mark.parametrize("way", WAYS)
def test_exactly_so_many_bytes_fit_and_one_more_page_is_no_space(way: str, place: str) -> None:
    """F34: a full disk is ENOSPC for the guest, never a kill of the sandbox."""
    result = ringfence.run(f"import os\nos.chdir({place!r})\n{WAYS[way]}\n(n, reason)", policy=POLICY)
    assert result.value == f"({1 << 20}, 'No space left on device')", result.render()


@pytest.mark.parametrize(
    "make",
    [
        "open(f'f{n}', 'w').close()",
        "os.mkdir(f'f{n}')",
        "os.symlink('x', f'f{n}')",
        "os.mkfifo(f'f{n}')",
        "open('f0', 'a').close() if n == 0 else os.link('f0', f'f{n}')",
        "s.append(socket.socket(socket.AF_UNIX)) or s[-1].bind(f'f{n}')",
    ],
)
def test_exactly_so_many_names_fit(make: str) -> None:
    loop = f"try:\n    while True:\n        {make}\n        n += 1\nexcept OSError as e: reason = e.strerror"
    code = f"import os, socket\nn, s = 0, []\n{loop}\n(n, reason)"
    result = ringfence.run(code, policy=POLICY)
    assert result.value == "(50, 'No space left on device')", result.render()


def test_extended_attributes_are_refused_or_counted() -> None:
    code = """
import os
open("f", "w").close()
n = 0
try:
    for i in range(10_000):
        os.setxattr("f", f"user.x{i}", b"y" * 4000); n += 4000
except OSError as e: pass
n
"""
    result = ringfence.run(code, policy=POLICY)
    assert result.value is not None
    assert int(result.value) <= 1 << 20


def test_shared_memory_has_a_size_of_its_own() -> None:
    code = """
import os
fd = os.open("/dev/shm/f", os.O_WRONLY | os.O_CREAT)
n = 0
try:
    while True: n += os.write(fd, b"x" * (1 << 20))
except OSError as e: reason = e.strerror
(n, reason)
"""
    assert ringfence.run(code).value == f"({64 << 20}, 'No space left on device')"


def test_what_is_removed_can_be_used_again() -> None:
    code = "import os\nfor i in range(300):\n    open('f', 'wb').write(b'x' * 1_000_000)\n    os.remove('f')"
    assert ringfence.run(code, policy=POLICY).ok


def test_a_full_disk_next_to_a_full_memory_is_still_no_space() -> None:
    fill = "try:\n    open('f', 'wb').write(b'x' * (64 << 20))\nexcept OSError as e: r = e.strerror"
    code = f"x = bytearray(40 << 20)\n{fill}\nr"
    result = ringfence.run(code, policy=Policy(limits=Limits(memory="128M", disk="8M")))
    assert result.value == "'No space left on device'", result.render()


def test_nothing_else_can_be_written() -> None:
    code = """
import os
done = []
for d in ("/", "/usr", "/etc", "/dev", "/proc", "/sys", "/home", "/root", "/var", "/run", "/opt", "/dev/pts"):
    try: open(d + "/x", "w"); done.append(d)
    except OSError: pass
done
"""
    assert ringfence.run(code).value == "[]"


def test_usage_is_told_against_the_limits() -> None:
    with Sandbox(policy=POLICY) as box:
        assert box.files.usage() == DiskUsage(bytes=0, bytes_limit=1 << 20, files=0, files_limit=50)
        box.files.write("a", b"x" * 5000)
        box.files.mkdir("d")
        assert box.files.usage() == DiskUsage(bytes=2 * PAGE, bytes_limit=1 << 20, files=2, files_limit=50)
