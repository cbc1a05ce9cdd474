"""Owns system calls that are written down before a fork and made in a row after the fork, with no Python in between.

Python that runs after a fork copies a hundred pages before it has done anything, and a page costs one or two
microseconds. All first steps of our new processes are known before the fork, so the forker writes the steps as rows.
The routine that makes the calls decides nothing: it goes from row to row, ends at the first call that fails, and gives
control back to Python where a row says so. Where the kernel grants no memory to execute, Python goes through the rows.
"""

from __future__ import annotations

import _ctypes
import errno
import os
import struct

from ringfence.shared import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# A row is twelve words: the call's number and its six arguments; where its result goes, or 0; the least result that is
# no failure; the row that follows a result of 0, and a failure, or 0; where else its result goes, or 0.
# Number -1 ends, -2 compares two pieces of memory.
_ROW = struct.Struct("<q6QQqQQQ")
_WORD = struct.Struct("<Q")
_ARGUMENTS = 8  # where a call's arguments begin
_IN_ROW, _STORES, _LEAST, _ZERO, _FAILED = 12, (7, 11), 8, 9, 10  # words
_NO_WORDS = [0] * 11
_STOP, _COMPARE = -1, -2
_MASK = (1 << 64) - 1

# The routine: first argument a row, second a word for the last result; returns the row it ended at. In Intel's notation
# (a test compares it with what an assembler makes of it):
#        push rbx; push rbp; mov rbx, rdi; mov rbp, rsi
#     1: mov rax, [rbx]; mov rdi, [rbx+8]; mov rsi, [rbx+16]; mov rdx, [rbx+24]
#        mov r10, [rbx+32]; mov r8, [rbx+40]; mov r9, [rbx+48]; test rax, rax; js 3f; syscall
#     2: cmp rax, [rbx+64]; jl 6f; mov rcx, [rbx+56]; test rcx, rcx; jz 4f; mov [rcx], rax
#     4: mov rcx, [rbx+88]; test rcx, rcx; jz 8f; mov [rcx], rax
#     8: test rax, rax; jnz 5f; mov rcx, [rbx+72]; test rcx, rcx; jz 5f; mov rbx, rcx; jmp 1b
#     5: add rbx, 96; jmp 1b
#     3: cmp rax, -2; jne 7f; mov rcx, rdx; xor eax, eax; cmp eax, eax; repe cmpsb; je 2b; not rax; jmp 2b
#     6: mov rcx, [rbx+80]; test rcx, rcx; jz 7f; mov rbx, rcx; jmp 1b
#     7: mov [rbp], rax; mov rax, rbx; pop rbp; pop rbx; ret
CODE = bytes.fromhex(
    "53554889fb4889f5488b03488b7b08488b7310488b53184c8b53204c8b43284c8b4b304885c078390f05483b43407c47488b4b384885c97403"
    "488901488b4b584885c974034889014885c0750e488b4b484885c974054889cbebad4883c360eba74883f8fe751e4889d131c039c0f3a674b8"
    "48f7d0ebb3488b4b504885c974054889cbeb83488945004889d85d5bc3"
)
_PAGE = 4096
_NR_MMAP, _NR_MUNMAP = 9, 11
_PROT_READ_EXEC, _MAP_PRIVATE = 5, 2


class _Byte(syscalls.Integer):
    _type_ = "B"


if TYPE_CHECKING:
    Room = _ctypes.Array[_Byte]


_sizes: dict[int, type[Room]] = {}


def room(size: int) -> Room:
    """Return memory with an address that stays, for rows or for what a call writes."""
    if size not in _sizes:

        class Sized(_ctypes.Array[_Byte]):
            _length_ = size
            _type_ = _Byte

        _sizes[size] = Sized
    return _sizes[size]()


def address_of(place: Room) -> int:
    return _ctypes.addressof(place)


class Routine:
    """The machine code in the memory of this process and of each fork; never writable and executable at once."""

    def __init__(self) -> None:
        """Raise OSError on a host that lets no process execute memory without a file."""
        memory = os.memfd_create("program", os.MFD_CLOEXEC)
        try:
            os.write(memory, CODE)
            self._address = syscalls.syscall(_NR_MMAP, 0, _PAGE, _PROT_READ_EXEC, _MAP_PRIVATE, memory, 0, what="mmap")
        finally:
            os.close(memory)
        self.call = syscalls.with_gil(self._address)

    def unmap(self) -> None:
        """Unmap the code, in a process that goes on in Python, and where a guest will be."""
        syscalls.syscall(_NR_MUNMAP, self._address, _PAGE, what="munmap")


_routines: list[Routine | None] = []  # of this process, made once


