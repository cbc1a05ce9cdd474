"""Imports images: finds out what a source is, applies the source to a new tree, and keeps the image."""

from __future__ import annotations

import os
import stat

from ringfence.errors import ImageError
from ringfence.images.make import ImageWorkplace, Wanted, silent
from ringfence.images.store import checked_name
from ringfence.images.tar_reader import ArchiveCaps, ArchiveEntry, TarError, TarStream, TooLargeError, short
from ringfence.images.tree import Beside
from ringfence.policy import host_paths
from ringfence.shared.paths import is_within
from ringfence.values import FrozenMap, Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO, Protocol, TypeAlias

    from ringfence.images.store import ImageInfo, ImageStore
    from ringfence.images.tar_reader import Kind
    from ringfence.images.tree import ImageTree
    from ringfence.values import Json

    Read: TypeAlias = Callable[[int], bytes]
    Index: TypeAlias = dict[str, tuple[int, int]]  # by name: offset and count of the bytes
    Progress: TypeAlias = Callable[[str], None]

    class Decompressor(Protocol):
        @property
        def eof(self) -> bool: ...
        @property
        def unused_data(self) -> bytes: ...
        def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...

    Codec: TypeAlias = tuple[Callable[[], Decompressor], tuple[type[Exception], ...]]


# ── compressed streams, known by their first bytes and not by the file's name ─────────────────────

# The tar reader limits how much is unpacked.

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2"}
_PACKED_CHUNK = 1 << 18


def compression(start: bytes) -> str | None:
    """Return the compression that a stream's first bytes show; None for no known compression."""
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


