"""A process stopped by ptrace: registers, memory, and system calls made in its name. From a single thread.

Everything is done under the process's own filter and with its own rights: the process gains none.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading

from ringfence.backends.process.memory.layout import TraceError, maps_of
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_DETACH, _SYSCALL, _SEIZE, _INTERRUPT = 17, 24, 0x4206, 0x4207
_GETREGSET, _SETREGSET, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x420A, 0x420B
_SYSGOOD, _EXITKILL = 1, 0x100000  # the second: the process dies with us
_PRSTATUS, _XSTATE = 1, 0x202
_WALL = 0x40000000
_SYSCALL_STOP = 0x85
_STOP_S = 20.0  # the longest that the process is stopped for
_WORD = (1 << 64) - 1
_INSTRUCTION = b"\x0f\x05"  # syscall
_PIECE = 1 << 16
_MOST_SEARCHED = 1 << 24  # bytes: a libc has 2 MiB of code, and a guest names ranges of any size (O22)
_NAMES = (  # in the kernel's order
    *(
        "r15",
        "r14",
        "r13",
        "r12",
        "rbp",
        "rbx",
        "r11",
        "r10",
        "r9",
        "r8",
        "rax",
        "rcx",
        "rdx",
        "rsi",
        "rdi",
        "orig_rax",
    ),
    *("rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
_RESTART = tuple(_WORD + 1 - number for number in (512, 514, 516))  # ERESTARTSYS, NOHAND, RESTARTBLOCK

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
]
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@final
class State(Struct):
    """The state of a process without its memory: registers and signal mask."""

    registers: tuple[int, ...]
    extended: bytes
    signal_mask: bytes


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]  # the name that ctypes demands


class Tracee:
    """A process that is stopped inside a `with` block. Every call must come from the thread that entered the block."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._instruction = 0
        self._moved = False  # its registers are changed: they are restored at the end, unless `become` replaced them
        self._watchdog = threading.Timer(_STOP_S, self._give_up)
        self._watchdog.daemon = True
        self._memory = -1
        self._base: tuple[int, ...] = ()
        self.scratch = 0  # an address on its stack that nothing uses: below the red zone

    def __enter__(self) -> Self:
        self._ptrace(_SEIZE, 0, _SYSGOOD | _EXITKILL)
        self._watchdog.start()
        try:
            self._ptrace(_INTERRUPT)
            self._wait()
            self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
            self._base = self.registers()
            self.keep_clear_of(self._base)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self._watchdog.cancel()
        if self._memory >= 0:
            os.close(self._memory)
        try:
            if self._moved:
                self._set_registers(restarted(self._base))
            self._ptrace(_DETACH)
        except OSError as error:
            if error.errno != errno.ESRCH:  # the process has ended
                raise

    def _ptrace(self, request: int, address: int = 0, data: int = 0) -> None:
        if _libc.ptrace(request, self.pid, address, data) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)} [ptrace {request:#x}]")

    def _wait(self) -> int:
        """Wait for the next stop, which comes within microseconds. Otherwise the watchdog kills the process."""
        _, status = os.waitpid(self.pid, _WALL)
        if not os.WIFSTOPPED(status):
            raise TraceError("it ended, or did not stop in time")
        return status

    def _give_up(self) -> None:
        try:
            os.kill(self.pid, 9)
        except ProcessLookupError:
            return

    # registers

    def _regset(self, request: int, kind: int, buffer: ctypes.Array[ctypes.c_char], size: int) -> int:
        vector = _Vector(ctypes.addressof(buffer), size)
        self._ptrace(request, kind, ctypes.addressof(vector))
        return int(vector.size)

    def registers(self) -> tuple[int, ...]:
        buffer = ctypes.create_string_buffer(27 * 8)
        self._regset(_GETREGSET, _PRSTATUS, buffer, 27 * 8)
        return struct.unpack("27Q", buffer.raw)

    def _set_registers(self, values: tuple[int, ...]) -> None:
        buffer = ctypes.create_string_buffer(struct.pack("27Q", *values), 27 * 8)
        self._regset(_SETREGSET, _PRSTATUS, buffer, 27 * 8)

    def state(self) -> State:
        """Return the state at the stop. A system call that the stop interrupted is to be made again."""
        extended = ctypes.create_string_buffer(1 << 14)
        size = self._regset(_GETREGSET, _XSTATE, extended, 1 << 14)
        mask = ctypes.create_string_buffer(8)
        self._ptrace(_GETSIGMASK, 8, ctypes.addressof(mask))
        return State(restarted(self._base), extended.raw[:size], mask.raw)

    def become(self, state: State) -> None:
        """Take over the state of another process, from which this process then goes on."""
        extended = ctypes.create_string_buffer(state.extended, len(state.extended))
        self._regset(_SETREGSET, _XSTATE, extended, len(state.extended))
        self._set_registers(state.registers)
        self._moved = False
        mask = ctypes.create_string_buffer(state.signal_mask, 8)
        self._ptrace(_SETSIGMASK, 8, ctypes.addressof(mask))

    def keep_clear_of(self, registers: tuple[int, ...]) -> None:
        """Move `scratch` below the stack that a process with these registers uses."""
        below = (registers[_NAMES.index("rsp")] - 16384) & ~0xFFF
        self.scratch = min(self.scratch or below, below)

    # memory

    def read_into(self, where: int, address: int, size: int) -> int:
        """Copy to an address of this process. A read of /proc/<pid>/mem would copy twice."""
        ours, theirs = _Vector(where, size), _Vector(address, size)
        count = _libc.process_vm_readv(self.pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)} [process_vm_readv]")
        return int(count)

    def read(self, address: int, size: int) -> bytes:
        return os.pread(self._memory, size, address)

    def write(self, address: int, data: bytes | memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._memory, data[done:], address + done)

    # calls in its name

    def call(self, number: int, *arguments: int) -> int:
        """Make a system call in the process's name, under its filter and rights. Raises OSError for a failed call."""
        self._moved = True
        values = dict(zip(_NAMES, self._base, strict=True))
        values.update(rax=number, orig_rax=_WORD, rip=self._syscall_instruction())
        values.update(zip(_ARGUMENTS, (*arguments, 0, 0, 0, 0, 0, 0)[:6], strict=True))
        self._set_registers(tuple(values[name] & _WORD for name in _NAMES))
        for _ in ("entry", "exit"):
            self._ptrace(_SYSCALL)
            while os.WSTOPSIG(self._wait()) != _SYSCALL_STOP:
                self._ptrace(_SYSCALL)
        result = self.registers()[_NAMES.index("rax")]
        if result > _WORD - 4096:
            number_of = _WORD + 1 - result
            raise OSError(number_of, f"{os.strerror(number_of)} [call {number} in process {self.pid}]")
        return result

    def _syscall_instruction(self) -> int:
        """Return the address of a `syscall` instruction: just before the stop, or in the process's libraries."""
        if not self._instruction:
            behind = self._base[_NAMES.index("rip")] - 2
            try:
                stands_behind_one = self.read(behind, 2) == _INSTRUCTION
            except OSError:  # nothing is mapped there: it runs the first instruction of a page
                stands_behind_one = False
            self._instruction = behind if stands_behind_one else self._search()
        return self._instruction

    def _search(self) -> int:
        """Search the libraries for the instruction, in pieces and in no more bytes than a libc has.

        Names, sizes and contents of these ranges may be the guest's.
        """
        left = _MOST_SEARCHED
        for row in maps_of(self.pid):
            if b"r-xp" not in row or (b"/libc" not in row and b"[vdso]" not in row):
                continue
            first, last = (int(part, 16) for part in row.split(None, 1)[0].split(b"-"))
            last = min(last, first + left)
            left -= last - first
            for start in range(first, last, _PIECE):
                at = self.read(start, min(_PIECE + 1, last - start)).find(_INSTRUCTION)
                if at >= 0:
                    return start + at
        raise TraceError("no system call instruction is where its libraries have one")


def restarted(registers: tuple[int, ...]) -> tuple[int, ...]:
    """Return registers with which a process makes an interrupted system call again."""
    values = dict(zip(_NAMES, registers, strict=True))
    if values["rax"] in _RESTART:
        values.update(rip=values["rip"] - 2, rax=values["orig_rax"], orig_rax=_WORD)
    return tuple(values[name] for name in _NAMES)
