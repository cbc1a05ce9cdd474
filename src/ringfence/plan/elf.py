"""Reads what a native program needs to load: its ELF interpreter, and its libraries as the dynamic linker finds them.

For 64-bit little-endian files; anything else, and anything malformed, needs nothing as far as this module can tell.
"""

from __future__ import annotations

import os
import struct

from ringfence.values import Struct, final

_DEFAULT_DIRECTORIES = (
    *("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"),
    "/usr/local/lib",
)
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 15, 29
_LARGEST = 1 << 20  # of any table read
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_X86_64_LIBC6 = 0x0303


@final
class Needs(Struct):
    """What one ELF file names."""

    interpreter: str | None
    libraries: tuple[str, ...]
    search: tuple[str, ...]  # DT_RUNPATH or DT_RPATH, $ORIGIN filled in


NOTHING = Needs(interpreter=None, libraries=(), search=())


def needs(path: str) -> Needs:
    """Of the real file `path`. Reads headers only."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return NOTHING
    try:
        return _parse(fd, os.path.dirname(path))
    except (struct.error, OSError, OverflowError):
        return NOTHING
    finally:
        os.close(fd)


def linker_cache() -> dict[str, str]:
    """Library name → path, as ldconfig left them; empty where there is no cache of the current format."""
    try:
        with open("/etc/ld.so.cache", "rb") as file:
            data = file.read(64 << 20)
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)  # an old-format cache may stand before it
    if start < 0:
        return {}
    data = data[start:]
    found: dict[str, str] = {}
    try:
        (count,) = struct.unpack_from("<I", data, 20)
        for index in range(min(count, 1 << 16)):
            flags, key, value = struct.unpack_from("<iII", data, 48 + 24 * index)
            if flags == _X86_64_LIBC6:
                found.setdefault(_text(data, key), _text(data, value))
    except struct.error:
        return found
    return found


def find_library(name: str, search: tuple[str, ...], cache: dict[str, str]) -> str | None:
    """Where the dynamic linker would find `name`; None when it would not."""
    if "/" in name:
        return name if os.path.exists(name) else None
    for directory in search:
        if os.path.exists(f"{directory}/{name}"):
            return f"{directory}/{name}"
    cached = cache.get(name)
    if cached is not None and os.path.exists(cached):
        return cached
    return next((f"{one}/{name}" for one in _DEFAULT_DIRECTORIES if os.path.exists(f"{one}/{name}")), None)


def _parse(fd: int, origin: str) -> Needs:
    header = os.pread(fd, 64, 0)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return NOTHING
    offset, size, count = struct.unpack_from("<Q", header, 32)[0], *struct.unpack_from("<HH", header, 54)
    if size != 56:
        return NOTHING
    table = os.pread(fd, size * count, offset)
    segments = [_segment(table, size * index) for index in range(count)]
    interpreter, dynamic = None, b""
    for kind, where, _, length in segments:
        if kind == _PT_INTERP:
            interpreter = os.fsdecode(os.pread(fd, min(length, 4096), where).rstrip(b"\0"))
        elif kind == _PT_DYNAMIC:
            dynamic = os.pread(fd, min(length, _LARGEST), where)
    entries = [struct.unpack_from("<qQ", dynamic, index) for index in range(0, len(dynamic) - 15, 16)]
    values = dict(entries)
    strings = _strings(fd, segments, values)
    libraries = tuple(_text(strings, value) for tag, value in entries if tag == _DT_NEEDED)
    search = values.get(_DT_RUNPATH, values.get(_DT_RPATH))
    listed = _text(strings, search) if search is not None else ""
    return Needs(interpreter=interpreter, libraries=libraries, search=_directories(listed, origin))


def _segment(table: bytes, at: int) -> tuple[int, int, int, int]:
    kind, _, where, address, _, length, _, _ = struct.unpack_from("<IIQQQQQQ", table, at)
    return kind, where, address, length


def _strings(fd: int, segments: list[tuple[int, int, int, int]], values: dict[int, int]) -> bytes:
    address = values.get(_DT_STRTAB)
    if address is None:
        return b""
    for kind, where, start, length in segments:
        if kind == _PT_LOAD and start <= address < start + length:
            return os.pread(fd, min(values.get(_DT_STRSZ, 0), _LARGEST), where + address - start)
    return b""


def _text(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    return os.fsdecode(data[at:end]) if 0 <= at < end else ""


def _directories(listed: str, origin: str) -> tuple[str, ...]:
    filled = listed.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
    return tuple(os.path.normpath(one) for one in filled.split(":") if one.startswith("/"))