class Unpacked:
    """A stream that reads as if it were not compressed. Must be closed: zstd may be a running program."""

    def __init__(self, read: Read) -> None:
        self._source = read
        self._start = b""
        while len(self._start) < 6 and (more := read(1 << 16)):
            self._start += more
        self.kind = compression(self._start)
        self._tool: subprocess.Popen[bytes] | None = None
        self._read = self._reader()

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes; b"" at the end. Raises ImageError for damaged data."""
        return self._read(count)

    def _raw(self, count: int) -> bytes:
        if self._start:
            found, self._start = self._start[:count], self._start[count:]
            return found
        return self._source(count)

    def _reader(self) -> Read:
        if self.kind is None:
            return self._raw
        if self.kind == "zstd":
            return self._zstd()
        return _Stdlib(self._raw, self.kind, _codec(self.kind)).read

    def _zstd(self) -> Read:
        """Return a reader of zstd data: by Python's own module where it exists (3.14), else by the program."""
        try:
            from compression import zstd  # type: ignore[import-not-found]  # new in 3.14
        except ImportError:
            return self._by_program()
        return _Stdlib(self._raw, "zstd", (zstd.ZstdDecompressor, (zstd.ZstdError,))).read

    def _by_program(self) -> Read:
        import subprocess
        import threading

        from ringfence.host import programs

        found = programs.look_up("zstd")
        if found.path is None:
            raise ImageError(
                f"this archive is compressed with zstd, and there is no zstd that may be used{found.remark}",
                code="zstd",
                fix="install zstd, or compress it with gzip",
            )
        self._tool = subprocess.Popen(
            [found.path, "-dcq"],
            env=programs.environment(found.path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        into, out = self._tool.stdin, self._tool.stdout
        assert into is not None
        assert out is not None
        threading.Thread(target=self._feed, args=(into,), daemon=True).start()
        tool = self._tool

        def read(count: int) -> bytes:
            data = out.read(count)
            if not data and tool.wait() != 0:
                raise _damaged("zstd")
            return data

        return read

    def _feed(self, into: BinaryIO) -> None:
        try:
            with into:
                while data := self._raw(_PACKED_CHUNK):
                    into.write(data)
        except (OSError, ValueError):
            return  # the program ended first, or `close` killed it; `read` checks its exit status

    def close(self) -> None:
        if self._tool is not None:
            self._tool.kill()
            self._tool.wait()
            if self._tool.stdout is not None:
                self._tool.stdout.close()


class _Stdlib:
    """A reader of gzip, xz and bzip2, of several streams in a row. Never unpacks more than was asked for (F22)."""

    def __init__(self, read: Read, kind: str, codec: Codec) -> None:
        self._source = read
        self._kind = kind
        self._make, self._errors = codec
        self._current = self._make()
        self._pending = b""

    def read(self, count: int) -> bytes:
        while True:
            if self._current.eof:
                rest = self._current.unused_data.lstrip(b"\0") or self._source(_PACKED_CHUNK).lstrip(b"\0")
                if not rest:
                    return b""
                self._current = self._make()
                self._pending = rest
            # zlib has no `needs_input`: its rest is in `unconsumed_tail`.
            hungry = getattr(self._current, "needs_input", True)
            data = self._pending or (self._source(_PACKED_CHUNK) if hungry else b"")
            found = self._step(data, count)
            if found:
                return found
            if not data and hungry and not self._current.eof:
                raise _damaged(self._kind)

    def _step(self, data: bytes, count: int) -> bytes:
        try:
            found = self._current.decompress(data, count)
        except self._errors:
            raise _damaged(self._kind) from None
        self._pending = getattr(self._current, "unconsumed_tail", b"")
        return found


def _codec(kind: str) -> Codec:
    if kind == "gzip":
        import zlib

        return lambda: zlib.decompressobj(31), (zlib.error,)
    if kind == "xz":
        import lzma

        return lambda: lzma.LZMADecompressor(memlimit=256 << 20), (lzma.LZMAError, EOFError)
    import bz2

    return bz2.BZ2Decompressor, (OSError, ValueError, EOFError)


def _damaged(kind: str) -> ImageError:
    return ImageError(
        f"the {kind} data is damaged or cut short", code="archive", fix="make or download the archive again"
    )


# ── sources: a folder, a tar, a `docker save` archive, an OCI layout archive ──────────────────────

# Digests that an archive names are checked before its image gets a name (K07). The words of a configuration
# (entrypoint, working directory, user) are kept as data: no code here or later runs them or goes there (M10).

_CHUNK = 1 << 20
_MOST_JSON = 4 << 20
_MOST_KEPT = 512 << 10  # bytes of a configuration: an image with a larger record could not be looked up
_MOST_LAYERS = 127  # engines accept no more
_ARCHIVE_ENTRIES = 2_000
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_GZIP = b"\x1f\x8b"
# Variables that Ringfence sets, that belong to one container, or that make no sense: an image's values are left out.
_NOT_FROM_IMAGES = frozenset(
    (
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "PWD", "OLDPWD", "TERM", "SHLVL", "_"),
    )
)


@final
class Described(Struct):
    """The description that comes with a source."""

    source: str
    env: Mapping[str, str] = FrozenMap()
    config: Mapping[str, Json] = FrozenMap()
    notes: tuple[str, ...] = ()


def apply_file(tree: ImageTree, path: str, *, scratch: str, progress: Progress) -> Described:
    """Apply a tar or an archive of layers, and return its description.

    `scratch`: a directory for archives that must be unpacked to be read. Raises ImageError, TarError.
    """
    with open(_opened(path), "rb") as file:
        unpacked = Unpacked(file.read)
        try:
            if unpacked.kind is None:
                return _apply_plain(tree, file, progress)
            if not _looks_layered(_peek(path)):
                progress(f"unpacking {unpacked.kind}")
                stream = TarStream(unpacked.read, tree.caps)
                tree.apply_tar(stream, whiteouts=False)
                stream.drain()  # a compressed stream ends with a checksum
                return Described("tar")
            progress(f"unpacking {unpacked.kind}")
            with open(f"{scratch}/archive.tar", "w+b") as whole:
                _copy(unpacked.read, whole, tree.caps.size)
                return _apply_plain(tree, whole, progress)
        finally:
            unpacked.close()


def apply_stream(tree: ImageTree, read: Callable[[int], bytes]) -> None:
    """Apply a tar that comes through a pipe, as one layer."""
    tree.apply_tar(TarStream(read, tree.caps), whiteouts=False)


def _copy(read: Callable[[int], bytes], into: BinaryIO, most: int) -> None:
    while data := read(_CHUNK):
        most -= len(data)
        if most < 0:
            raise TooLargeError("the archive is larger than the image may be")
        into.write(data)
    into.flush()


def _opened(path: str) -> int:
    """Open a source. No link that a guest could have made is followed, because guests see an image's files (L16)."""
    if host_paths.descriptor(path) is not None:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # opened anew, from the beginning
    return host_paths.open_itself(path, os.O_RDONLY | os.O_NOCTTY)


def _peek(path: str) -> str:
    """Return the name of an archive's first entry; "" for an empty archive."""
    with open(_opened(path), "rb") as file:
        unpacked = Unpacked(file.read)
        try:
            first = next(iter(TarStream(unpacked.read)), None)
        finally:
            unpacked.close()
    return first.name if first is not None else ""


def _looks_layered(name: str) -> bool:
    """Return whether a name belongs to an archive of layers; a root file system has other names."""
    top, _, rest = name.removeprefix("./").partition("/")
    if top in ("manifest.json", "repositories", "oci-layout", "index.json", "blobs"):
        return not rest or top == "blobs"
    is_hex = len(top.partition(".")[0]) == 64 and all(char in "0123456789abcdef" for char in top.partition(".")[0])
    return is_hex and (top.endswith((".json", ".tar")) or rest in ("", "json", "VERSION", "layer.tar"))


def _apply_plain(tree: ImageTree, file: BinaryIO, progress: Progress) -> Described:
    index = _index(file)
    file.seek(0)
    if index is None:
        tree.apply_tar(TarStream(file.read, tree.caps), whiteouts=False)
        return Described("tar")
    archive = _Archive(file, index)
    if "manifest.json" in index:
        return _docker(archive, tree, progress)
    if "index.json" in index:
        return _oci(archive, tree, progress)
    raise TarError("the archive has layers, but neither manifest.json nor index.json")


def _index(file: BinaryIO) -> Index | None:
    """Return where the parts of an archive of layers are; None for a root file system."""
    file.seek(0)
    size = os.fstat(file.fileno()).st_size

    def skip(count: int) -> None:
        if file.seek(count, os.SEEK_CUR) > size:
            raise TarError(f"the archive is cut short after {size:,} bytes")

    stream = TarStream(file.read, ArchiveCaps(entries=_ARCHIVE_ENTRIES, size=1 << 50), skip=skip)
    found: Index = {}
    links: list[tuple[str, str]] = []
    for entry in stream:
        if not _looks_layered(entry.name):
            return None
        name = entry.name.removeprefix("./").rstrip("/")
        if entry.kind == "file":
            if name in found:
                raise TarError(f"{short(name)} is in the archive twice")
            found[name] = (stream.offset, entry.size)
        elif entry.kind == "symlink":  # old `docker save`: a layer that is in an earlier image of the archive too
            links.append((name, os.path.normpath(f"{os.path.dirname(name)}/{entry.link}")))
        elif entry.kind != "dir":
            raise TarError(f"{short(name)} is a {entry.kind}, which an archive of layers does not hold")
    for name, target in links:
        if target in found:
            found[name] = found[target]
    return found or None


class _Archive:
    """The parts of an archive of layers, by name."""

    def __init__(self, file: BinaryIO, index: Index) -> None:
        self._file = file
        self.index = index

    def reader(self, name: str) -> Callable[[int], bytes]:
        if name not in self.index:
            raise TarError(f"the archive has no {short(name)}, which it names")
        at, left = self.index[name]
        fd = self._file.fileno()

        def read(count: int) -> bytes:
            nonlocal at, left
            data = os.pread(fd, min(count, left), at)
            if not data and left:
                raise TarError(f"{short(name)} is cut short")
            at += len(data)
            left -= len(data)
            return data

        return read

    def json(self, name: str, digest: str | None = None) -> object:
        """Return a small part, parsed as JSON. With `digest`, checks the bytes first."""
        import hashlib
        import json

        read = self.reader(name)
        if self.index[name][1] > _MOST_JSON:
            raise TarError(f"{short(name)} has {self.index[name][1]:,} bytes, which is too much for a description")
        data = b""
        while piece := read(_CHUNK):
            data += piece
        if digest is not None and hashlib.sha256(data).hexdigest() != digest:
            raise _wrong_digest(name)
        try:
            found: object = json.loads(data)
        except (ValueError, RecursionError):
            raise TarError(f"{short(name)} is no JSON") from None
        return found


def _wrong_digest(name: str) -> ImageError:
    return ImageError(
        f"{short(name)} does not have the digest that the archive names: it is damaged, or was changed",
        code="image-digest",
        fix="make or download the archive again",
    )


class _Hashed:
    """A reader that digests all bytes read. Must be closed."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        import hashlib

        self._read = read
        self._sum = hashlib.sha256()
        self._beside = Beside()

    def read(self, count: int) -> bytes:
        data = self._read(count)
        self._beside.update(self._sum, data)
        return data

    @property
    def digest(self) -> str:
        self._beside.settle()
        return self._sum.hexdigest()

    def close(self) -> None:
        self._beside.close()


# ── layers ───────────────────────────────────────────────────────────────────────────────────────


def _docker(archive: _Archive, tree: ImageTree, progress: Progress) -> Described:
    manifest = archive.json("manifest.json")
    if not isinstance(manifest, list) or not manifest or not all(isinstance(one, dict) for one in manifest):
        raise TarError("manifest.json is no list of images")
    if len(manifest) > 1:
        raise ImageError(
            f"the archive holds {len(manifest)} images", code="archive", fix="save one: docker save NAME > FILE"
        )
    config_name, layers = manifest[0].get("Config"), manifest[0].get("Layers")
    if not isinstance(config_name, str) or not isinstance(layers, list):
        raise TarError("manifest.json names no configuration and layers")
    stem = config_name.rpartition("/")[2].removesuffix(".json")
    config = archive.json(config_name, stem if len(stem) == 64 else None)
    names = [name for name in layers if isinstance(name, str)]
    described = _described("docker-archive", config)
    _apply_layers(archive, tree, [(name, None) for name in names], config, progress)
    return described


def _oci(archive: _Archive, tree: ImageTree, progress: Progress) -> Described:
    manifest = _manifest(archive, archive.json("index.json"), 0)
    config_digest = _digest(manifest.get("config"))
    config = archive.json(f"blobs/sha256/{config_digest}", config_digest)
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise TarError("the manifest names no layers")
    digests = [_digest(layer) for layer in layers]
    described = _described("oci-archive", config)
    _apply_layers(archive, tree, [(f"blobs/sha256/{one}", one) for one in digests], config, progress)
    return described


def _manifest(archive: _Archive, index: object, depth: int) -> Mapping[str, object]:
    """Return the manifest for this machine. An index may name a further index, once."""
    listed = index.get("manifests") if isinstance(index, dict) else None
    if not isinstance(listed, list) or not listed:
        raise TarError("index.json names no image")
    fitting = [one for one in listed if isinstance(one, dict) and _fits(one.get("platform"))]
    if len(fitting) != 1:
        many = f"{len(fitting)} images" if fitting else f"no image for {_machine()}"
        raise ImageError(f"the archive holds {many}", code="archive", fix="make an archive of one image")
    digest = _digest(fitting[0])
    found = archive.json(f"blobs/sha256/{digest}", digest)
    if isinstance(found, dict) and "manifests" in found and depth == 0:
        return _manifest(archive, found, 1)
    if not isinstance(found, dict):
        raise TarError("the manifest is no object")
    return found


def _machine() -> str:
    return _MACHINES.get(os.uname().machine, os.uname().machine)


def _fits(platform: object) -> bool:
    if not isinstance(platform, dict):
        return True
    return platform.get("os") in (None, "linux") and platform.get("architecture") in (None, _machine())


def _digest(descriptor: object) -> str:
    text = descriptor.get("digest") if isinstance(descriptor, dict) else None
    algorithm, _, digest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if algorithm != "sha256" or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise TarError(f"{text!r:.80} is no SHA-256 digest")
    return digest


def _apply_layers(
    archive: _Archive, tree: ImageTree, layers: list[tuple[str, str | None]], config: object, progress: Progress
) -> None:
    rootfs = config.get("rootfs") if isinstance(config, dict) else None
    ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(ids, list) or len(ids) != len(layers) or not layers:
        raise TarError("the configuration and the manifest name different layers")
    if len(layers) > _MOST_LAYERS:
        raise TarError(f"{len(layers)} layers; the most is {_MOST_LAYERS}")
    left = tree.caps.size
    for number, ((name, digest), diff) in enumerate(zip(layers, ids, strict=True), 1):
        progress(f"layer {number} of {len(layers)}")
        left -= _apply_layer(archive, tree, name, digest, _digest({"digest": diff}), left)


def _apply_layer(archive: _Archive, tree: ImageTree, name: str, digest: str | None, diff: str, left: int) -> int:
    packed = _Hashed(archive.reader(name))
    unpacked = Unpacked(packed.read if digest is not None else archive.reader(name))
    plain = _Hashed(unpacked.read)
    try:
        stream = TarStream(plain.read, replace(tree.caps, size=left))
        tree.apply_tar(stream, whiteouts=True)
        stream.drain()
        if plain.digest != diff or digest not in (None, packed.digest):
            raise _wrong_digest(name)
    finally:
        unpacked.close()
        plain.close()
        packed.close()
    return stream.size


def _described(source: str, config: object) -> Described:
    if not isinstance(config, dict):
        raise TarError("the configuration is no object")
    if not _fits(config):
        raise ImageError(
            f"the image is for {config.get('os')!r:.40} on {config.get('architecture')!r:.40}",
            code="image-machine",
            fix=f"get it for linux on {_machine()}",
        )
    import json

    inner = config.get("config")
    inner = inner if isinstance(inner, dict) else {}
    env, notes = _environment(inner.get("Env"))
    words = {"Entrypoint": "entrypoint", "Cmd": "cmd", "WorkingDir": "workdir", "User": "user", "Shell": "shell"}
    kept = {name: _plain(inner[key]) for key, name in words.items() if inner.get(key)}
    ignored = [key for key in ("OnBuild", "Volumes", "Healthcheck", "StopSignal") if inner.get(key)]
    notes += [f"{key} of the image is not used" for key in ignored]
    words_kept = {key: value for key, value in kept.items() if value is not None}
    if len(json.dumps([env, words_kept, notes])) > _MOST_KEPT:
        raise TarError(f"the configuration's variables and words are longer than {_MOST_KEPT:,} bytes")
    return Described(source, env, words_kept, tuple(notes))


def _environment(listed: object) -> tuple[dict[str, str], list[str]]:
    from ringfence.errors import PolicyError
    from ringfence.policy.checks import environment

    env: dict[str, str] = {}
    notes: list[str] = []
    for item in listed if isinstance(listed, list) else []:
        name, equals, value = item.partition("=") if isinstance(item, str) else ("", "", "")
        try:
            if equals and name.upper() not in _NOT_FROM_IMAGES:
                env.update(environment({name: value}, "env"))
        except PolicyError:
            notes.append(f"the variable {name[:40]!r} of the image is not one, and is left out")
    return env, notes


def _plain(value: object) -> Json:
    """Return a word or a list of words, cut; None for any other value."""
    if isinstance(value, str):
        return value[:4096]
    if isinstance(value, list):
        return [word[:4096] for word in value[:256] if isinstance(word, str)]
    return None


# ── folders ──────────────────────────────────────────────────────────────────────────────────────


def apply_directory(tree: ImageTree, path: str, *, below: str = "", whole: bool = True) -> Described:
    """Copy a folder of the host into the tree. Leaves out file systems mounted in the folder; follows no links.

    `below`: the place in the tree. `whole`: the folder is the root file system.
    """
    tree.begin_layer()
    fd = host_paths.open_itself(path, os.O_RDONLY | os.O_DIRECTORY)
    walk = _FolderWalk(tree, os.fstat(fd).st_dev)
    try:
        if whole:
            tree.add(_entry_of(".", os.fstat(fd), "dir"), list)
        walk.go(fd, below)
    except PermissionError as error:
        raise ImageError(
            f"cannot read {short(str(error.filename))} below {path}: {error.strerror}",
            code="image-source",
            fix="run the import as a user who can read it, or make a tar of the folder as that user",
        ) from None
    finally:
        os.close(fd)
    return Described("directory", notes=tuple(walk.notes))


def apply_host_file(tree: ImageTree, path: str, target: str) -> None:
    """Copy a file of the host to `target` in the tree."""
    tree.begin_layer()
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY  # never waits for a pipe
    with open(host_paths.open_itself(path, flags), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ImageError(f"{path} is no regular file", code="image-source", fix="name a file or a folder")
        tree.add(_entry_of(target, found, "file"), lambda: _pieces(file))


class _FolderWalk:
    def __init__(self, tree: ImageTree, device: int) -> None:
        self._tree = tree
        self._device = device
        self._seen: dict[int, str] = {}  # files with several names
        self.notes: list[str] = []

    def go(self, fd: int, prefix: str) -> None:
        for name in sorted(os.listdir(fd)):
            path = f"{prefix}/{name}" if prefix else name
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if found.st_dev != self._device:
                self.notes.append(f"{path}: another file system is mounted there; left out")
                continue
            self._one(fd, name, path, found)

    def _one(self, fd: int, name: str, path: str, found: os.stat_result) -> None:
        mode = found.st_mode
        if stat.S_ISDIR(mode):
            self._tree.add(_entry_of(path, found, "dir"), list)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                self.go(below, path)
            finally:
                os.close(below)
        elif stat.S_ISLNK(mode):
            self._tree.add(_entry_of(path, found, "symlink", os.readlink(name, dir_fd=fd)), list)
        elif stat.S_ISREG(mode):
            self._file(fd, name, path, found)
        else:
            self._tree.add(_entry_of(path, found, "block"), list)

    def _file(self, fd: int, name: str, path: str, found: os.stat_result) -> None:
        if found.st_nlink > 1:
            if found.st_ino in self._seen:
                self._tree.add(_entry_of(path, found, "hardlink", self._seen[found.st_ino]), list)
                return
            self._seen[found.st_ino] = path
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=fd), "rb", buffering=0) as file:
            self._tree.add(_entry_of(path, found, "file"), lambda: _pieces(file))


def _pieces(file: object) -> Iterator[bytes]:
    while data := file.read(_CHUNK):  # type: ignore[attr-defined]  # a raw file
        yield data


def _entry_of(path: str, found: os.stat_result, kind: Kind, link: str = "") -> ArchiveEntry:
    return ArchiveEntry(
        path,
        kind,
        mode=stat.S_IMODE(found.st_mode),
        size=found.st_size if kind == "file" else 0,
        mtime=max(0, int(found.st_mtime)),
        link=link,
        extended=False,
    )


# ── an image of a running Docker or Podman: the archive that `save` writes; no container is run ───

ENGINES = ("docker", "podman")
_SAVE_S = 1800.0
# Variables by which the caller chooses an engine and how to reach it.
_SETTINGS = ("DOCKER_*", "CONTAINER_*", "CONTAINERS_*", "XDG_*", "SSH_AUTH_SOCK", "STORAGE_DRIVER")
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/:@")


def split(source: str) -> tuple[str, str] | None:
    """Return ("docker", "NAME") for "docker:NAME"; None for a path."""
    engine, colon, name = source.partition(":")
    return (engine, name) if colon and engine in ENGINES else None


def save(engine: str, name: str, path: str, progress: Callable[[str], None]) -> None:
    """Write the archive of the engine's image `name` to `path`. Raises ImageError with the engine's message."""
    import subprocess

    from ringfence.host import programs

    if not name or name.startswith("-") or not _NAME.issuperset(name) or len(name) > 300:
        raise ImageError(f"{name!r:.80} is no name of an image", code="image-source", fix=f"such as {engine}:debian:12")
    found = programs.look_up(engine)
    if found.path is None:
        raise ImageError(
            f"there is no {engine} that may be used{found.remark}",
            code="engine-missing",
            fix=f"install it, or import a file: {engine} save NAME",
        )
    progress(f"{engine} save {name}")
    form = ["--format", "docker-archive"] if engine == "podman" else []
    try:
        done = subprocess.run(
            [found.path, "save", *form, "--output", os.path.abspath(path), name],
            env=programs.environment(found.path, *_SETTINGS),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SAVE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{engine} save took longer than {_SAVE_S:g} s", code="engine-failed") from None
    if done.returncode != 0:
        raise _failed(engine, name, done.stderr.decode("utf-8", "replace"))


def _failed(engine: str, name: str, said: str) -> ImageError:
    text = " ".join(said.split())[-300:]
    low = text.lower()
    if "permission denied" in low:
        return ImageError(
            f"this user may not use {engine}: {text}",
            code="engine-permission",
            fix="sudo usermod -aG docker $USER, then log in again; members of that group can become root",
        )
    if "no such image" in low or "image not known" in low or "reference does not exist" in low:
        return ImageError(
            f"{engine} has no image {name!r}", code="image-unknown", fix=f"{engine} pull {name}; then import it again"
        )
    if "cannot connect" in low or "connection refused" in low or "no such file or directory" in low:
        return ImageError(f"{engine} does not run: {text}", code="engine-missing", fix="start it: ringfence doctor")
    return ImageError(f"{engine} save failed: {text}", code="engine-failed", fix=f"try by hand: {engine} save {name}")


def import_source(store: ImageStore, name: str, source: str, progress: Callable[[str], None] | None) -> ImageInfo:
    """See ringfence.images.import_image."""
    check_free_name(name)
    say = progress or silent
    engine = split(source)
    if engine is None:
        _check_source(store, source)
    with ImageWorkplace(store, source) as making:
        if engine is not None:
            saved = f"{making.scratch}/saved.tar"
            save(*engine, saved, say)
            described = apply_file(making.tree, saved, scratch=making.scratch, progress=say)
        elif os.path.isdir(source):
            say(f"reading {source}")
            described = apply_directory(making.tree, source)
        else:
            described = apply_file(making.tree, source, scratch=making.scratch, progress=say)
        _check_content(making, source)
        return making.keep(_wanted(name, described))


def check_free_name(name: str) -> None:
    """Raise PolicyError for a text that is no name, ImageError for "host" and for a name with additions ("+")."""
    checked_name(name)
    if name == "host":
        raise ImageError('"host" is this machine itself, and always there', code="image-name", fix="take another name")
    if "+" in name:
        raise ImageError(f"{name!r} is no name of an image", code="image-name", fix='leave the "+" out')


def _check_source(store: ImageStore, source: str) -> None:
    mode = os.stat(source).st_mode
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise ImageError(f"{source} is neither a file nor a folder", code="image-source", fix="name an archive")
    if stat.S_ISDIR(mode):
        real, ours = os.path.realpath(source), os.path.realpath(store.directory)
        if is_within(ours, real):
            raise ImageError(
                f"{source} holds the store of images itself ({ours})",
                code="image-source",
                fix="import a folder that is a root file system of its own",
            )


def _check_content(making: ImageWorkplace, source: str) -> None:
    """Refuse a source without programs, such as an empty archive, now rather than at the first run."""
    programs = [("bin",), ("usr", "bin"), ("sbin",), ("usr", "local", "bin"), ("busybox",)]
    if not any(making.tree.find(path) is not None for path in programs):
        raise ImageError(
            f"{source} holds no root file system: it has neither bin nor usr/bin at its top",
            code="image-source",
            fix="pack the root itself: tar -C ROOT -cf FILE .",
        )


def _wanted(name: str, described: Described) -> Wanted:
    return Wanted(name=name, source=described.source, env=described.env, config=described.config, notes=described.notes)
