"""The target of a download: a host folder that is held open, filled from a tar stream that a hostile guest may have
made.

Below the folder everything is opened by descriptor and without following links; names with `..`, absolute names,
devices, hard links and links that lead out are refused (K01, K04, C01). All files are staged beside their place first:
a download that is refused, fails or is given up leaves nothing.
"""

from __future__ import annotations

import errno
import os

from ringfence.host import import_path
from ringfence.policy import host_paths
from ringfence.shared import tar, tree_pack, tree_unpack, tree_walk
from ringfence.shared.tar import Refused
from ringfence.wire.file_replies import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence.shared.tar import Member
    from ringfence.values import HostPath

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RULES = tree_unpack.Rules(any_link=False, hard_links=False, exact_modes=False)


class Landing:
    """One download. `feed` the stream, then `finish`; `give_up` at any other end. Not safe from several threads."""

    def __init__(self, target: HostPath, source: str, *, folder: bool, caps: tree_pack.TransferCaps) -> None:
        """Open the folder that will hold the files. Raise OSError when the caller's target cannot be used (L17)."""
        self._path = os.fspath(target)
        if folder:  # the guest chooses the names in it
            import_path.shown_writable([os.path.realpath(os.fsdecode(self._path))])
        self._source = source
        self._folder = folder
        self._made = False
        self._parent, self._name = host_paths.open_parent(self._path)
        self._target = self._top = -1
        self._stage_name = f".ringfence-{os.urandom(8).hex()}.part"
        try:
            self._target = self._open_folder() if folder else self._open_place()
            os.mkdir(self._stage_name, 0o700, dir_fd=self._target)
            self._top = tree_pack.descend(self._target, self._stage_name.encode())
        except OSError as error:
            if self._made:
                _remove_empty(self._name, self._parent)
            self._close()
            raise OSError(error.errno, error.strerror, self._path) from None
        self._planter = tree_unpack.Planter(self._top, caps, _RULES)
        self._unpacker = tree_unpack.Unpacker(self._planter, self._check)

    def _open_folder(self) -> int:
        """Open the caller's folder, resolved once; from then on only the descriptor counts."""
        try:
            os.mkdir(self._name, dir_fd=self._parent)
            self._made = True
        except FileExistsError:
            pass  # the caller made it; the open below fails for anything but a folder
        return os.open(self._name, _OPEN, dir_fd=self._parent)

    def _open_place(self) -> int:
        """Open the folder of a single file. A target that is a folder takes the file under its own name."""
        try:
            inside = os.open(self._name, _OPEN, dir_fd=self._parent)
        except (FileNotFoundError, NotADirectoryError):
            return os.dup(self._parent)
        self._name = os.path.basename(os.path.normpath(self._source))
        return inside

    @property
    def written(self) -> int:
        return self._planter.written

    def feed(self, pieces: Iterable[bytes]) -> None:
        """Unpack the next bytes.

        Raise OSError for what is refused, and for the host's own trouble, a full disk for example.
        """
        try:
            for piece in pieces:
                self._unpacker.feed(piece)
        except Refused as error:
            raise refusal(error.why, os.fsdecode(error.name), self._source) from None

    def _check(self, member: Member) -> None:
        """Refuse anything but a file in the download of a single file, and give the file our own name."""
        if self._folder:
            return
        if member.kind != tar.FILE:
            raise Refused("type", member.name)
        member.parts = [b"file"]

    def finish(self) -> None:
        """End the stream and move everything to its place."""
        try:
            self._unpacker.finish()
        except Refused as error:
            raise refusal(error.why, os.fsdecode(error.name), self._source) from None
        if self._folder:
            tree_unpack.merge(self._top, self._target)
        else:
            self._place_file()
        self._made = False
        self.give_up()

    def _place_file(self) -> None:
        try:
            os.rename("file", self._name, src_dir_fd=self._top, dst_dir_fd=self._target)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), self._path) from None

    def give_up(self) -> None:
        """Remove the staged files and close everything."""
        if self._top < 0:
            return
        self._planter.close()
        try:
            tree_walk.remove_tree(self._target, self._stage_name)
            if self._made:
                _remove_empty(self._name, self._parent)
        finally:
            self._close()

    def _close(self) -> None:
        for fd in (self._parent, self._target, self._top):
            if fd >= 0:
                os.close(fd)
        self._parent = self._target = self._top = -1


def _remove_empty(name: str, parent: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # another process put something there, or removed it
            raise
