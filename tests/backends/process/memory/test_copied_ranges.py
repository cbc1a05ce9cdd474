"""The layout of a session to copy, read from lines of /proc: a guest chooses the names, numbers and sizes in them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from ringfence import UnsupportedError
from ringfence.backends.process.memory import capture, layout, tracee


def test_ranges_are_what_the_kernel_tells() -> None:
    found = layout.ranges(os.getpid())
    assert any(each.path == "[stack]" for each in found)
    assert found == sorted(found, key=lambda each: each.first)


def test_a_carriage_return_in_a_name_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "x\rVmFlags: wf"
    path.write_bytes(bytes(4096))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        assert any(each.path == str(path) for each in layout.ranges(os.getpid()))
        layout.wiped_on_fork(os.getpid())


@pytest.mark.parametrize(("name", "most"), [("_MOST_RANGES", 3), ("_MOST_TEXT", 200)])
def test_more_ranges_or_longer_names_than_are_kept_are_refused(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, name, most)
    with pytest.raises(layout.TraceError, match="more than"):
        layout.ranges(os.getpid())


def test_why_a_process_is_not_copied_is_told_as_it_is() -> None:
    told = capture.explain(layout.TraceError("no system call instruction is where its libraries have one"))
    assert isinstance(told, UnsupportedError)
    assert str(told).startswith("no system call instruction")


class Stopped(tracee.Tracee):
    """A Tracee of this process, with memory that the test makes up; it counts the bytes read."""

    def __init__(self) -> None:
        super().__init__(os.getpid())
        self.sizes: list[int] = []
        self.holds = b""

    def read(self, address: int, size: int) -> bytes:
        assert address >= 1 << 32
        self.sizes.append(size)
        return self.holds or bytes(size)


def rows(*sizes: int) -> list[bytes]:
    found, at = [], 1 << 32
    for size in sizes:
        found.append(b"%x-%x r-xp 00000000 00:00 1 /workspace/libc\n" % (at, at + size))
        at += 2 * size
    return found


def test_a_range_is_searched_in_pieces_and_no_further_than_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracee, "maps_of", lambda _: rows(1 << 40, 1 << 40))
    stopped = Stopped()
    with pytest.raises(layout.TraceError, match="no system call instruction"):
        stopped._search()
    pieces = tracee._MOST_SEARCHED // tracee._PIECE
    assert (max(stopped.sizes), len(stopped.sizes)) == (tracee._PIECE + 1, pieces)


def test_an_instruction_that_lies_across_two_pieces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracee, "maps_of", lambda _: rows(1 << 20))
    stopped = Stopped()
    stopped.holds = bytes(tracee._PIECE - 1) + b"\x0f\x05"
    assert stopped._search() == (1 << 32) + tracee._PIECE - 1
