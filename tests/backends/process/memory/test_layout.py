"""The private pages of a process, as two interfaces of the kernel report them."""

from __future__ import annotations

import ctypes
import mmap
import os

from ringfence.backends.process.memory.layout import PAGE, Pages, Range


def test_an_older_kernels_way_finds_the_same_pages_in_pieces() -> None:
    pages = 150_000  # more than two pieces
    with mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        first = ctypes.addressof(ctypes.c_char.from_buffer(room))
        room.madvise(mmap.MADV_NOHUGEPAGE)
        for number in (3, 4, (1 << 16) - 1, 1 << 16, 100_000, pages - 1):
            room[number * PAGE] = 1
        of = Range(first, first + pages * PAGE, "rw-", False, 0, 0, "")
        found = Pages(os.getpid())
        try:
            expected = [(3, 2), ((1 << 16) - 1, 2), (100_000, 1), (pages - 1, 1)]
            for way in (found.runs, found._looked_up):
                assert [((at - first) // PAGE, size // PAGE) for at, size in way(of)] == expected
        finally:
            found.close()
