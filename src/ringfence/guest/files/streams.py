"""Moves whole trees in and out, in a worker: writes an archive to standard output, or reads one from standard input."""

from __future__ import annotations

import errno
import os
import stat

from ringfence.guest.files import zip_stream
from ringfence.shared import fast_stdlib, syscalls, tar, tree_pack, tree_unpack, tree_walk
from ringfence.shared.openat import make_directories, open_path, remove_made, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence.shared.openat import Args

_CHUNK = 1 << 18
_BEAT = 4 << 20
_BEAT_FILES = 256


def _caps(args: Args) -> tree_pack.TransferCaps:
    most_bytes, most_files = args["most_bytes"], args["most_files"]
    return tree_pack.TransferCaps(
        most_bytes if isinstance(most_bytes, int) else None, most_files if isinstance(most_files, int) else None
    )


def _open_source(path: str) -> tuple[int, bool]:
    """Open what is to go out. Return whether it is a folder too. A link at the end of the path is followed, inside."""
    fd = open_path(path, os.O_RDONLY)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    return fd, stat.S_ISDIR(mode)


def measure(args: Args) -> dict[str, object]:
    """Measure what `pack` of this path would hold. Refuses what `pack` would refuse."""
    fd, folder = _open_source(str(args["path"]))
    caps = _caps(args)
    if folder:
        tree_pack.measure(fd, caps)
    else:
        caps.count(os.fstat(fd).st_size, os.fsencode(str(args["path"])))
    return {"folder": folder, "bytes": caps.bytes, "files": caps.files}


def pack(args: Args) -> dict[str, object]:
    path = str(args["path"])
    fd, folder = _open_source(path)
    name = os.fsencode(os.path.basename(os.path.normpath(path)) or "file")
    caps = _caps(args)
    if args["format"] == "zip":
        with open(1, "wb", buffering=_CHUNK, closefd=False) as out:
            zip_stream.write(fd, out, caps) if folder else zip_stream.write_file(fd, name, out, caps)
    else:
        _send(tree_pack.tar(fd, caps) if folder else tree_pack.tar_file(fd, name, caps))
    return {"bytes": caps.bytes, "files": caps.files}


def _send(pieces: Iterable[bytes | tree_pack.Body]) -> None:
    """Send to standard output, small pieces together."""
    held = bytearray()
    for piece in pieces:
        if isinstance(piece, tree_pack.Body) and piece.size <= _CHUNK:
            held += _whole(piece)
        elif isinstance(piece, tree_pack.Body):
            write_all(1, held)
            held.clear()
            _send_body(piece)
        else:
            held += piece
        if len(held) >= _CHUNK:
            write_all(1, held)
            held.clear()
    write_all(1, held)


def _whole(body: tree_pack.Body) -> bytes:
    data = b""
    while len(data) < body.size and (more := os.read(body.fd, body.size - len(data))):
        data += more
    if len(data) < body.size:
        raise tar.Refused("changed", body.path)
    return data


def _send_body(body: tree_pack.Body) -> None:
    """Send a file's bytes by the kernel, from file to pipe."""
    left = body.size
    while left:
        sent = os.sendfile(1, body.fd, None, min(left, _CHUNK))
        if not sent:
            raise tar.Refused("changed", body.path)
        left -= sent


def unpack(args: Args) -> dict[str, object]:
    """Unpack an archive into a folder.

    The archive is unpacked into a staging folder beside the target first: a refused archive leaves nothing.
    """
    path = str(args["path"])
    fast_stdlib.hold_stops()  # a stop between making a file and noting it would leave the file there
    made = make_directories(path)
    target = open_path(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _unpack_below(target, args)
    except BaseException:
        remove_made(path, made)
        raise
    return {}


def _unpack_below(target: int, args: Args) -> None:
    stage_name = str(args["stage"])
    archive = _spool() if args["format"] == "zip" else -1
    os.mkdir(stage_name, 0o700, dir_fd=target)
    try:
        stage = tree_pack.descend(target, os.fsencode(stage_name))
        rules = tree_unpack.Rules(any_link=bool(args["any_link"]), hard_links=True, exact_modes=True)
        planter = tree_unpack.Planter(stage, _caps(args), rules)
        try:
            fast_stdlib.hold_stops(hold=False)
            if archive >= 0:
                most = args["most_files"]
                _plant_zip(archive, planter, most if isinstance(most, int) else 1 << 20)
            else:
                _plant_tar(planter)
            fast_stdlib.hold_stops()
        finally:
            planter.close()
        tree_unpack.merge(stage, target)
    finally:
        tree_walk.remove_tree(target, stage_name)


def _spool() -> int:
    """Put all of standard input into a file without a name: a zip is read from its end."""
    fd = syscalls.open_nameless("/tmp")
    fast_stdlib.hold_stops(hold=False)
    while chunk := os.read(0, _CHUNK):
        write_all(fd, chunk)
    fast_stdlib.hold_stops()
    return fd


class _StreamBeat:
    """A byte on standard output now and then, which shows the host that the worker is at work."""

    def __init__(self) -> None:
        self._next = _BEAT
        self._entries = 0

    def __call__(self, written: int) -> None:
        if written >= self._next:
            self._next = written + _BEAT
            os.write(1, b".")

    def entry(self) -> None:
        self._entries += 1
        if self._entries % _BEAT_FILES == 0:
            os.write(1, b".")


def _plant_tar(planter: tree_unpack.Planter) -> None:
    unpacker = tree_unpack.Unpacker(planter)
    while chunk := os.read(0, _CHUNK):
        unpacker.feed(chunk)
    unpacker.finish()


def _plant_zip(archive: int, planter: tree_unpack.Planter, most: int) -> None:
    beat = _StreamBeat()
    for member, content in zip_stream.members(archive, most):
        beat.entry()
        planter.add(member)
        for piece in content:
            planter.write(memoryview(piece))
            beat(planter.written)
        if member.kind == tar.FILE:
            planter.end_file()
