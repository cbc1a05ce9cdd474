"""Owns the store of images on disk: which names there are, the tree behind each, who uses it, what can go.

    names/NAME.json      what an image is; replaced by rename
    trees/DIGEST/root    a root file system, read-only to all of us once it has its name; DIGEST is of all that is in it
    trees/DIGEST/lock    locked (shared) by every process that uses the tree
    trees/DIGEST/files   what its files hold, so that the same file in two trees is stored once
    steps/               which tree a step of a build came to
    work/                what is being made; its lock dies with its maker, and the next start removes it

Looking an image up is on the way to a sandbox, so this module imports little.
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

    from ringfence.images.tree import Tree
    from ringfence.policy.image import Image
    from ringfence.values import Json


# ── locks, which die with their owner: on a tree in use, and on a place where a tree is made ──────

# Of unshare, for an ordinary user: root of a user namespace, with the range of uids that /etc/subuid gives it.
AS_ROOT = ("--user", "--map-root-user", "--map-auto")


def lock(path: str, how: int) -> int | None:
    """A descriptor that holds a lock on the file at `path`, made when missing. None: with LOCK_NB, another has it.

    The file that is locked is the one that has the name then, not one that was removed meanwhile.
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
    """Whether the open file is the one that has the name now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


class Held:
    """A tree that nobody may remove while this is open."""

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
    """A directory in which something is made. Leaving `with` removes what is still there; a crash, the next sweep."""

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
    """All of it; what is gone already is no error."""
    import shutil

    try:
        if os.path.lexists(path):
            shutil.rmtree(path)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        _remove_as_root(path)


def run_as_root(command: list[str], timeout_s: float | None = None) -> str | None:
    """A program in a user namespace as `AS_ROOT` makes it. Returns what went wrong; None: nothing.

    Where the kernel refuses the namespace, unshare of util-linux 2.38 ends and leaves a helper that waits for ever and
    holds every pipe: so it is waited for alone, and then all of its session is ended.
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
    """A build of an ordinary user that was killed leaves files of the uids that are mapped for it."""
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
    """One image of the store. What an archive said of itself (`config`) is kept as data and obeyed nowhere."""

    name: str
    digest: str  # SHA-256 of the tree: names, modes, times, contents
    size: int  # bytes of its files
    files: int  # files, directories and links
    created_at: float  # seconds since 1970
    source: str  # "tar", "docker-archive", "oci-archive", "directory", "recipe"
    env: Mapping[str, str] = FrozenMap()  # set for every run
    python: str | None = None  # its own Python, as a path inside
    preload: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was left out or changed
    config: Mapping[str, Json] = FrozenMap()  # entrypoint, cmd, workdir, user …
    recipe: Mapping[str, Json] = FrozenMap()  # it was built from; empty: imported

    def __post_init__(self) -> None:
        for name in ("env", "config", "recipe"):
            put(self, name, frozen_map(getattr(self, name)))
        for name in ("preload", "notes"):
            put(self, name, tuple(getattr(self, name)))

    def to_dict(self) -> dict[str, Json]:
        """For `--json` and the store's own record."""
        plain: dict[str, Json] = {}
        for name in type(self).__fields__:
            value = getattr(self, name)
            plain[name] = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value
        return plain


def default_directory() -> str:
    """Of this user's images: below XDG_DATA_HOME, ~/.local/share, or /var/lib as root."""
    data = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(data):
        return f"{os.path.normpath(data)}/{_NAME}/images"
    if os.geteuid() == 0:
        return f"/var/lib/{_NAME}/images"
    return f"{os.path.expanduser('~')}/.local/share/{_NAME}/images"


