"""Owns the zip format inside the sandbox: a strict reader of a file that was fetched before, and a writer of a stream.

The reader believes the directory at the end only if each entry's own header says the same (K02). It takes one disk, no
overlap, no encryption, stored or deflated bytes, exactly as many as announced (F21).
"""

from __future__ import annotations

import os
import stat
import struct

from ringfence.shared import tree_pack
from ringfence.shared.tar import DIRECTORY, FILE, SYMLINK, Member, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator
    from typing import IO

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL, _FULL64 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_CHUNK = 1 << 18
_MAX_LINK = 4096
_STORED, _DEFLATED = 0, 8


class _Entry:
    __slots__ = ("crc", "member", "method", "offset", "packed", "raw", "size")
    crc: int
    member: Member
    method: int
    offset: int
    packed: int
    raw: bytes
    size: int


def members(fd: int, most: int) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Yield each entry with its bytes, in the order of the file.

    Raise Refused where there are more than `most` entries.
    """
    size = os.fstat(fd).st_size
    count, start, length = _directory(fd, size)
    if count > most:
        raise Refused("files")
    entries = sorted(_entries(fd, count, start, length), key=lambda entry: entry.offset)
    if (entries[0].offset if entries else start) != 0:  # as in a program that unpacks itself
        raise Refused("not-zip")
    for entry, following in zip(entries, [*(e.offset for e in entries[1:]), start], strict=True):
        begin = _check_local(fd, entry)
        if begin + entry.packed > following:
            raise Refused("overlap", entry.raw)
        content = _content(fd, entry, begin)
        if entry.member.kind == SYMLINK:
            entry.member.link = b"".join(content)
            entry.member.size = 0
            content = iter(())
        yield entry.member, content


def _pread(fd: int, count: int, offset: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) != count:
        raise Refused("cut-short")
    return data


def _directory(fd: int, size: int) -> tuple[int, int, int]:
    """Return entries, offset and length of the directory at the end."""
    tail_at = max(0, size - _END.size - 0xFFFF)
    tail = _pread(fd, size - tail_at, tail_at)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or len(tail) - found < _END.size:
        raise Refused("not-zip")
    _, disk, first, here, count, length, start, comment = _END.unpack_from(tail, found)
    end_at = tail_at + found
    if disk or first or here != count or end_at + _END.size + comment != size:
        raise Refused("not-zip")
    if count == _FULL or length == _FULL64 or start == _FULL64:
        count, start, length, end_at = _directory64(fd, end_at)
    if start + length != end_at:  # no bytes between or before, in which another reader could see another archive
        raise Refused("not-zip")
    return count, start, length


def _directory64(fd: int, end_at: int) -> tuple[int, int, int, int]:
    at = end_at - _END64_LOCATOR.size
    if at < 0:
        raise Refused("not-zip")
    magic, disk, where, disks = _END64_LOCATOR.unpack(_pread(fd, _END64_LOCATOR.size, at))
    if magic != b"PK\6\7" or disk or disks > 1 or where + _END64.size > at:
        raise Refused("not-zip")
    magic, _, _, _, disk, first, here, count, length, start = _END64.unpack(_pread(fd, _END64.size, where))
    if magic != b"PK\6\6" or disk or first or here != count:
        raise Refused("not-zip")
    return count, start, length, where


def _entries(fd: int, count: int, start: int, length: int) -> Iterator[_Entry]:
    if count > length // _CENTRAL.size:
        raise Refused("not-zip")
    at = start
    end = start + length
    for _ in range(count):
        if at + _CENTRAL.size > end:
            raise Refused("cut-short")
        fields = _CENTRAL.unpack(_pread(fd, _CENTRAL.size, at))
        magic, made_by, _, flags, method, clock, date, crc, packed, size, names, extras, comments = fields[:13]
        disk, _, attributes, offset = fields[13:]
        if magic != b"PK\1\2" or disk not in (0, _FULL):
            raise Refused("not-zip")
        rest = _pread(fd, names + extras + comments, at + _CENTRAL.size)
        at += _CENTRAL.size + len(rest)
        entry = _Entry()
        entry.raw = rest[:names]
        size, packed, offset = _zip64(rest[names : names + extras], size, packed, offset)
        if flags & _ENCRYPTED:
            raise Refused("encrypted", entry.raw)
        if method not in (_STORED, _DEFLATED):
            raise Refused("method", entry.raw)
        entry.method, entry.crc, entry.packed, entry.size, entry.offset = method, crc, packed, size, offset
        entry.member = _member(entry.raw, flags, made_by >> 8, attributes, size)
        entry.member.mtime = _time(date, clock)
        yield entry
    if at != end:
        raise Refused("not-zip")


def _zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    if _FULL64 not in (size, packed, offset):
        return size, packed, offset
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        body, extra = extra[4 : 4 + length], extra[4 + length :]
        if kind != 1:
            continue
        wanted = [value == _FULL64 for value in (size, packed, offset)]
        if length != 8 * sum(wanted) or len(body) != length:
            raise Refused("size")
        values = iter(struct.unpack(f"<{length // 8}Q", body))
        size, packed, offset = (next(values) if w else v for w, v in zip(wanted, (size, packed, offset), strict=True))
        if max(size, packed, offset) >> 53:
            raise Refused("size")
        return size, packed, offset
    raise Refused("size")


def _member(raw: bytes, flags: int, system: int, attributes: int, size: int) -> Member:
    """Return an entry as a member. `system` 3 is Unix: the upper half of the attributes is a mode."""
    if b"\\" in raw or (len(raw) > 1 and raw[1:2] == b":"):
        raise Refused("name", raw)  # separators and drives of other systems
    name = raw if flags & 0x800 or raw.isascii() else raw.decode("cp437").encode()
    mode = attributes >> 16 if system == 3 else 0
    kind = stat.S_IFMT(mode)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise Refused("device", raw)
    folder = raw.endswith(b"/")
    if folder != (kind == stat.S_IFDIR) and kind:
        raise Refused("type", raw)
    if (folder and size) or (kind == stat.S_IFLNK and size > _MAX_LINK):
        raise Refused("size", raw)
    member_kind = SYMLINK if kind == stat.S_IFLNK else DIRECTORY if folder else FILE
    return Member(name, member_kind, size, mode & 0o777 or (0o755 if folder else 0o644), 0, b"")


def _time(date: int, clock: int) -> int:
    """Return the time of an entry as UTC: a zip holds local time and names no zone.

    A date that no calendar has is moved on.

    Computed here, because the module `calendar` may not be importable in a sandbox.
    """
    year = 1980 + (date >> 9)
    month = min(max(date >> 5 & 15, 1), 12)
    day = max(date & 31, 1)
    year -= month < 3  # leap days come last in years that begin in March
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day - 719469
    return days * 86400 + (clock >> 11) * 3600 + (clock >> 5 & 63) * 60 + (clock & 31) * 2


def _check_local(fd: int, entry: _Entry) -> int:
    """Return where an entry's bytes begin. Raise Refused when its local header contradicts the directory."""
    fields = _LOCAL.unpack(_pread(fd, _LOCAL.size, entry.offset))
    magic, _, flags, method, _, _, _, packed, size, names, extras = fields
    name = _pread(fd, names, entry.offset + _LOCAL.size)
    if magic != b"PK\3\4" or name != entry.raw or method != entry.method or flags & _ENCRYPTED:
        raise Refused("mismatch", entry.raw)
    later = bool(flags & 8)  # the sizes come after the bytes
    for stated, known in ((size, entry.size), (packed, entry.packed)):
        if stated not in (known, _FULL64) and not (later and stated == 0):
            raise Refused("mismatch", entry.raw)
    return entry.offset + _LOCAL.size + int(names) + int(extras)


