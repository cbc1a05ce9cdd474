"""A snapshot as one file: a header, the manifest, the content, and a digest of all of it at the end.

Whoever reads one trusts nothing in it: first the digest, then each field, then each piece of content by its own digest.
"""

from __future__ import annotations

import os
import stat
import struct

from ringfence.errors import SnapshotError
from ringfence.policy import host_paths
from ringfence.shared import fast_stdlib, syscalls
from ringfence.snapshots.content import Holder, Writer
from ringfence.snapshots.manifest import Manifest, check_digest, entry, hasher
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from ringfence.snapshots.content import Store

MAGIC = b"ringfence snapshot 1\n"
_SIZE = struct.Struct(">Q")
_MAX_HEADER = 1 << 16
_MAX_MANIFEST = 1 << 28
_CHUNK = 1 << 18
_TRAILER = 32
_FIELDS = {"id": str, "created_us": int, "policy_digest": str, "bound": str, "digest": str}


def export(path: str, header: dict[str, object], manifest: Manifest, store: Store) -> None:
    """Write it beside `path`, then put it there: what was there is replaced as a whole or not at all.

    The folder is opened once and held, and no link that a guest could have made leads there (L15).
    """
    folder, name = host_paths.open_parent(path)
    try:
        _export(folder, name, path, _pieces(header, manifest, store))
    finally:
        os.close(folder)


def _export(folder: int, name: str, path: str, pieces: Iterator[bytes]) -> None:
    temporary = f".{name[:50]}.{os.urandom(8).hex()}.part"
    try:
        fd, named = syscalls.open_unnamed_yet(folder, temporary)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    try:
        with open(fd, "wb", buffering=_CHUNK) as file:
            whole = hasher()
            for piece in pieces:
                whole.update(piece)
                file.write(piece)
            file.write(whole.digest())
            file.flush()
            os.fsync(file.fileno())
            if not named:
                os.link(f"/proc/self/fd/{fd}", temporary, dst_dir_fd=folder, follow_symlinks=True)
                named = True
        _put(temporary, name, folder, path)
    except BaseException:
        if named:
            os.unlink(temporary, dir_fd=folder)
        raise


def _put(temporary: str, name: str, folder: int, path: str) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _pieces(header: dict[str, object], manifest: Manifest, store: Store) -> Iterator[bytes]:
    yield MAGIC
    for part in (fast_stdlib.dumps(header), manifest.to_json()):
        yield _SIZE.pack(len(part))
        yield part
    for digest in sorted(manifest.digests):
        yield from store.read(digest, manifest.digests[digest])


def load(path: str, store: Store) -> tuple[dict[str, object], Manifest, Holder]:
    """Header, tree, and its content in `store`. Raises SnapshotError, with nothing kept, when a byte differs."""
    fd = host_paths.open_itself(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise _damaged(path, "it is no regular file")
    with open(fd, "rb", buffering=_CHUNK) as file:
        _check_whole(file, info.st_size, path)
        holder = Holder(store)
        try:
            return *_parts(file, info.st_size - _TRAILER, path, holder), holder
        except BaseException:
            holder.close()
            raise


def _check_whole(file: BinaryIO, size: int, path: str) -> None:
    if file.read(len(MAGIC)) != MAGIC:
        raise _damaged(path, "it does not begin like a snapshot")
    whole = hasher()
    whole.update(MAGIC)
    left = size - len(MAGIC) - _TRAILER
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        whole.update(chunk)
        left -= len(chunk)
    if left or file.read(_TRAILER + 1) != whole.digest():
        raise _damaged(path, "its bytes do not match its digest: it was cut short or altered")


def _parts(file: BinaryIO, end: int, path: str, holder: Holder) -> tuple[dict[str, object], Manifest]:
    file.seek(len(MAGIC))
    header = _header(_json(_part(file, _MAX_HEADER, path), path), path)
    said = _json(_part(file, _MAX_MANIFEST, path), path).get("entries")
    if not isinstance(said, list):
        raise _damaged(path, "it has no list of files")
    manifest = Manifest(entry(row) for row in said)
    if manifest.digest(str(header["bound"])) != header["digest"]:
        raise _damaged(path, "its list of files does not match its digest")
    if file.tell() + sum(manifest.digests.values()) != end:
        raise _damaged(path, "it has more or less content than its files")
    for digest in sorted(manifest.digests):
        left = manifest.digests[digest]
        writer = Writer(holder.store, left)
        try:
            while left and (chunk := file.read(min(left, _CHUNK))):
                writer.write(chunk)
                left -= len(chunk)
            found = holder.commit(writer)
        except BaseException:
            writer.drop()
            raise
        if found != digest:
            raise _damaged(path, "content does not match its digest")
    return header, manifest


def _part(file: BinaryIO, most: int, path: str) -> bytes:
    said = file.read(_SIZE.size)
    size = _SIZE.unpack(said)[0] if len(said) == _SIZE.size else most + 1
    if size > most:
        raise _damaged(path, "a part of it is longer than any is")
    return file.read(size)


def _json(data: bytes, path: str) -> dict[str, object]:
    try:
        said = frames.strict_json(data)
    except frames.WireError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(said, dict):
        raise _damaged(path, "a part of it is no object")
    return said


def _header(said: dict[str, object], path: str) -> dict[str, object]:
    if set(said) != set(_FIELDS) or any(type(said[name]) is not kind for name, kind in _FIELDS.items()):
        raise _damaged(path, "its header has other fields than it has")
    number, stamp = str(said["id"]), said["created_us"]
    assert isinstance(stamp, int)
    if not number.startswith("n-") or not number[2:].isalnum() or len(number) > 40 or not 0 <= stamp < 1 << 52:
        raise _damaged(path, "its header has other fields than it has")
    try:
        f"{said['bound']}{said['policy_digest']}".encode()
    except UnicodeEncodeError:  # JSON can name halves of characters
        raise _damaged(path, "its header has a text that is none") from None
    check_digest(said["digest"])
    return said


def _damaged(path: str, why: str) -> SnapshotError:
    return SnapshotError(
        f"{path} is no snapshot that can be used: {why}", code="snapshot-damaged", fix="export it again"
    )