def routine() -> Routine | None:
    if not _routines:
        try:
            _routines.append(Routine())
        except OSError:
            _routines.append(None)
    return _routines[0]


class Hole:
    """An argument that is filled in before each run."""

    def __init__(self, name: str) -> None:
        self.name = name


class Slot:
    """The place for a result, or for what the kernel writes: an argument of a row, or bytes of a room."""

    def __init__(self, row: int, argument: int, place: Room | None = None) -> None:
        self.row = row
        self.argument = argument
        self.place = place


Argument = object  # int, bytes or a room (their address goes), a Hole or a Slot


class RowProgram:
    """Rows, and what Python does between them. Written once, then filled and run as often as wanted."""

    def __init__(self, used: Routine | None) -> None:
        self.native = used is not None
        self._routine = used
        self._words: list[int] = []  # the words of all rows
        self._whats: list[str] = []
        self._least: list[int] = []
        self._stores: dict[int, list[Slot]] = {}
        self._zeros: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._works: dict[int, Callable[[], object] | None] = {}
        self._slots: list[tuple[int, Slot]] = []  # which word is to be the address of which slot
        self._holes: dict[str, list[int]] = {}  # where each hole is in memory
        self._kept: list[object] = []  # objects whose addresses are in rows
        self._filled: dict[str, object] = {}
        self._memory: Room | None = None
        self._at = 0
        self._last = room(8)
        self._failed: OSError | None = None  # an error of what Python does between rows, which is not run again

    # writing

    @property
    def next(self) -> int:
        """Return the number that the next row will have."""
        return len(self._whats)

    def call(self, number: int, *arguments: Argument, what: str, least: int = 0) -> int:
        """Write a system call and return its row. `what` names the call in an error."""
        words = self._words
        words.append(number & _MASK)
        for value in arguments:
            words.append(value & _MASK if type(value) is int else self._word(value))
        words += _NO_WORDS[len(arguments) :]
        words[_LEAST - _IN_ROW] = least & _MASK
        self._whats.append(what)
        self._least.append(least)
        return len(self._whats) - 1

    def optional(self, number: int, *arguments: Argument) -> int:
        """Write a system call whose failure does not matter."""
        return self.call(number, *arguments, what="", least=-_PAGE)

    def compare(self, one: Argument, other: Argument, size: int, *, unequal: int) -> None:
        """Write a row that compares two pieces of memory, and goes on at row `unequal` when they differ."""
        self.if_failed(self.call(_COMPARE, one, other, size, what="compare"), unequal)

    def jump(self, then: int) -> None:
        """Write a row that skips other rows."""
        self.if_zero(self.call(_NR_CLOSE_RANGE, _NONE, _NONE, 0, what="jump"), then)

    def stop(self, work: Callable[[], object] | None = None) -> int:
        """Write a row that lets Python do something between rows. None: `run` ends there."""
        row = self.call(_STOP, what="stop")
        self._works[row] = work
        return row

    def store(self, row: int, *into: Slot) -> None:
        """Make the row's result an argument of one or two other rows."""
        assert len(into) <= len(_STORES)
        self._stores[row] = list(into)

    def if_zero(self, row: int, then: int) -> None:
        self._zeros[row] = then

    def if_failed(self, row: int, then: int) -> None:
        self._failures[row] = then

    def seal(self) -> None:
        """Lay out all rows, when the last is written. A run ends after the last row."""
        self.stop()
        words = self._words
        self._memory = room(8 * len(words))
        self._at = _ctypes.addressof(self._memory)
        for place, slot in self._slots:
            words[place] = self.address_of(slot)
        for row, slots in self._stores.items():
            for place, slot in zip(_STORES, slots, strict=False):
                words[row * _IN_ROW + place] = self.address_of(slot)
        for place, rows in ((_ZERO, self._zeros), (_FAILED, self._failures)):
            for row, then in rows.items():
                words[row * _IN_ROW + place] = self._at + then * _ROW.size
        struct.pack_into(f"<{len(words)}Q", self._memory, 0, *words)
        words.clear()

    def _word(self, value: Argument) -> int:
        if isinstance(value, Hole):
            self._holes.setdefault(value.name, []).append(8 * len(self._words))
            return 0
        if isinstance(value, Slot):
            self._slots.append((len(self._words), value))
            return 0
        return self.keep(value)  # type: ignore[arg-type]  # bytes or a room: there is nothing else

    def keep(self, value: bytes | Room) -> int:
        """Keep a value for as long as this program lives, and return its address."""
        self._kept.append(value)
        return syscalls.address_of(value) if isinstance(value, bytes) else _ctypes.addressof(value)

    def address_of(self, slot: Slot) -> int:
        """Return the address of a slot: in a row once all rows are laid out, in a room at any time."""
        if slot.place is not None:
            self._kept.append(slot.place)
            return _ctypes.addressof(slot.place) + slot.argument
        return self._at + slot.row * _ROW.size + _ARGUMENTS + 8 * slot.argument

    # filling

    def fill(self, name: str, value: int | bytes) -> None:
        """Set the value of every hole of a name. Bytes live until they are replaced."""
        word = value & _MASK if isinstance(value, int) else syscalls.address_of(value)
        self._filled[name] = value
        assert self._memory is not None
        for place in self._holes.get(name, ()):
            _WORD.pack_into(self._memory, place, word)

    def filled(self, argument: Argument) -> int:
        """Return what a number, or a hole for a number, is now."""
        value = self._filled[argument.name] if isinstance(argument, Hole) else argument
        assert isinstance(value, int)
        return value

    def value(self, slot: Slot) -> int:
        """Return what a result or the kernel put into a slot."""
        found = _WORD.unpack_from(*self._place_of(slot))[0]
        return int(found)

    def put(self, slot: Slot, value: int) -> None:
        _WORD.pack_into(*self._place_of(slot), value & _MASK)

    def _place_of(self, slot: Slot) -> tuple[Room, int]:
        if slot.place is not None:
            return slot.place, slot.argument
        assert self._memory is not None
        return self._memory, slot.row * _ROW.size + _ARGUMENTS + 8 * slot.argument

    # running

    def run(self, first: int = 0) -> int:
        """Go through the rows.

        Return in every process that the rows make, each time with the row where that process ended.
        """
        while True:
            row = self._native(first) if self._routine is not None else self._interpret(first)
            work = self._works.get(row)
            if work is None:
                return row
            try:
                work()
            except Exception as error:  # noqa: BLE001  # whatever it is: this may be a new process, whose stack is its maker's
                self._failed = error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
                return row
            first = row + 1

    def run_all(self) -> None:
        """Run a program that makes no process. Raises OSError at the first failure."""
        error = self.failure(self.run())
        if error is not None:
            raise error

    def failure(self, row: int) -> OSError | None:
        """Return why a run ended at a row; None when it was to end there."""
        if row in self._works:
            return self._failed
        (result,) = struct.unpack("<q", self._last)
        number = -result if result < 0 else errno.EPIPE  # fewer bytes than expected: the other end is gone
        return OSError(number, f"{os.strerror(number)} [{self._whats[row]}]")

    def _native(self, first: int) -> int:
        assert self._routine is not None
        ended = self._routine.call(self._at + first * _ROW.size, _ctypes.addressof(self._last), 0, 0, 0, 0, 0)
        return (int(ended) - self._at) // _ROW.size

    def _interpret(self, row: int) -> int:
        """Make the calls of the rows in Python, where there is no machine code."""
        assert self._memory is not None
        while True:
            number, *words = _ROW.unpack_from(self._memory, row * _ROW.size)
            if number == _STOP:
                return row
            result = -1 if number == _COMPARE else syscalls.raw_syscall(number, *words[:6])
            if result < self._least[row]:
                if row not in self._failures:
                    struct.pack_into("<q", self._last, 0, result)
                    return row
                row = self._failures[row]
                continue
            for slot in self._stores.get(row, ()):
                self.put(slot, result)
            row = self._zeros.get(row, row + 1) if result == 0 else row + 1


_NR_CLOSE_RANGE, _LAST_FD = 436, 0x7FFFFFFF
_NONE = _LAST_FD - 1  # a range that holds nothing


class Closing:
    """The rows that close every descriptor which a clone inherited, except `count` and the standard streams."""

    def __init__(self, program: RowProgram, name: str, count: int) -> None:
        self._program = program
        self._names = [f"{name}{number}" for number in range(count + 1)]
        for hole in self._names:
            program.call(_NR_CLOSE_RANGE, Hole(f"{hole}-first"), Hole(f"{hole}-last"), 0, what="close_range")

    def fill(self, kept: list[int]) -> None:
        first = 3
        ranges = []
        for fd in sorted({fd for fd in kept if fd >= first}):
            if fd > first:
                ranges.append((first, fd - 1))
            first = fd + 1
        ranges.append((first, _LAST_FD))
        ranges += [(_NONE, _NONE)] * (len(self._names) - len(ranges))
        for hole, (begin, end) in zip(self._names, ranges, strict=True):
            self._program.fill(f"{hole}-first", begin)
            self._program.fill(f"{hole}-last", end)