class Store:
    """The store below one directory. Safe from several processes and threads."""

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory or default_directory()

    # reading

    def names(self) -> list[str]:
        """Of all images, sorted."""
        try:
            listed = os.listdir(f"{self.directory}/names")
        except FileNotFoundError:
            return []
        return sorted(name.removesuffix(".json") for name in listed if name.endswith(".json"))

    def find(self, name: str) -> ImageInfo:
        """Raises ImageError for one that is not there, with the nearest names, or whose record is damaged."""
        try:
            with open(f"{self.directory}/names/{checked_name(name)}.json", "rb") as file:
                data = file.read(_LARGEST)
        except FileNotFoundError:
            raise unknown(name, self.names()) from None
        return _parse(name, data)

    def root(self, digest: str) -> str:
        """Where a tree is."""
        return f"{self.directory}/trees/{digest}/root"

    def hold(self, digest: str) -> Held:
        """Keep a tree from being removed. Raises ImageError when it is not there."""
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
                if is_at(fd, f"{self.directory}/trees/{digest}/lock"):  # else the tree was removed, and stored again
                    return Held(root, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    # making

    def open(self) -> None:
        """Make the store's own directories. Raises ImageError when they are not ours alone (C09, L04)."""
        above = os.path.dirname(self.directory)
        os.makedirs(above, 0o755, exist_ok=True)
        for path in (self.directory, *(f"{self.directory}/{name}" for name in _FOLDERS)):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass  # whose it is, is looked at next
            found = os.stat(path, follow_symlinks=False)
            if found.st_uid != os.geteuid() or found.st_mode & 0o170022 != 0o040000:
                raise ImageError(
                    f"{path} is not a directory that only this user can write to",
                    code="store",
                    fix=f"remove it, or make it yours: chmod 700 {path}",
                )

    def workplace(self) -> Workplace:
        """An empty directory of ours; and what dead makers left is removed first."""
        self.open()
        self.sweep()
        while True:
            path = f"{self.directory}/work/{os.urandom(8).hex()}"
            fd = lock(f"{path}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fd is not None:
                os.mkdir(path, 0o700)
                return Workplace(path, f"{path}.lock", fd)

    def sweep(self) -> int:
        """Remove what was being made by processes that are dead. Returns how many things that were."""
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
                pass  # something that its maker started still writes there: for the next time
            finally:
                os.close(fd)
        return swept

    def keep(self, tree: Tree) -> str:
        """Move a whole tree from a workplace into the store and return its digest. The same tree is stored once.

        Files that the store has already become links to those. A damaged tree is replaced, unless a sandbox uses it.
        """
        from ringfence.images.tree import share

        digest = tree.digest()
        place, made = f"{self.directory}/trees/{digest}", os.path.dirname(tree.directory)
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
        """Whether a stored tree is what its name says. Reads all of it."""
        from ringfence.images.tar_reader import TarError
        from ringfence.images.tree import scan, tree_digest

        try:
            return tree_digest(scan(self.root(digest))) == digest
        except (OSError, TarError):
            return False

    def name(self, info: ImageInfo) -> None:
        """Give a tree its name; an image that had it before loses it. The tree must be held or just kept."""
        self.write(f"names/{checked_name(info.name)}.json", {"version": _VERSION, **info.to_dict()})

    def write(self, path: str, value: Mapping[str, Json]) -> None:
        """A record of ours, whole or not at all."""
        import json

        self._write(path, json.dumps(value))

    def _write(self, path: str, text: str) -> None:
        """Under a name and a lock by which the next sweep knows what a writer who was killed left."""
        new = f"{self.directory}/work/{os.urandom(8).hex()}.lock"
        fd = lock(new, fcntl.LOCK_EX)
        assert fd is not None
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.rename(new, f"{self.directory}/{path}")

    def step(self, key: str) -> str | None:
        """The tree that a step of a build came to, when it is still there."""
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
        """One process at a time names, removes and collects."""
        self.open()
        fd = lock(f"{self.directory}/lock", fcntl.LOCK_EX)
        assert fd is not None
        return Held(self.directory, fd)

    # removing

    def remove(self, name: str) -> None:
        """Raises ImageError when there is none, or a sandbox uses it."""
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
        """Remove trees that no image has, and all steps of builds. Returns how many trees, and bytes of the disk.

        A tree that is in use stays for the next time.
        """
        with self.exclusive():
            self.sweep()
            before = _free(self.directory)
            for step in os.listdir(f"{self.directory}/steps"):
                os.unlink(f"{self.directory}/steps/{step}")
            kept, count = self._referred(), 0
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
        """A lock on a tree that nobody uses; None when somebody does, or it is not there."""
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
        """Out of sight first, so that a crash leaves no half of it."""
        with self.workplace() as place:
            os.rename(f"{self.directory}/trees/{digest}", f"{place.directory}/tree")

    def every_tree(self) -> Iterator[str]:
        """Digests of all trees, named or not."""
        try:
            yield from sorted(os.listdir(f"{self.directory}/trees"))
        except FileNotFoundError:
            return


def checked_name(name: str) -> str:
    """The name of an image of the store; PolicyError for what is no name. "NAME+DIGEST" is one with additions."""
    from ringfence.policy.image import IMAGE_CHECKS

    base, plus, added = name.partition("+")
    IMAGE_CHECKS["name"](base, "image")
    if plus and (len(added) != 12 or not _HEX.issuperset(added)):
        raise unknown(name, [])
    return name


def unknown(name: str, known: list[str]) -> ImageError:
    """The error for a name that is not in the store, with the nearest that are."""
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
    """Bytes that this user may still write there."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


# ── the images that sandboxes of this process use: no tree of theirs is removed meanwhile ─────────


@final
class Used(Struct):
    """A stored image that this process holds."""

    info: ImageInfo
    root: Root
    held_by: int = 0  # this process: a fork holds nothing by itself


_held: dict[tuple[int, str], Held] = {}  # by process and tree; one lock is enough for all sandboxes of a process


def use(image: Image) -> Used:
    """Find and hold it. Raises ImageError when it is not in the store, or was not built with what it adds."""
    store = Store()
    name = stored_name(image)
    try:
        info = store.find(name)
    except ImageError as error:
        if name == image.name or error.code != "image-unknown":
            raise
        store.find(image.name)
        raise ImageError(
            f"image {image.name} with these packages is not built; running it never builds it",
            code="image-not-built",
            fix="ringfence.images.build(image)",
        ) from None
    key = (os.getpid(), info.digest)
    if key not in _held:
        _held[key] = store.hold(info.digest)
    return Used(info, Root(info.name, _held[key].root, info.python), os.getpid())


def release(digest: str) -> None:
    """Let go of a tree: no sandbox of this process uses it any more."""
    held = _held.pop((os.getpid(), digest), None)
    if held is not None:
        held.close()


def held() -> list[str]:
    """Digests of the trees that this process holds."""
    return [digest for pid, digest in _held if pid == os.getpid()]


def stored_name(image: Image) -> str:
    """The name in the store: of an image with packages added, that of its own build."""
    added = (image.pip, image.apt, image.npm)
    if not any(added):
        return image.name
    import hashlib
    import json

    text = json.dumps([sorted(part) for part in added])
    return f"{image.name}+{hashlib.sha256(text.encode()).hexdigest()[:12]}"
