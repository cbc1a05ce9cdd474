"""Puts seccomp filters on itself and then makes system calls or becomes a program. Run by test_compiler.py.

usage: under_filter.py FILTERS.json call CALLS.json | run ARGV...
FILTERS is a list of hex strings. CALLS is a list of lists: number, then integers or strings (passed by address).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_GETPID_32 = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret


def _word(value: int | str) -> object:
    # A bare int would travel as a 32-bit C int with rubbish above it.
    return ctypes.c_char_p(value.encode()) if isinstance(value, str) else ctypes.c_long(value)


def _call(number: int, *args: int | str) -> list[int]:
    ctypes.set_errno(0)
    result = _libc.syscall(ctypes.c_long(number), *[_word(arg) for arg in args])
    return [result, ctypes.get_errno() if result == -1 else 0]


def _install(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    if _libc.syscall(ctypes.c_long(317), ctypes.c_long(1), ctypes.c_long(0), header) != 0:
        raise OSError(ctypes.get_errno(), "seccomp refused the filter")


def _int80() -> list[int]:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_GETPID_32)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return [int(ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0), 0]


def main(filters: str, verb: str, *rest: str) -> None:
    if _libc.prctl(38, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    for program in json.loads(filters):
        _install(bytes.fromhex(program))
    if verb == "run":
        os.execv(rest[0], rest)
    for call in json.loads(rest[0]):
        answer = _int80() if call == ["int80"] else _call(*call)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