def _content(fd: int, entry: _Entry, begin: int) -> Iterator[bytes]:
    import zlib

    produced = 0
    crc = 0
    for piece in _unpacked(fd, entry, begin):
        produced += len(piece)
        if produced > entry.size:
            raise Refused("bomb", entry.raw)
        crc = zlib.crc32(piece, crc)
        yield piece
    if produced != entry.size or crc != entry.crc:
        raise Refused("damaged", entry.raw)


def _unpacked(fd: int, entry: _Entry, begin: int) -> Iterator[bytes]:
    """Yield an entry's bytes in pieces of bounded size, however small the packed pieces are."""
    import zlib

    if entry.method == _STORED and entry.packed != entry.size:
        raise Refused("mismatch", entry.raw)
    inflate = zlib.decompressobj(-zlib.MAX_WBITS) if entry.method == _DEFLATED else None
    at = begin
    end = begin + entry.packed
    try:
        while at < end:
            data = _pread(fd, min(_CHUNK, end - at), at)
            at += len(data)
            if inflate is None:
                yield data
                continue
            while data and not inflate.eof:
                yield inflate.decompress(data, _CHUNK)
                data = inflate.unconsumed_tail
        if inflate is not None and (not inflate.eof or inflate.unused_data):
            raise Refused("damaged", entry.raw)
    except zlib.error:
        raise Refused("damaged", entry.raw) from None


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def write(top: int, out: IO[bytes], caps: tree_pack.TransferCaps) -> None:
    """Write a folder as a zip stream. Names that are no text are refused, as a zip cannot hold them."""
    import zipfile

    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for found in tree_pack.walk(top):
            _write_entry(archive, found, caps)


