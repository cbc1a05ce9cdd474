"""Checks of the workspace's quota: exact in bytes and in files, by whatever way a guest fills the workspace."""

from __future__ import annotations

import errno

from ringfence import Limits, Policy
from ringfence.testing.model import MakeSandbox, python, raises, with_maker
from ringfence.types import DiskUsage

PAGE = 4096
POLICY = Policy(limits=Limits(disk="1M", disk_files=50))
FULL = f"({1 << 20}, 'No space left on device')\n"

# Each program adds to `n` what fits and leaves the reason of the end in `reason`.
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


# F12, F13: ways around a counter that counts files by name, or only writes. `n` counts the bytes that each way got.
OTHER_WAYS = {
    "append": """
fd = os.open("f", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True: n += os.write(fd, page)
""",
    "a file without a name": """
fd = os.open(".", os.O_RDWR | os.O_TMPFILE)
while True: n += os.write(fd, page)
""",
    "a deleted file that is open": """
fd = os.open("f", os.O_WRONLY | os.O_CREAT)
os.remove("f")
while True: n += os.write(fd, page)
""",
    "holes, then pages in them from the end": """
fd = os.open("f", os.O_RDWR | os.O_CREAT)
os.truncate(fd, 8 << 20)
while True: n += os.pwrite(fd, page, (8 << 20) - n - 4096)
""",
    "sendfile": """
source = os.memfd_create("m")
os.write(source, page)
fd = os.open("f", os.O_WRONLY | os.O_CREAT)
while True: n += os.sendfile(fd, source, 0, 4096)
""",
    "splice": """
fd = os.open("f", os.O_WRONLY | os.O_CREAT)
out, into = os.pipe()
while True: n += os.splice(out, fd, os.write(into, page))
""",
    "copy_file_range": """
with open("f", "wb") as file: n += file.write(page * 8)
a, b = os.open("f", os.O_RDONLY), os.open("g", os.O_WRONLY | os.O_CREAT)
while True: n += os.copy_file_range(a, b, 4096, 0, n)
""",
    "renamed over, the old one open": """
held = []
for i in range(1000):
    fd = os.open("new", os.O_WRONLY | os.O_CREAT)
    held.append(fd)
    if i % 2: os.rename("new", "f")
    while n < (i + 1) * 65536: n += os.write(fd, page)
    if not i % 2: os.rename("new", "f")
""",
    "ten pages in each of many files": """
while True:
    fd = os.open(f"f{n // 40960}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    n += os.write(fd, page)
    os.close(fd)
""",
}


def no_other_way_to_write_leads_past_the_quota(make: MakeSandbox) -> None:
    for name, way in OTHER_WAYS.items():
        body = "".join(f"    {line}\n" for line in way.strip().splitlines())
        tried = f"try:\n{body}except OSError as e: reason = e.strerror"
        code = f"import os\npage = b'x' * 4096\nn = 0\n{tried}\nprint((n, reason))"
        result = python(make, code, policy=POLICY)
        assert result.stdout == FULL, f"{name}: {result.render()}"


def a_mapping_past_the_quota_is_a_bus_error_at_the_same_page(make: MakeSandbox) -> None:
    """A write to mapped memory has no return value, so a full disk is a signal. The sandbox goes on."""
    code = """
import mmap, os
fd = os.open("f", os.O_RDWR | os.O_CREAT)
os.truncate(fd, 8 << 20)
pages = mmap.mmap(fd, 8 << 20)
out, into = os.pipe()
pid = os.fork()
if pid == 0:
    for at in range(0, 8 << 20, 4096):
        pages[at] = 1
        os.write(into, b"x")
    os._exit(0)
os.close(into)
count = 0
while data := os.read(out, 4096): count += len(data)
print(count * 4096, os.WTERMSIG(os.waitpid(pid, 0)[1]))
"""
    with make(policy=POLICY) as box:
        assert box.exec(["python3", "-c", code]).check().stdout == f"{1 << 20} 7\n"
        assert box.files.usage().bytes == 1 << 20
        box.files.remove("f")
        assert box.files.usage().bytes == 0


def a_deleted_file_counts_while_it_is_open(make: MakeSandbox) -> None:
    code = """
import os, sys
fd = os.open("f", os.O_WRONLY | os.O_CREAT)
os.unlink("f")
os.write(fd, bytes(512 << 10))
print("written", flush=True)
sys.stdin.read()
"""
    with make(policy=POLICY) as box:
        with box.spawn(["python3", "-c", code]) as process:
            next(iter(process))
            assert box.files.usage().bytes == 512 << 10
            process.close_stdin()
            assert process.wait().ok
        assert box.files.usage().bytes == 0


def what_the_host_writes_counts_as_well(make: MakeSandbox) -> None:
    """F14: files.write is a guest's write, to the last page, and has its error."""
    with make(policy=POLICY) as box:
        box.files.write("a", b"x" * ((1 << 20) - PAGE))
        box.files.write("b", b"x" * PAGE)
        for append in (False, True):
            with raises(OSError) as caught:
                box.files.write("b" if append else "c", b"x", append=append)
            assert caught.value.errno == errno.ENOSPC
        assert [info.path for info in box.files.list()] == ["a", "b"]
        box.files.remove("a")
        for number in range(49):
            box.files.mkdir(f"d{number}")
        with raises(OSError) as caught:
            box.files.mkdir("one-more")
        assert caught.value.errno == errno.ENOSPC
        assert box.files.usage() == DiskUsage(bytes=PAGE, bytes_limit=1 << 20, files=50, files_limit=50)


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
    with_maker(no_other_way_to_write_leads_past_the_quota, "disk-quota"),
    with_maker(a_mapping_past_the_quota_is_a_bus_error_at_the_same_page, "disk-quota"),
    with_maker(a_deleted_file_counts_while_it_is_open, "disk-quota"),
    with_maker(what_the_host_writes_counts_as_well, "disk-quota"),
    with_maker(temporary_files_have_the_same_bound, "disk-quota"),
    with_maker(exactly_so_many_names_fit, "disk-quota"),
    with_maker(extended_attributes_are_refused_or_counted, "disk-quota"),
    with_maker(what_is_removed_can_be_used_again, "disk-quota"),
    with_maker(a_full_disk_next_to_a_full_memory_is_still_no_space, "disk-quota"),
    with_maker(usage_is_told_against_the_limits, "disk-quota"),
)
