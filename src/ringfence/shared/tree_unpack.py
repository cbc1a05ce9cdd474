"""Makes files of a tar stream, on either side: below an open directory, following no link.

Everything is made in a staging folder first, which no other process fills, and moved to its place at the end: a refused
archive leaves nothing. Every name is created anew (O_EXCL), so that two names which are one to the file system are
refused as well (K03), and nothing is ever written through a link, a device or a file that was there (K01, K04).
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.shared import tree_walk
from ringfence.shared.tar import DIRECTORY, FILE, SYMLINK, Member, Refused, TarReader, link_stays, safe_parts
from ringfence.shared.tree_pack import descend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.shared.tree_pack import TransferCaps

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ZEROS = memoryview(bytes(1 << 20))
_HOLE = 4096


class Rules:
    """The rules of what a planter accepts."""

    def __init__(self, *, any_link: bool, hard_links: bool, exact_modes: bool) -> None:
        self.any_link = any_link  # links may lead anywhere, because they are for the guest alone
        self.hard_links = hard_links
        self.exact_modes = exact_modes  # set modes whatever the umask


class Planter:
    """Makes entries below `root`, an open directory that was empty."""

    def __init__(self, root: int, caps: TransferCaps, rules: Rules) -> None:
        self._root = root
        self._caps = caps
        self._rules = rules
        self._cursor = tree_walk.Cursor(root)
        self._file = -1
        self._member: Member | None = None
        self._hole = False
        self.written = 0

    def close(self) -> None:
        self._cursor.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def add(self, member: Member) -> None:
        """Make an entry. A file's bytes follow by `write`, then `end_file`."""
        self._caps.count(member.size, member.name)
        if member.kind == DIRECTORY:
            self._go_to(member.parts, member.mode)
            return
        directory = self._go_to(member.parts[:-1], 0o755)
        name = member.parts[-1]
        try:
            if member.kind == FILE:
                self._file = os.open(name, _NEW, member.mode, dir_fd=directory)
                self._member = member
                self._hole = False
            elif member.kind == SYMLINK:
                self._symlink(member, name, directory)
            else:
                self._hard_link(member, name, directory)
        except FileExistsError:
            raise Refused("twice", member.name) from None

    def write(self, view: memoryview) -> None:
        self.written += len(view)
        if (
            len(view) >= _HOLE and view == _ZEROS[: len(view)]
        ):  # a sparse file stays sparse; memcmp ends at the first byte
            os.lseek(self._file, len(view), os.SEEK_CUR)
            self._hole = True
            return
        while view:
            view = view[os.write(self._file, view) :]

    def end_file(self) -> None:
        assert self._member is not None
        fd, self._file = self._file, -1
        try:
            if self._hole:
                os.ftruncate(fd, self._member.size)
            if self._rules.exact_modes:
                os.fchmod(fd, self._member.mode)
            os.utime(fd, (self._member.mtime, self._member.mtime))
        finally:
            os.close(fd)

    def _symlink(self, member: Member, name: bytes, directory: int) -> None:
        if not self._rules.any_link and not link_stays(member.parts, member.link):
            raise Refused("link-leaves", member.name)
        os.symlink(member.link, name, dir_fd=directory)

    def _hard_link(self, member: Member, name: bytes, directory: int) -> None:
        """Make a hard link to a file that this archive has made before. Other targets are refused."""
        if not self._rules.hard_links:
            raise Refused("hard-link", member.name)
        old = safe_parts(member.link)
        if not old:
            raise Refused("link-leaves", member.name)
        try:
            source = descend(self._root, b"/".join(old[:-1]))
        except OSError:
            raise Refused("link-leaves", member.name) from None
        try:
            if not stat.S_ISREG(os.stat(old[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise Refused("link-leaves", member.name)
            os.link(old[-1], name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            raise Refused("link-leaves", member.name) from None
        finally:
            os.close(source)

    def _go_to(self, parts: list[bytes], mode: int) -> int:
        """Open a folder; folders on the way are made. `mode` is for the last folder, which stays open to its owner."""

        def step(fd: int, way: list[bytes], index: int) -> int:
            return self._enter(fd, way, index, mode if index == len(way) - 1 else 0o755)

        return self._cursor.go(parts, step)

    def _enter(self, fd: int, parts: list[bytes], index: int, mode: int) -> int:
        try:
            os.mkdir(parts[index], (mode | 0o700) & 0o777, dir_fd=fd)
            made = True
        except (FileExistsError, FileNotFoundError):  # the second is what gVisor says of a link that leads nowhere
            made = False
        try:
            below = tree_walk.enter(fd, parts, index)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise Refused("through", b"/".join(parts[: index + 1])) from None
            raise
        if made and self._rules.exact_modes:
            os.fchmod(below, (mode | 0o700) & 0o777)
        return below


class Unpacker:
    """An unpacker of a tar stream into a planter. `feed` what comes, then `finish`."""

    def __init__(self, planter: Planter, on_member: Callable[[Member], None] | None = None) -> None:
        self._reader = TarReader()
        self._planter = planter
        self._on_member = on_member

    def feed(self, data: bytes) -> None:
        planter = self._planter
        for piece in self._reader.feed(data):
            if piece is None:
                planter.end_file()
            elif isinstance(piece, Member):
                if self._on_member is not None:
                    self._on_member(piece)
                planter.add(piece)
            else:
                planter.write(piece)

    def finish(self) -> None:
        self._reader.finish()


# ── from the staging folder to where it belongs ──────────────────────────────────────────────────


def merge(stage: int, target: int) -> None:
    """Move everything below `stage` to `target`: folders are joined, files replaced, links moved as links.

    All names are checked first, so that a file in the place of a folder stops this before anything has moved.
    """
    for step in (_check, _move):
        source = tree_walk.Cursor(stage)
        into = tree_walk.Cursor(target)
        pending = [tree_walk.TOP]
        try:
            while pending:
                folder = pending.pop()
                here = source.go(folder.parts())
                there = into.go(folder.parts())
                with os.scandir(here) as entries:  # one after the other: the archive decides how many there are
                    names = map(os.fsencode, (entry.name for entry in entries))
                    pending += [tree_walk.WalkedFolder(folder, name) for name in names if step(name, here, there)]
        finally:
            source.close()
            into.close()


def _check(name: bytes, source: int, into: int) -> bool:
    """Return whether both are folders. Raises when only one is."""
    new = stat.S_ISDIR(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode)
    try:
        info = os.stat(name, dir_fd=into, follow_symlinks=False)
    except FileNotFoundError:
        return False
    old = stat.S_ISDIR(info.st_mode)
    if new != old:
        number = errno.EISDIR if old else errno.ENOTDIR
        raise OSError(number, os.strerror(number), os.fsdecode(name))
    return new


def _move(name: bytes, source: int, into: int) -> bool:
    if _check(name, source, into):
        return True
    os.rename(name, name, src_dir_fd=source, dst_dir_fd=into)
    return False
