"""Owns the store of images on disk: the names, the tree of each, the processes that use a tree, and removal.

    names/NAME.json      the record of an image; replaced by rename
    trees/DIGEST/root    a root file system, never written to once it is here; DIGEST is over all of the tree
    trees/DIGEST/lock    locked (shared) by every process that uses the tree
    trees/DIGEST/files   digests of the tree's files, so that the same file in two trees is stored once
    steps/               the tree that each step of a build made
    work/                trees being made; a lock here dies with its process, and the next start removes the rest

A sandbox waits for the lookup of its image, so this module imports little.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal

from ringfence.errors import ImageError
from ringfence.plan.rootfs.image_view import Root
from ringfence.values import FrozenMap, Struct, final, frozen_map, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from ringfence.images.tree import ImageTree
    from ringfence.policy.image import Image
    from ringfence.values import Json


# ── locks, which die with their owner: on a tree in use, and on a place where a tree is made ──────

# Options of unshare for an ordinary user: root of a user namespace, with the range of uids in /etc/subuid.
AS_ROOT = ("--user", "--map-root-user", "--map-auto")


def lock(path: str, how: int) -> int | None:
    """Return a descriptor that holds a lock on the file at `path`, made when missing.

    Return None, with LOCK_NB alone, where another process holds the lock. The locked file is at `path` when this
    returns: a file that was removed meanwhile does not count.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            if is_at(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_at(fd: int, path: str) -> bool:
    """Return whether the open file is at `path` now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


class Held:
    """A tree that no process can remove while this object is open."""

    def __init__(self, root: str, fd: int) -> None:
        self.root = root
        self._fd = fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.close()


class Workplace:
    """A directory in which a tree is made. Leaving `with` removes it; after a crash the next sweep does."""

    def __init__(self, directory: str, lock_path: str, fd: int) -> None:
        self.directory = directory
        self._lock_path = lock_path
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        remove_tree(self.directory)
        os.unlink(self._lock_path)
        os.close(self._fd)


def remove_tree(path: str) -> None:
    """Remove a folder with all its files. A missing folder is no error."""
    import shutil

    try:
        if os.path.lexists(path):
            shutil.rmtree(path)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        _remove_as_root(path)


def run_as_root(command: list[str], timeout_s: float | None = None) -> str | None:
    """Run a program in a user namespace that `AS_ROOT` makes. Returns what went wrong; None for success.

    Where the kernel refuses the namespace, unshare of util-linux 2.38 ends and leaves a helper that waits for ever and
    holds every pipe: therefore only unshare is waited for, and then its whole session is killed.
    """
    import subprocess

    from ringfence.host import programs

    unshare, program = programs.look_up("unshare"), programs.look_up(command[0])
    if unshare.path is None or program.path is None:
        return f"there is no {'unshare' if unshare.path is None else command[0]}{unshare.remark or program.remark}"
    quiet = subprocess.DEVNULL
    try:
        running = subprocess.Popen(
            [unshare.path, *AS_ROOT, program.path, *command[1:]],
            env=programs.environment(unshare.path),  # by its PATH it finds newuidmap and newgidmap
            stdin=quiet,
            stdout=quiet,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return str(error)
    assert running.stderr is not None
    with running.stderr:
        try:
            status = running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        said = " ".join(running.stderr.read().decode("utf-8", "replace").split())
        return (said or f"status {status}") if status else None


def _remove_as_root(path: str) -> None:
    """Remove the files of an ordinary user's build that was killed: they belong to uids mapped for this user."""
    if run_as_root(["rm", "-rf", "--", path]) is not None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


_NAME = "ringfence"
_FOLDERS = ("names", "trees", "steps", "work")
PROTECTED = ("names", "trees", "steps")  # never shown to a guest by a mount
_VERSION = 1
_LARGEST = 1 << 20  # bytes of a record
_HEX = frozenset("0123456789abcdef")


@final
class ImageInfo(Struct):
    """An image of the store. An archive's own configuration (`config`) is kept as data and never obeyed."""

    name: str
    digest: str  # SHA-256 of the tree: names, modes, times, contents
    size: int  # bytes of its files
    files: int  # files, directories and links
    created_at: float  # seconds since 1970
    source: str  # "tar", "docker-archive", "oci-archive", "directory", "recipe"
    env: Mapping[str, str] = FrozenMap()  # set for every run
    python: str | None = None  # the image's own Python, as a path inside
    preload: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was left out or changed
    config: Mapping[str, Json] = FrozenMap()  # entrypoint, cmd, workdir, user …
    recipe: Mapping[str, Json] = FrozenMap()  # the recipe of a build; empty for an import

    def __post_init__(self) -> None:
        for name in ("env", "config", "recipe"):
            put(self, name, frozen_map(getattr(self, name)))
        for name in ("preload", "notes"):
            put(self, name, tuple(getattr(self, name)))

    def to_dict(self) -> dict[str, Json]:
        """Return the fields as JSON, for `--json` and the store's own record."""
        plain: dict[str, Json] = {}
        for name in type(self).__fields__:
            value = getattr(self, name)
            plain[name] = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value
        return plain


def default_directory() -> str:
    """Return the directory of this user's images: below XDG_DATA_HOME, ~/.local/share, or /var/lib as root."""
    data = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(data):
        return f"{os.path.normpath(data)}/{_NAME}/images"
    if os.geteuid() == 0:
        return f"/var/lib/{_NAME}/images"
    return f"{os.path.expanduser('~')}/.local/share/{_NAME}/images"


class ImageStore:
    """A store below a directory. Several processes and threads can use it at once."""

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory or default_directory()

    # reading

    def names(self) -> list[str]:
        """Return the names of all images, sorted."""
        try:
            listed = os.listdir(f"{self.directory}/names")
        except FileNotFoundError:
            return []
        return sorted(name.removesuffix(".json") for name in listed if name.endswith(".json"))

    def find(self, name: str) -> ImageInfo:
        """Return an image. Raises ImageError for an unknown name, with the nearest name, or a damaged record."""
        try:
            with open(f"{self.directory}/names/{checked_name(name)}.json", "rb") as file:
                data = file.read(_LARGEST)
        except FileNotFoundError:
            raise unknown(name, self.names()) from None
        return _parse(name, data)

    def root(self, digest: str) -> str:
        """Return where a tree is."""
        return f"{self.directory}/trees/{digest}/root"

    def hold(self, digest: str) -> Held:
        """Keep a tree from being removed. Raises ImageError when the tree is missing."""
        root = self.root(digest)
        gone = ImageError(
            f"the files of image {digest[:12]} are not in {self.directory}",
            code="image-damaged",
            fix="import or build it again",
        )
        while True:
            try:
                fd = os.open(f"{self.directory}/trees/{digest}/lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                raise gone from None
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                if not os.path.isdir(root):
                    raise gone
                if is_at(fd, f"{self.directory}/trees/{digest}/lock"):  # if not, the tree was removed and stored again
                    return Held(root, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    # making

    def open(self) -> None:
        """Make the store's own directories. Raises ImageError when another user can write to one (C09, L04)."""
        above = os.path.dirname(self.directory)
        os.makedirs(above, 0o755, exist_ok=True)
        for path in (self.directory, *(f"{self.directory}/{name}" for name in _FOLDERS)):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass  # its owner is checked next
            found = os.stat(path, follow_symlinks=False)
            if found.st_uid != os.geteuid() or found.st_mode & 0o170022 != 0o040000:
                raise ImageError(
                    f"{path} is not a directory that only this user can write to",
                    code="store",
                    fix=f"remove it, or make it yours: chmod 700 {path}",
                )

    def workplace(self) -> Workplace:
        """Return an empty directory of our own. Removes first what dead processes left."""
        self.open()
        self.sweep()
        while True:
            path = f"{self.directory}/work/{os.urandom(8).hex()}"
            fd = lock(f"{path}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fd is not None:
                os.mkdir(path, 0o700)
                return Workplace(path, f"{path}.lock", fd)

    def sweep(self) -> int:
        """Remove what dead processes were making. Returns how many workplaces were removed."""
        try:
            listed = os.listdir(f"{self.directory}/work")
        except FileNotFoundError:
            return 0
        swept = 0
        for name in listed:
            if not name.endswith(".lock"):
                continue
            path = f"{self.directory}/work/{name}"
            fd = lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fd is None:
                continue
            try:
                remove_tree(path.removesuffix(".lock"))
                os.unlink(path)
                swept += 1
            except OSError:
                pass  # a process that the dead process started still writes there: the next sweep removes it
            finally:
                os.close(fd)
        return swept

    def keep(self, tree: ImageTree) -> str:
        """Move a whole tree from a workplace into the store and return its digest. The same tree is stored once.

        Files that the store already has become links to the stored files. A damaged tree is replaced, unless a sandbox
        uses it.
        """
        from ringfence.images.tree import share

        digest = tree.digest()
        place = f"{self.directory}/trees/{digest}"
        made = os.path.dirname(tree.directory)
        if os.path.lexists(place):
            if self._is_whole(digest):
                return digest
            self._set_aside(digest, f"{made}/damaged")
        whole = f"{made}/tree"
        os.mkdir(whole, 0o700)
        share(tree, f"{self.directory}/trees", f"{whole}/files")
        tree.finish()
        os.close(os.open(f"{whole}/lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.rename(tree.directory, f"{whole}/root")
        os.rename(whole, place)
        return digest

    def _set_aside(self, digest: str, aside: str) -> None:
        fd = self._only_user(digest)
        if fd is None and os.path.isdir(self.root(digest)):
            raise _in_use(f"the files of image {digest[:12]} are damaged, and")
        os.rename(f"{self.directory}/trees/{digest}", aside)
        if fd is not None:
            os.close(fd)

    def _is_whole(self, digest: str) -> bool:
        """Return whether a stored tree has the digest that its name says. Reads all of the tree."""
        from ringfence.images.tar_reader import TarError
        from ringfence.images.tree import scan, tree_digest

        try:
            return tree_digest(scan(self.root(digest))) == digest
        except (OSError, TarError):
            return False

    def name(self, info: ImageInfo) -> None:
        """Give a tree its name, and take the name from an earlier image. The tree must be held or just kept."""
        self.write(f"names/{checked_name(info.name)}.json", {"version": _VERSION, **info.to_dict()})

    def write(self, path: str, value: Mapping[str, Json]) -> None:
        """Write a record of the store, whole or not at all."""
        import json

        self._write(path, json.dumps(value))

    def _write(self, path: str, text: str) -> None:
        """Write a file by rename. By its name and lock the next sweep knows a new file that a killed writer left."""
        new = f"{self.directory}/work/{os.urandom(8).hex()}.lock"
        fd = lock(new, fcntl.LOCK_EX)
        assert fd is not None
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.rename(new, f"{self.directory}/{path}")

    def step(self, key: str) -> str | None:
        """Return the digest of the tree that a step of a build made; None when the tree is gone."""
        try:
            with open(f"{self.directory}/steps/{key}", encoding="ascii") as file:
                digest = file.read(64)
        except (OSError, ValueError):
            return None
        good = len(digest) == 64 and _HEX.issuperset(digest)
        return digest if good and os.path.isdir(self.root(digest)) else None

    def set_step(self, key: str, digest: str) -> None:
        self._write(f"steps/{key}", digest)

    def exclusive(self) -> Held:
        """Lock the store: only one process at a time names, removes and collects."""
        self.open()
        fd = lock(f"{self.directory}/lock", fcntl.LOCK_EX)
        assert fd is not None
        return Held(self.directory, fd)

    # removing

    def remove(self, name: str) -> None:
        """Remove an image. Raises ImageError when the name is unknown or a sandbox uses the image."""
        with self.exclusive():
            try:
                digest = self.find(name).digest
            except ImageError as error:
                if error.code != "image-damaged":
                    raise
                digest = ""
            fd = self._only_user(digest) if digest else None
            if fd is None and digest and os.path.isdir(self.root(digest)):
                raise _in_use(f"image {name} is")
            os.unlink(f"{self.directory}/names/{checked_name(name)}.json")
            if fd is not None:
                if digest not in self._referred():
                    self._remove_tree_of(digest)
                os.close(fd)

    def collect(self) -> tuple[int, int]:
        """Remove trees without an image, and all steps of builds. Returns how many trees, and bytes of the disk.

        A tree that is in use stays until a later call.
        """
        with self.exclusive():
            self.sweep()
            before = _free(self.directory)
            for step in os.listdir(f"{self.directory}/steps"):
                os.unlink(f"{self.directory}/steps/{step}")
            kept = self._referred()
            count = 0
            for digest in os.listdir(f"{self.directory}/trees"):
                if digest in kept:
                    continue
                fd = self._only_user(digest)
                if fd is not None:
                    self._remove_tree_of(digest)
                    os.close(fd)
                    count += 1
            return count, max(0, _free(self.directory) - before)

    def _only_user(self, digest: str) -> int | None:
        """Return a descriptor that locks a tree that no process uses; None for a tree in use or missing."""
        try:
            fd = os.open(f"{self.directory}/trees/{digest}/lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _referred(self) -> set[str]:
        found = set()
        for name in self.names():
            try:
                found.add(self.find(name).digest)
            except ImageError:
                continue
        return found | {digest for key in os.listdir(f"{self.directory}/steps") if (digest := self.step(key))}

    def _remove_tree_of(self, digest: str) -> None:
        """Remove a tree, after renaming it, so that a crash leaves no half of a tree."""
        with self.workplace() as place:
            os.rename(f"{self.directory}/trees/{digest}", f"{place.directory}/tree")

    def every_tree(self) -> Iterator[str]:
        """Yield the digests of all trees, named or not."""
        try:
            yield from sorted(os.listdir(f"{self.directory}/trees"))
        except FileNotFoundError:
            return


def checked_name(name: str) -> str:
    """Return an image's name. "NAME+DIGEST" is an image with additions. Raises PolicyError for no name."""
    from ringfence.policy.image import IMAGE_CHECKS

    base, plus, added = name.partition("+")
    IMAGE_CHECKS["name"](base, "image")
    if plus and (len(added) != 12 or not _HEX.issuperset(added)):
        raise unknown(name, [])
    return name


def unknown(name: str, known: list[str]) -> ImageError:
    """Return the error for a name that is not in the store, with the nearest known name."""
    from ringfence.text import nearest

    near = nearest(name, [*known, "host"])
    presets = {"python", "data", "node", "polyglot"}
    if near:
        fix = f"did you mean {near}?"
        if name in presets:
            fix += f" Or build it: ringfence image build {name} --preset {name}"
    elif name in presets:
        fix = f"build it: ringfence image build {name} --preset {name}"
    else:
        fix = "ringfence image list shows all; to add one: ringfence image import NAME SOURCE"
    return ImageError(f"no image named {name!r}", code="image-unknown", fix=fix)


def _in_use(what: str) -> ImageError:
    fix = "close the sandboxes of this image, or end the process that holds them, then try again"
    return ImageError(f"{what} in use by a sandbox", code="image-in-use", fix=fix)


def _parse(name: str, data: bytes) -> ImageInfo:
    import json

    damaged = ImageError(
        f"the record of image {name} is damaged", code="image-damaged", fix=f"ringfence image remove {name}"
    )
    try:
        found = json.loads(data)
        if found.pop("version") != _VERSION:
            raise damaged
        info = ImageInfo(**found)
        if len(info.digest) != 64 or not _HEX.issuperset(info.digest) or info.name != name:
            raise damaged
    except (ValueError, TypeError, KeyError, AttributeError):
        raise damaged from None
    return info


def _free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bfree * found.f_frsize


def free_space(path: str) -> int:
    """Return how many bytes this user may still write to the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


# ── the images that sandboxes of this process use: their trees are held ───────────────────────────


@final
class Used(Struct):
    """A stored image that this process holds."""

    info: ImageInfo
    root: Root
    held_by: int = 0  # the pid of this process: a forked child holds nothing


_held: dict[tuple[int, str], Held] = {}  # by process and tree; all sandboxes of a process share one lock


def use(image: Image) -> Used:
    """Find an image and hold its tree.

    Raises ImageError when the image is not in the store, or was not built with the packages that it adds.
    """
    store = ImageStore()
    name = stored_name(image)
    try:
        info = store.find(name)
    except ImageError as error:
        if name == image.name or error.code != "image-unknown":
            raise
        store.find(image.name)
        raise ImageError(
            f"image {image.name} with these packages is not built, and running a sandbox never builds an image",
            code="image-not-built",
            fix="ringfence.images.build(image)",
        ) from None
    key = (os.getpid(), info.digest)
    if key not in _held:
        _held[key] = store.hold(info.digest)
    return Used(info, Root(info.name, _held[key].root, info.python), os.getpid())


def release(digest: str) -> None:
    """Stop holding a tree, which no sandbox of this process uses any more."""
    held = _held.pop((os.getpid(), digest), None)
    if held is not None:
        held.close()


def held() -> list[str]:
    """Return the digests of the trees that this process holds."""
    return [digest for pid, digest in _held if pid == os.getpid()]


def stored_name(image: Image) -> str:
    """Return an image's name in the store. An image with packages added has the name of its own build."""
    added = (image.pip, image.apt, image.npm)
    if not any(added):
        return image.name
    import hashlib
    import json

    text = json.dumps([sorted(part) for part in added])
    return f"{image.name}+{hashlib.sha256(text.encode()).hexdigest()[:12]}"