def write_file(fd: int, name: bytes, out: IO[bytes], caps: tree_pack.TransferCaps) -> None:
    import zipfile

    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        _write_body(archive, _zip_info(name, os.fstat(fd)), fd, name, caps)


def _write_entry(archive: zipfile.ZipFile, found: tree_pack.Found, caps: tree_pack.TransferCaps) -> None:
    mode = found.info.st_mode
    if stat.S_ISREG(mode):
        fd = tree_pack.opened(found)
        if fd is None:
            return
        try:
            _write_body(archive, _zip_info(found.path, os.fstat(fd)), fd, found.path, caps)
        finally:
            os.close(fd)
        return
    caps.count(0, found.path)
    if stat.S_ISDIR(mode):
        archive.writestr(_zip_info(found.path + b"/", found.info), b"")
    elif stat.S_ISLNK(mode):
        archive.writestr(_zip_info(found.path, found.info), os.readlink(found.name, dir_fd=found.directory))
    else:
        raise Refused("special", found.path)


def _write_body(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, fd: int, path: bytes, caps: tree_pack.TransferCaps
) -> None:
    size = os.fstat(fd).st_size
    caps.count(size, path)
    with archive.open(info, "w", force_zip64=size > 1 << 31) as entry:
        left = size
        while left and (data := os.read(fd, min(_CHUNK, left))):
            entry.write(data)
            left -= len(data)
    if left:
        raise Refused("changed", path)


def _zip_info(path: bytes, info: os.stat_result) -> zipfile.ZipInfo:
    import time
    import zipfile

    try:
        name = path.decode()
    except UnicodeDecodeError:
        raise Refused("not-text", path) from None
    if "\\" in name:
        raise Refused("not-text", path)  # a separator on other systems
    date = time.gmtime(min(max(info.st_mtime, 315532800), 4354819199))[:6]  # a zip's years: 1980 to 2107
    made = zipfile.ZipInfo(name, date)
    made.create_system = 3
    made.external_attr = (stat.S_IFMT(info.st_mode) | info.st_mode & 0o777) << 16
    made.compress_type = zipfile.ZIP_DEFLATED
    return made
