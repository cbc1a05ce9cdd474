"""Applies layers of a root file system to a directory. The only writer of image trees.

`ImageTree` knows every entry of its directory, because no other process writes there: a name is created only below
directories that this object made, never through a link, and an existing file is replaced, never opened (K01, M10).
Ownership is not kept: all files belong to the user that imports. Set-uid and set-gid bits, devices, pipes and extended
attributes are left out, and counted.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.images.tar_reader import ArchiveCaps, TarError, TarStream, TooLargeError, parts, short

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from queue import SimpleQueue
    from typing import Literal, Protocol, TypeAlias

    from ringfence.images.tar_reader import ArchiveEntry

    NodeKind: TypeAlias = Literal["file", "dir", "symlink"]
    Path: TypeAlias = tuple[str, ...]

    class Digest(Protocol):
        def update(self, data: bytes | memoryview, /) -> None: ...


# ── free space on the disk, which an untrusted archive must not use up ────────────────────────────

_STEP = 16 << 20  # bytes between two checks of the disk
_EACH = 4096  # bytes that an entry takes besides its content: 400 000 files of one byte are 1.6 GB


class Room:
    """The free space of the file system that `fd` is on. Other programs write there too."""

    def __init__(self, fd: int, reserve: int) -> None:
        self._fd = fd
        self._reserve = reserve
        self._unseen = 0

    def take(self, size: int) -> None:
        """Check the space for an entry of `size` bytes. Raises OSError (ENOSPC), as a full disk does."""
        self._unseen += size + _EACH
        if self._unseen < _STEP:
            return
        self._unseen = 0
        found = os.fstatvfs(self._fd)
        if found.f_bavail * found.f_frsize - size < self._reserve:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LARGE = 256 << 10  # bytes of a piece that is worth a second thread
_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


_NO_CHILDREN: dict[str, Node] = {}  # shared by all nodes that are no directory; never changed


class Node:
    """A file, directory or link of the tree. Hard links of a file are nodes with the same content."""

    __slots__ = ("children", "content", "kind", "layer", "mode", "mtime", "size")

    def __init__(self, kind: NodeKind, *, mode: int, mtime: int, layer: int, content: str = "", size: int = 0) -> None:
        self.kind = kind
        self.mode = mode
        self.mtime = mtime
        self.layer = layer
        self.content = content  # SHA-256 of a file, text of a link
        self.size = size
        self.children: dict[str, Node] = {} if kind == "dir" else _NO_CHILDREN


class ImageTree:
    """A root that is made in `directory`, which must be empty and writable by no other user. Raises TarError, OSError.

    Must be closed, because it holds descriptors. `finish` sets the modes and times of directories.
    """

    def __init__(self, directory: str, caps: ArchiveCaps | None = None) -> None:
        self.caps = caps or ArchiveCaps()
        self.directory = directory
        self.root = Node("dir", mode=0o755, mtime=0, layer=0)
        self.dropped: dict[str, int] = {}  # counts of what was left out
        self.count = 0
        self.size = 0
        self._layer = 0
        self._text = 0  # characters of all names and links so far
        self._root_fd = os.open(directory, _DIRECTORY)
        self._room = Room(self._root_fd, self.caps.reserve)
        self._beside: Beside | None = None  # a thread for digests of large pieces
        self._open: list[int] = []  # descriptors of the last directory used and those above it
        self._open_path: Path = ()  # the names of these directories
        self._near: tuple[str, Path] = ("", ())  # the directory of the last name, as spelled and as a path
        self._home: tuple[Path, Node] = ((), self.root)  # the directory of the last entry added

    # layers

    def begin_layer(self) -> None:
        """Begin a layer above the existing entries. Whiteouts remove entries of lower layers only."""
        self._layer += 1

    def apply_tar(self, stream: TarStream, *, whiteouts: bool) -> None:
        """Apply a tar as a layer. With `whiteouts`, names that begin with ".wh." remove entries of lower layers."""
        self.begin_layer()
        for entry in stream:
            self.add(entry, stream.data, whiteouts=whiteouts)

    def add(
        self, entry: ArchiveEntry, data: Callable[[], Iterable[bytes | memoryview]], *, whiteouts: bool = False
    ) -> None:
        """Add an entry. `data` is called once, for a file."""
        path = self._path(entry.name)
        self._room.take(entry.size)
        self._text += len(entry.name) + len(entry.link)
        if self._text > self.caps.text:
            raise TarError(f"the names and links are longer than {self.caps.text:,} characters together")
        if not path:
            if entry.kind != "dir":
                raise TarError(f"the root itself is a {entry.kind}")
            self.root.mode = _directory_mode(entry.mode)
            self.root.mtime = entry.mtime
            return
        if whiteouts and path[-1].startswith(_WHITEOUT):
            self._whiteout(path)
            return
        if entry.extended:
            self._drop("extended attributes")
        if entry.kind == "dir":
            self._add_directory(path, entry)
        elif entry.kind == "file":
            self._add_file(path, entry, data())
        elif entry.kind == "symlink":
            self._add_symlink(path, entry)
        elif entry.kind == "hardlink":
            self._add_hardlink(path, entry)
        else:
            self._drop("pipes" if entry.kind == "fifo" else "device nodes")

    def _drop(self, what: str) -> None:
        self.dropped[what] = self.dropped.get(what, 0) + 1

    # places

    def _path(self, name: str) -> Path:
        """Return `parts` of a name, faster for a name in the directory of the name before."""
        above, slash, last = name.rpartition("/")
        if slash and above == self._near[0] and _is_plain(last) and len(name) <= 255:
            return (*self._near[1], last)
        path = parts(name, self.caps)
        if slash and path and path[-1] == last:
            self._near = (above, path[:-1])
        return path

    def find(self, path: Path) -> Node | None:
        """Return the node at `path`, or None. Follows no links."""
        node: Node | None = self.root
        for part in path:
            node = node.children.get(part) if node is not None and node.kind == "dir" else None
        return node

    def _home_of(self, path: Path) -> Node:
        """Return the directory that holds `path`, made when missing. Raises TarError for a link or file on the way."""
        above = path[:-1]
        if above == self._home[0]:
            return self._home[1]
        node = self.root
        for index, part in enumerate(above):
            child = node.children.get(part)
            if child is None:
                child = self._make_directory(node, path[: index + 1], mode=0o755, mtime=0)
            elif child.kind != "dir":
                what = "a link" if child.kind == "symlink" else "a file"
                raise TarError(f"{short('/'.join(path))} goes through {what}, {short('/'.join(path[: index + 1]))}")
            node = child
        self._home = (above, node)
        return node

    def _parent_fd(self, path: Path) -> int:
        """Return a descriptor of the directory that holds `path`. The kernel refuses a link on the way."""
        above = path[:-1]
        if above != self._open_path:
            same = 0
            while same < min(len(above), len(self._open_path)) and above[same] == self._open_path[same]:
                same += 1
            self._close_directories(same)
            for part in above[same:]:
                self._open.append(os.open(part, _DIRECTORY, dir_fd=self._open[-1] if self._open else self._root_fd))
                self._open_path = (*self._open_path, part)
        return self._open[-1] if self._open else self._root_fd

    def _close_directories(self, kept: int) -> None:
        """Close the open directories on the way, but for the first `kept`."""
        while len(self._open) > kept:
            os.close(self._open.pop())
        self._open_path = self._open_path[:kept]

    def _clear(self, home: Node, path: Path, *, keep_directory: bool = False) -> Node | None:
        """Remove what is at `path`. Returns the directory there, which `keep_directory` keeps."""
        old = home.children.get(path[-1])
        if old is None:
            return None
        if keep_directory and old.kind == "dir":
            return old
        self._remove(home, path, lower_only=False)
        return None

    def _remove(self, home: Node, path: Path, *, lower_only: bool) -> None:
        """Remove what is at `path`; with `lower_only` only entries of lower layers."""
        node = home.children[path[-1]]
        if node.kind == "dir":
            for name in list(node.children):
                self._remove(node, (*path, name), lower_only=lower_only)
        if lower_only and (node.layer == self._layer or node.children):
            return
        if node.kind == "dir":
            os.rmdir(path[-1], dir_fd=self._parent_fd(path))
            self._home = ((), self.root)
        else:
            os.unlink(path[-1], dir_fd=self._parent_fd(path))
            self.size -= node.size
        self.count -= 1
        del home.children[path[-1]]

    def _put(self, home: Node, path: Path, node: Node) -> None:
        self.count += 1
        if self.count > self.caps.entries:
            raise TarError(f"more than {self.caps.entries:,} files and directories")
        home.children[path[-1]] = node

    # kinds

    def _make_directory(self, home: Node, path: Path, *, mode: int, mtime: int) -> Node:
        os.mkdir(path[-1], 0o700, dir_fd=self._parent_fd(path))
        node = Node("dir", mode=mode, mtime=mtime, layer=self._layer)
        self._put(home, path, node)
        return node

    def _add_directory(self, path: Path, entry: ArchiveEntry) -> None:
        home = self._home_of(path)
        old = self._clear(home, path, keep_directory=True)
        mode = _directory_mode(entry.mode)
        if entry.mode & 0o6000:
            self._drop("set-uid and set-gid bits")
        if old is None:
            self._make_directory(home, path, mode=mode, mtime=entry.mtime)
        else:
            old.mode = mode
            old.mtime = entry.mtime
            old.layer = self._layer

    def _add_file(self, path: Path, entry: ArchiveEntry, data: Iterable[bytes | memoryview]) -> None:
        home = self._home_of(path)
        self._clear(home, path)
        if entry.mode & 0o6000:
            self._drop("set-uid and set-gid bits")
        mode = entry.mode & 0o777 | 0o400
        fd = os.open(path[-1], _NEW, 0o600, dir_fd=self._parent_fd(path))
        try:
            content, size = self._write(fd, data) if entry.size else (_EMPTY, 0)
            os.fchmod(fd, mode)
            os.utime(fd, (entry.mtime, entry.mtime))
        except BaseException:
            os.close(fd)
            os.unlink(path[-1], dir_fd=self._parent_fd(path))
            raise
        os.close(fd)
        self.size += size
        if self.size > self.caps.size:
            raise TooLargeError(f"the files are larger than {self.caps.size:,} bytes together")
        self._put(home, path, Node("file", mode=mode, mtime=entry.mtime, layer=self._layer, content=content, size=size))

    def _write(self, fd: int, data: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Write all of `data`; return SHA-256 and size. Digests large pieces in a second thread."""
        import hashlib

        digest = hashlib.sha256()
        size = 0
        for piece in data:
            size += len(piece)
            if len(piece) < _LARGE and size == len(piece):
                digest.update(piece)
            else:
                self._digest_beside(digest, piece)
            _write_all(fd, piece)
        if self._beside is not None:
            self._beside.settle()
        return digest.hexdigest(), size

    def _digest_beside(self, digest: Digest, piece: bytes | memoryview) -> None:
        if self._beside is None:
            self._beside = Beside()
        self._beside.update(digest, piece)

    def _add_symlink(self, path: Path, entry: ArchiveEntry) -> None:
        """Add a link with any text: inside, the link leads into the sandbox's own root; here it is never followed."""
        home = self._home_of(path)
        self._clear(home, path)
        os.symlink(entry.link, path[-1], dir_fd=self._parent_fd(path))
        node = Node("symlink", mode=0o777, mtime=0, layer=self._layer, content=entry.link)
        self._put(home, path, node)

    def _add_hardlink(self, path: Path, entry: ArchiveEntry) -> None:
        source = parts(entry.link.lstrip("/"), self.caps)  # GNU tar with -P writes a leading slash
        target = self.find(source)
        if target is None or target.kind == "dir":
            raise TarError(f"{short(entry.name)} is a hard link to {short(entry.link)}, no file of the archive")
        if source == path:
            return
        home = self._home_of(path)
        if _is_below(path, source):
            raise TarError(f"{short(entry.name)} is a hard link to {short(entry.link)}, below itself")
        self._clear(home, path)
        if target.kind == "symlink":
            os.symlink(target.content, path[-1], dir_fd=self._parent_fd(path))
        else:
            self._link(source, path)
            self.size += target.size
        node = Node(target.kind, mode=target.mode, mtime=target.mtime, layer=self._layer)
        node.content = target.content
        node.size = target.size
        self._put(home, path, node)

    def _link(self, source: Path, path: Path) -> None:
        """Make a hard link. Refuses an archive that reaches the file system's limit of links to a file."""
        above = os.dup(self._parent_fd(source))
        try:
            os.link(source[-1], path[-1], src_dir_fd=above, dst_dir_fd=self._parent_fd(path), follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            raise TarError(f"{short('/'.join(path))}: too many hard links to one file") from None
        finally:
            os.close(above)

    def _whiteout(self, path: Path) -> None:
        home = self.find(path[:-1])
        if path[-1] == _OPAQUE:
            if home is not None and home.kind == "dir":
                for name in list(home.children):
                    self._remove(home, (*path[:-1], name), lower_only=True)
            return
        name = path[-1][len(_WHITEOUT) :]
        if name.startswith(_WHITEOUT):
            return  # a file that aufs keeps for itself
        if name in ("", ".", ".."):
            raise TarError(f"a whiteout of {name!r}, {short('/'.join(path))}")
        if home is not None and home.kind == "dir" and name in home.children:
            self._remove(home, (*path[:-1], name), lower_only=True)

    # stored trees

    def adopt(self, directory: str) -> None:
        """Begin with all of a stored tree. The files are linked, not copied: no process ever writes to one."""
        root = scan(directory, self.caps)
        self.root = root
        self._home = ((), root)
        for name, node in walk(root):
            if not name:
                continue
            path = tuple(name.split("/"))
            if node.kind == "dir":
                os.mkdir(path[-1], 0o700, dir_fd=self._parent_fd(path))
            elif node.kind == "symlink":
                os.symlink(node.content, path[-1], dir_fd=self._parent_fd(path))
            else:
                self._link_or_copy(f"{directory}/{name}", path, node)
                self.size += node.size
            self.count += 1

    def _link_or_copy(self, source: str, path: Path, node: Node) -> None:
        try:
            os.link(source, path[-1], dst_dir_fd=self._parent_fd(path), follow_symlinks=False)
            return
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
        fd = os.open(path[-1], _NEW, 0o600, dir_fd=self._parent_fd(path))
        with open(fd, "wb") as file, open(source, "rb") as original:
            while data := original.read(1 << 20):
                file.write(data)
            file.flush()
            os.fchmod(fd, node.mode)
            os.utime(fd, (node.mtime, node.mtime))

    # our own changes

    def read(self, path: Path, limit: int = 1 << 20) -> bytes | None:
        """Return the content of a small file of the tree; None for a link, a directory and a large file."""
        node = self.find(path)
        if node is None or node.kind != "file" or node.size > limit:
            return None
        fd = os.open(path[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._parent_fd(path))
        with open(fd, "rb") as file:
            return file.read(limit)

    def remove(self, path: Path) -> None:
        """Remove what is at `path`, with all below, if it exists."""
        home = self.find(path[:-1])
        if home is not None and home.kind == "dir" and path[-1] in home.children:
            self._remove(home, path, lower_only=False)

    # the end

    def finish(self) -> None:
        """Set modes and times of directories. No entry may be added afterwards."""
        self._close_directories(0)
        for name, node in walk(self.root):
            if node.kind != "dir":
                continue
            fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._root_fd)
            try:
                os.fchmod(fd, node.mode)
                os.utime(fd, (node.mtime, node.mtime))
            finally:
                os.close(fd)

    def digest(self) -> str:
        """See `tree_digest`."""
        return tree_digest(self.root)

    def close(self) -> None:
        self._close_directories(0)
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    def __enter__(self) -> ImageTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def walk(root: Node) -> Iterator[tuple[str, Node]]:
    """Yield every node with its name from the root, which has the name ""; parents first, names sorted."""
    waiting = [("", root)]
    while waiting:
        name, node = waiting.pop()
        yield name, node
        if node.children:
            above = f"{name}/" if name else ""
            waiting += [(above + child, node.children[child]) for child in sorted(node.children, reverse=True)]


def tree_digest(root: Node) -> str:
    """Return SHA-256 over all names, kinds, modes, times, contents and links. Trees with the same digest are equal."""
    import hashlib

    lines = [
        f"{node.kind}\0{node.mode:o}\0{node.mtime}\0{node.size}\0{name}\0{node.content}\0\n"
        for name, node in walk(root)
    ]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def scan(directory: str, caps: ArchiveCaps | None = None) -> Node:
    """Return the tree on disk, with contents digested. Raises OSError, TarError for a device, pipe or socket."""
    caps = caps or ArchiveCaps()
    root_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        root = _scanned("", os.fstat(root_fd), root_fd)
        _scan_into(root, root_fd, caps, 0)
    finally:
        os.close(root_fd)
    return root


def _scan_into(node: Node, fd: int, caps: ArchiveCaps, depth: int) -> None:
    if depth > caps.depth:
        raise TarError(f"deeper than {caps.depth}")
    for name in os.listdir(fd):
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        child = _scanned(name, found, fd)
        node.children[name] = child
        if child.kind == "dir":
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                _scan_into(child, below, caps, depth + 1)
            finally:
                os.close(below)


def _scanned(name: str, found: os.stat_result, fd: int) -> Node:
    mode, mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    if stat.S_ISDIR(found.st_mode):
        return Node("dir", mode=mode, mtime=mtime, layer=0)
    if stat.S_ISLNK(found.st_mode):
        return Node("symlink", mode=0o777, mtime=0, layer=0, content=os.readlink(name, dir_fd=fd))
    if not stat.S_ISREG(found.st_mode):
        raise TarError(f"{short(name)} is neither a file, a directory nor a link")
    return Node("file", mode=mode, mtime=mtime, layer=0, content=file_digest(name, fd), size=found.st_size)


def file_digest(name: str, fd: int | None = None) -> str:
    """Return SHA-256 of the file `name` in the directory `fd`. Follows no link."""
    import hashlib

    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_all(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _is_plain(part: str) -> bool:
    """Return whether a part of a name needs no further check."""
    return part.isascii() and part not in ("", ".", "..") and "\0" not in part


def _directory_mode(mode: int) -> int:
    """Return a directory's mode with the owner's rights added: the owner can always list and remove it."""
    return mode & 0o1777 | 0o700


def _is_below(path: Path, above: Path) -> bool:
    return len(path) < len(above) and above[: len(path)] == path


# ── digests in a thread of their own: `hashlib` lets other threads run during a large piece ───────

_MOST_WAITING = 8  # pieces, which stay in memory meanwhile


class Beside:
    """A thread that updates digests in order. Used by a single thread; must be closed."""

    def __init__(self) -> None:
        from queue import SimpleQueue
        from threading import Thread

        self._todo: SimpleQueue[tuple[Digest, bytes | memoryview] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._waiting = 0
        self._thread = Thread(target=_work, args=(self._todo, self._done), name="ringfence-digest", daemon=True)
        self._thread.start()

    def update(self, digest: Digest, piece: bytes | memoryview) -> None:
        """Update a digest later, in the other thread. The piece must not change."""
        self._todo.put((digest, piece))
        self._waiting += 1
        if self._waiting > _MOST_WAITING:
            self._settle(1)

    def settle(self) -> None:
        """Return when every update is done."""
        self._settle(self._waiting)

    def _settle(self, count: int) -> None:
        for _ in range(count):
            self._done.get()
            self._waiting -= 1

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()


def _work(todo: SimpleQueue[tuple[Digest, bytes | memoryview] | None], done: SimpleQueue[None]) -> None:
    while (job := todo.get()) is not None:
        job[0].update(job[1])
        done.put(None)


# ── files that several trees of the store have: they are stored once ──────────────────────────────

# Beside each tree is a list of its files, a line each: SHA-256, mode, time and name. The list is a hint and is not
# trusted: a named file is read before it is linked, and a damaged file does not get into another image.


def share(tree: ImageTree, trees: str, listing: str) -> None:
    """Link the files that trees below `trees` already have, and write the list of this tree's files to `listing`."""
    wanted: dict[str, list[str]] = {}
    for name, node in walk(tree.root):
        if node.kind == "file" and node.size and "\n" not in name:
            wanted.setdefault(_key(node), []).append(name)
    lines = [f"{key}\t{name}\n" for key, names in wanted.items() for name in names]
    with open(listing, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("".join(lines))
    for digest in sorted(os.listdir(trees)):
        _share_with(tree, f"{trees}/{digest}", wanted)


def _key(node: Node) -> str:
    return f"{node.content}.{node.mode:o}.{node.mtime:x}"


def _share_with(tree: ImageTree, other: str, wanted: dict[str, list[str]]) -> None:
    """Link the files `wanted` that the tree `other` has, and remove them from `wanted`."""
    try:
        file = open(f"{other}/files", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115  # closed below
    except FileNotFoundError:
        return
    with file:
        for line in file:
            key, _, name = line.rstrip("\n").partition("\t")
            if key in wanted and _link(tree, key, wanted[key], f"{other}/root/{name}"):
                del wanted[key]


def _link(tree: ImageTree, key: str, names: list[str], stored: str) -> bool:
    """Make the files `names` of the tree links to `stored`. Return whether they are."""
    try:
        good = os.lstat(stored)
        owned = [os.lstat(f"{tree.directory}/{name}") for name in names]
        if all(os.path.samestat(good, own) for own in owned):
            return True
        content, mode, mtime = key.split(".")
        kept = (stat.S_IFREG | int(mode, 8), int(mtime, 16))
        if (good.st_mode, int(good.st_mtime)) != kept or file_digest(stored) != content:
            return False
        spare = f"{os.path.dirname(tree.directory)}/spare"
        for name, own in zip(names, owned, strict=True):
            if not os.path.samestat(good, own):  # to rename one link of a file to another does nothing
                os.link(stored, spare, follow_symlinks=False)
                os.rename(spare, f"{tree.directory}/{name}")
    except OSError as error:
        if error.errno not in (errno.EMLINK, errno.ENOENT, errno.ENAMETOOLONG):
            raise
        return False  # a damaged tree does not keep a new tree out of the store
    return True
