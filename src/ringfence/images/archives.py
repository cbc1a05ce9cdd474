"""Applies what people have to a tree: a folder, a tar, a `docker save` archive, an OCI layout archive.

Digests that an archive names are checked before its image gets a name (K07). What a configuration says (entrypoint,
working directory, user) is kept as data: nothing here or later runs it or goes there (M10).
"""

from __future__ import annotations

import os
import stat

from ringfence.errors import ImageError
from ringfence.files.digesting import Beside
from ringfence.files.tarstream import Caps, Entry, TarError, TarStream, TooLargeError, short
from ringfence.images.unpacking import Unpacked
from ringfence.policy import hostpaths
from ringfence.values import FrozenMap, Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO, TypeAlias

    from ringfence.files.layers import Tree
    from ringfence.files.tarstream import Kind
    from ringfence.values import Json

    Index: TypeAlias = dict[str, tuple[int, int]]  # name → where its bytes are and how many
    Progress: TypeAlias = Callable[[str], None]

_CHUNK = 1 << 20
_MOST_JSON = 4 << 20
_MOST_KEPT = 512 << 10  # bytes of a configuration: past a record's most, the image could not be looked up
_MOST_LAYERS = 127  # as many as engines accept
_ARCHIVE_ENTRIES = 2_000
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_GZIP = b"\x1f\x8b"
# Ours, or of one container, or pointless: what an image says of them does not reach a sandbox.
_NOT_FROM_IMAGES = frozenset(
    (
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "PWD", "OLDPWD", "TERM", "SHLVL", "_"),
    )
)


@final
class Described(Struct):
    """What a source says about itself."""

    source: str
    env: Mapping[str, str] = FrozenMap()
    config: Mapping[str, Json] = FrozenMap()
    notes: tuple[str, ...] = ()


def apply_file(tree: Tree, path: str, *, scratch: str, progress: Progress) -> Described:
    """A tar or an archive of layers. `scratch`: a directory for what must be unpacked to be read. Raises ImageError."""
    with open(_opened(path), "rb") as file:
        unpacked = Unpacked(file.read)
        try:
            if unpacked.kind is None:
                return _apply_plain(tree, file, progress)
            if not _looks_layered(_peek(path)):
                progress(f"unpacking {unpacked.kind}")
                stream = TarStream(unpacked.read, tree.caps)
                tree.apply_tar(stream, whiteouts=False)
                stream.drain()  # a checksum comes last
                return Described("tar")
            progress(f"unpacking {unpacked.kind}")
            with open(f"{scratch}/archive.tar", "w+b") as whole:
                _copy(unpacked.read, whole, tree.caps.size)
                return _apply_plain(tree, whole, progress)
        finally:
            unpacked.close()


def apply_stream(tree: Tree, read: Callable[[int], bytes]) -> None:
    """A tar that comes through a pipe, as one layer."""
    tree.apply_tar(TarStream(read, tree.caps), whiteouts=False)


def _copy(read: Callable[[int], bytes], into: BinaryIO, most: int) -> None:
    while data := read(_CHUNK):
        most -= len(data)
        if most < 0:
            raise TooLargeError("the archive is larger than the image may be")
        into.write(data)
    into.flush()


def _opened(path: str) -> int:
    """What an image holds, guests see: no link that one of them could have made is followed (L16)."""
    if hostpaths.descriptor(path) is not None:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # anew, from its beginning
    return hostpaths.open_itself(path, os.O_RDONLY | os.O_NOCTTY)


def _peek(path: str) -> str:
    """The name of the first entry."""
    with open(_opened(path), "rb") as file:
        unpacked = Unpacked(file.read)
        try:
            first = next(iter(TarStream(unpacked.read)), None)
        finally:
            unpacked.close()
    return first.name if first is not None else ""


def _looks_layered(name: str) -> bool:
    """Whether an entry could be one of an archive of layers; a root file system has other names."""
    top, _, rest = name.removeprefix("./").partition("/")
    if top in ("manifest.json", "repositories", "oci-layout", "index.json", "blobs"):
        return not rest or top == "blobs"
    is_hex = len(top.partition(".")[0]) == 64 and all(char in "0123456789abcdef" for char in top.partition(".")[0])
    return is_hex and (top.endswith((".json", ".tar")) or rest in ("", "json", "VERSION", "layer.tar"))


def _apply_plain(tree: Tree, file: BinaryIO, progress: Progress) -> Described:
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
    """Where the parts of an archive of layers are; None when it is a root file system."""
    file.seek(0)
    size = os.fstat(file.fileno()).st_size

    def skip(count: int) -> None:
        if file.seek(count, os.SEEK_CUR) > size:
            raise TarError(f"the archive is cut short after {size:,} bytes")

    stream = TarStream(file.read, Caps(entries=_ARCHIVE_ENTRIES, size=1 << 50), skip=skip)
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
        elif entry.kind == "symlink":  # old `docker save`: a layer that an earlier image of the archive has too
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
        """A small part, parsed; checked against `digest` when one is named."""
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
    """A reader that digests what passes. Close it."""

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


def _docker(archive: _Archive, tree: Tree, progress: Progress) -> Described:
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


def _oci(archive: _Archive, tree: Tree, progress: Progress) -> Described:
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
    """The manifest for this machine; an index may name another index, once."""
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
    archive: _Archive, tree: Tree, layers: list[tuple[str, str | None]], config: object, progress: Progress
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


def _apply_layer(archive: _Archive, tree: Tree, name: str, digest: str | None, diff: str, left: int) -> int:
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
    """A word or a list of words, as data."""
    if isinstance(value, str):
        return value[:4096]
    if isinstance(value, list):
        return [word[:4096] for word in value[:256] if isinstance(word, str)]
    return None


# ── folders ──────────────────────────────────────────────────────────────────────────────────────


def apply_directory(tree: Tree, path: str, *, below: str = "", whole: bool = True) -> Described:
    """A folder of the host, as it is now; other file systems mounted in it are left out. Links are not followed.

    `below`: where it goes in the tree. `whole`: it is the root file system.
    """
    tree.begin_layer()
    fd = hostpaths.open_itself(path, os.O_RDONLY | os.O_DIRECTORY)
    walk = _Walk(tree, os.fstat(fd).st_dev)
    try:
        if whole:
            tree.add(_entry_of(".", os.fstat(fd), "dir"), list)
        walk.go(fd, below)
    except PermissionError as error:
        raise ImageError(
            f"cannot read {short(str(error.filename))} below {path}: {error.strerror}",
            code="image-source",
            fix="run it as a user who can, or make a tar of the folder as one",
        ) from None
    finally:
        os.close(fd)
    return Described("directory", notes=tuple(walk.notes))


def apply_host_file(tree: Tree, path: str, target: str) -> None:
    """One file of the host, at `target`."""
    tree.begin_layer()
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY  # of a pipe: at once
    with open(hostpaths.open_itself(path, flags), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ImageError(f"{path} is no regular file", code="image-source", fix="name a file or a folder")
        tree.add(_entry_of(target, found, "file"), lambda: _pieces(file))


class _Walk:
    def __init__(self, tree: Tree, device: int) -> None:
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


def _entry_of(path: str, found: os.stat_result, kind: Kind, link: str = "") -> Entry:
    return Entry(
        path,
        kind,
        mode=stat.S_IMODE(found.st_mode),
        size=found.st_size if kind == "file" else 0,
        mtime=max(0, int(found.st_mtime)),
        link=link,
        extended=False,
    )
