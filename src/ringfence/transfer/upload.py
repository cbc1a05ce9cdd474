"""The source of an upload: a host file, or a folder as a tar stream. Links in the caller's folder stay links."""

from __future__ import annotations

import os
import stat

from ringfence.policy import host_paths
from ringfence.shared import tree_pack
from ringfence.shared.tar import Refused
from ringfence.wire.file_replies import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.values import HostPath

_CHUNK = 1 << 18  # one frame


class Leaving:
    """One upload.

    Opens its source once; below a folder only descriptors are used, and no link is followed (C01, L17).
    """

    def __init__(self, source: HostPath) -> None:
        self._path = os.fspath(source)
        self._fd = host_paths.open_itself(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        info = os.fstat(self._fd)
        self.folder = stat.S_ISDIR(info.st_mode)
        self.mode = info.st_mode & 0o777
        self.name = os.path.basename(os.path.abspath(self._path))
        if not self.folder and not stat.S_ISREG(info.st_mode):
            os.close(self._fd)
            raise OSError(22, "neither a file nor a folder", str(self._path))
        self.total = info.st_size
        self._pieces: Iterator[bytes] | None = None
        self._counted = 0

    def measure(self) -> None:
        """Set `total` to what the files of a folder hold."""
        caps = tree_pack.TransferCaps(None, None)
        try:
            tree_pack.measure(self._fd, caps)
        except Refused as error:
            raise refusal(error.why, os.fsdecode(error.name), str(self._path)) from None
        self.total = caps.bytes

    def read(self) -> tuple[bytes, int]:
        """Return the next bytes to send, b"" at the end, and how many of them are bytes of files."""
        if not self.folder:
            data = os.read(self._fd, _CHUNK)
            return data, len(data)
        if self._pieces is None:
            self._pieces = self._tar()
        self._counted = 0
        try:
            return next(self._pieces, b""), self._counted
        except Refused as error:
            raise refusal(error.why, os.fsdecode(error.name), str(self._path)) from None

    def _tar(self) -> Iterator[bytes]:
        held = bytearray()
        for piece in tree_pack.tar(self._fd, tree_pack.TransferCaps(None, None)):
            if isinstance(piece, tree_pack.Body):
                left = piece.size
                while left:
                    data = os.read(piece.fd, min(left, _CHUNK))
                    if not data:
                        raise Refused("changed", piece.path)
                    left -= len(data)
                    self._counted += len(data)
                    held += data
                    if len(held) >= _CHUNK:
                        yield bytes(held)
                        held.clear()
            else:
                held += piece
        yield bytes(held)

    def close(self) -> None:
        self._pieces = None
        os.close(self._fd)
