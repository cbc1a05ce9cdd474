"""The workspace has a real quota: exact in bytes and in files, whatever way a guest fills it."""

from __future__ import annotations

from ringfence import DiskUsage, Limits, Policy
from ringfence.testing.model import MakeSandbox, python, with_maker

PAGE = 4096
POLICY = Policy(limits=Limits(disk="1M", disk_files=50))
FULL = f"({1 << 20}, 'No space left on device')\n"

# Each adds to `n` what fits and leaves the reason of the end in `reason`.
WAYS = (
    """
fd = os.open("f", os.O_WRONLY | os.O_CREAT)
n = 0
try:
    while True: n += os.write(fd, b"x" * 4096)
except OSError as e: reason = e.strerror
""",
    """
fd = os.open("f", os.O_RDWR | os.O_CREAT)
n = 0
try:
    while True: os.posix_fallocate(fd, n, 4096); n += 4096
except OSError as e: reason = e.strerror
""",
    """
fd = os.open("f", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4 << 20)
n = 0
try:
    while True: n += os.pwrite(fd, b"x" * 4096, n)
except OSError as e: reason = e.strerror
""",
    """
n, i = 0, 0
try:
    while True:
        fd = os.open(f"f{i}", os.O_WRONLY | os.O_CREAT); i += 1
        n += os.write(fd, b"x" * 4096 * 8); os.close(fd)
except OSError as e: reason = e.strerror
""",
)
MAKES = (
    "open(f'f{n}', 'w').close()",
    "os.mkdir(f'f{n}')",
    "os.symlink('x', f'f{n}')",
    "os.mkfifo(f'f{n}')",
    "open('f0', 'a').close() if n == 0 else os.link('f0', f'f{n}')",
    "s.append(socket.socket(socket.AF_UNIX)) or s[-1].bind(f'f{n}')",
)


def exactly_so_many_bytes_fit_and_one_more_page_is_no_space(make: MakeSandbox) -> None:
    """F34: a full disk is ENOSPC for the guest, never a kill of the sandbox."""
    for way in WAYS:
        result = python(make, f"import os\nos.chdir('/workspace')\n{way}\nprint((n, reason))", policy=POLICY)
        assert result.stdout == FULL, result.render() + way


def temporary_files_have_the_same_bound(make: MakeSandbox) -> None:
    for way in WAYS:
        result = python(make, f"import os\nos.chdir('/tmp')\n{way}\nprint((n, reason))", policy=POLICY)
        assert result.stdout == FULL, result.render() + way


def exactly_so_many_names_fit(make: MakeSandbox) -> None:
    for one in MAKES:
        loop = f"try:\n    while True:\n        {one}\n        n += 1\nexcept OSError as e: reason = e.strerror"
        result = python(make, f"import os, socket\nn, s = 0, []\n{loop}\nprint((n, reason))", policy=POLICY)
        assert result.stdout == "(50, 'No space left on device')\n", result.render() + one


def extended_attributes_are_refused_or_counted(make: MakeSandbox) -> None:
    code = """
import os
open("f", "w").close()
n = 0
try:
    for i in range(10_000):
        os.setxattr("f", f"user.x{i}", b"y" * 4000); n += 4000
except OSError as e: pass
print(n)
"""
    assert int(python(make, code, policy=POLICY).check().stdout) <= 1 << 20


def what_is_removed_can_be_used_again(make: MakeSandbox) -> None:
    code = "import os\nfor i in range(300):\n    open('f', 'wb').write(b'x' * 1_000_000)\n    os.remove('f')"
    assert python(make, code, policy=POLICY).ok


def a_full_disk_next_to_a_full_memory_is_still_no_space(make: MakeSandbox) -> None:
    fill = "try:\n    open('f', 'wb').write(b'x' * (64 << 20))\nexcept OSError as e: r = e.strerror"
    policy = Policy(limits=Limits(memory="128M", disk="8M"))
    result = python(make, f"x = bytearray(40 << 20)\n{fill}\nprint(r)", policy=policy)
    assert result.stdout == "No space left on device\n", result.render()


def usage_is_told_against_the_limits(make: MakeSandbox) -> None:
    with make(policy=POLICY) as box:
        assert box.files.usage() == DiskUsage(bytes=0, bytes_limit=1 << 20, files=0, files_limit=50)
        box.files.write("a", b"x" * 5000)
        box.files.mkdir("d")
        assert box.files.usage() == DiskUsage(bytes=2 * PAGE, bytes_limit=1 << 20, files=2, files_limit=50)


CHECKS = (
    with_maker(exactly_so_many_bytes_fit_and_one_more_page_is_no_space, "disk-quota"),
    with_maker(temporary_files_have_the_same_bound, "disk-quota"),
    with_maker(exactly_so_many_names_fit, "disk-quota"),
    with_maker(extended_attributes_are_refused_or_counted, "disk-quota"),
    with_maker(what_is_removed_can_be_used_again, "disk-quota"),
    with_maker(a_full_disk_next_to_a_full_memory_is_still_no_space, "disk-quota"),
    with_maker(usage_is_told_against_the_limits, "disk-quota"),
)
