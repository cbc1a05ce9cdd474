"""Searches files inside for text, in a worker: matches as JSON lines, a blank line as a heartbeat."""

from __future__ import annotations

import os
import stat

from ringfence.shared import fast_stdlib, tar, tree_pack
from ringfence.shared.openat import flush, open_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ringfence.shared.openat import Args

_CHUNK = 1 << 18
_BINARY = 8192  # a file with a NUL in so many first bytes is binary
_LINE = 1 << 16  # a longer line is searched in pieces
_SHOWN = 1000  # characters of a line that are reported
_BEAT_FILES, _BEAT_BYTES = 500, 8 << 20


def search(args: Args) -> dict[str, object]:
    """Report lines that hold `text`, in the order of a sorted walk, without links and binary files."""
    import fnmatch

    pattern, limit = args["pattern"], int(str(args["limit"]))
    finds = _finder(str(args["text"]), regex=bool(args["regex"]))
    top = open_path(str(args["path"]), os.O_RDONLY)
    found: list[bytes] = []
    beat = _SearchBeat()
    for shown, fd in _files(top, str(args["path"])):
        beat.file()
        name = os.path.basename(shown)
        if pattern is None or fnmatch.fnmatchcase(name, str(pattern)):
            for number, line in _lines(fd, beat):
                if finds(line):
                    found.append(fast_stdlib.dumps({"path": shown, "line": number, "text": line[:_SHOWN]}))
                    limit -= 1
                    if limit <= 0:
                        flush(found)
                        return {}
        flush(found)
    return {}


def _finder(text: str, *, regex: bool) -> Callable[[str], bool]:
    if not regex:
        return lambda line: text in line
    import re

    expression = re.compile(text)
    return lambda line: expression.search(line) is not None


def _files(top: int, path: str) -> Iterator[tuple[str, int]]:
    """Yield name and descriptor of every regular file below `top`, or of `top` if that is a file."""
    info = os.fstat(top)
    if not stat.S_ISDIR(info.st_mode):
        if stat.S_ISREG(info.st_mode):
            yield os.path.basename(path.rstrip("/")), top
        return
    for entry in tree_pack.walk(top, skip_closed=True):
        if not stat.S_ISREG(entry.info.st_mode):
            continue
        try:
            fd = tree_pack.opened(entry)
        except (OSError, tar.Refused):
            continue  # closed to the guest, or replaced meanwhile: the guest could not read it either
        if fd is None:
            continue
        try:
            yield os.fsdecode(entry.path), fd
        finally:
            os.close(fd)


def _lines(fd: int, beat: _SearchBeat) -> Iterator[tuple[int, str]]:
    """Yield lines, numbered from 1. Undecodable bytes are replaced."""
    number = 1
    rest = b""
    first = True
    while chunk := os.read(fd, _CHUNK):
        if first and b"\0" in chunk[:_BINARY]:
            return
        first = False
        beat.bytes(len(chunk))
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            for piece in _pieces(line):
                yield number, piece
            number += 1
        if len(rest) > _LINE:
            yield number, rest.decode("utf-8", "replace")
            rest = b""
    if rest:
        yield number, rest.decode("utf-8", "replace")


def _pieces(line: bytes) -> Iterator[str]:
    for start in range(0, len(line) or 1, _LINE):
        yield line[start : start + _LINE].removesuffix(b"\r").decode("utf-8", "replace")


class _SearchBeat:
    """A heartbeat for the host, sent while nothing is found."""

    def __init__(self) -> None:
        self._files = 0
        self._bytes = 0

    def file(self) -> None:
        self._files += 1
        if self._files % _BEAT_FILES == 0:
            os.write(1, b"\n")

    def bytes(self, count: int) -> None:
        self._bytes += count
        if self._bytes >= _BEAT_BYTES:
            self._bytes = 0
            os.write(1, b"\n")
