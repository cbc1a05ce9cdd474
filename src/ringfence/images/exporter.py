"""Writes an image as a docker archive of a single layer, and checks the digest of a tree."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile

from ringfence.errors import ImageError
from ringfence.images.tar_reader import TarError
from ringfence.images.tree import scan, tree_digest, walk
from ringfence.policy import host_paths
from ringfence.shared.tar import BLOCK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from ringfence.images.store import ImageInfo, ImageStore
    from ringfence.images.tree import Node

_CHUNK = 1 << 20


def verify_image(store: ImageStore, name: str) -> None:
    """See ringfence.images.verify."""
    info = store.find(name)
    with store.hold(info.digest) as held:
        _checked(held.root, info)


def _checked(root: str, info: ImageInfo) -> Node:
    try:
        found = scan(root)
        if tree_digest(found) == info.digest:
            return found
    except (TarError, OSError):
        pass  # a tree that cannot be read is damaged
    raise ImageError(
        f"image {info.name} is damaged: its files are not what was stored",
        code="image-damaged",
        fix="import or build it again",
    )


def export_image(store: ImageStore, name: str, path: str) -> None:
    """See ringfence.images.export."""
    info = store.find(name)
    with store.hold(info.digest) as held:
        tree = _checked(held.root, info)
        folder, last = host_paths.open_parent(path)  # no link that a guest could have made is on the way (L15)
        new = f"{last[:50]}.{os.urandom(4).hex()}.partial"
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
            with open(fd, "wb") as file:
                _write(file, tree, held.root, info)
            os.rename(new, last, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            _drop(new, folder)
            raise OSError(error.errno, error.strerror, path) from None  # with the path that the caller named
        except BaseException:
            _drop(new, folder)
            raise
        finally:
            os.close(folder)


def _drop(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass  # not made yet


class _Layer(io.RawIOBase):
    """A file that digests what is written."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.sum = hashlib.sha256()
        self.size = 0

    def write(self, data: Any, /) -> int:
        self.sum.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)


def _write(file: BinaryIO, tree: Node, root: str, info: ImageInfo) -> None:
    """Write the archive. The layer's header is written again at the end, when the layer's size is known."""
    layer_name = f"{info.digest}/layer.tar"
    file.write(_header(layer_name, 0))
    layer = _Layer(file)
    with tarfile.open(fileobj=layer, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:
        for name, node in walk(tree):
            _add(tar, name, node, root)
    file.write(bytes(-layer.size % BLOCK))
    end = file.tell()
    file.seek(0)
    file.write(_header(layer_name, layer.size))
    file.seek(end)
    config = json.dumps(_config(info, layer.sum.hexdigest())).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    tag = f"ringfence/{info.name.lower()}:latest"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [tag], "Layers": [layer_name]}]).encode()
    parts = ((config_name, config), ("manifest.json", manifest))
    file.writelines(_header(name, len(data)) + data + bytes(-len(data) % BLOCK) for name, data in parts)
    file.write(bytes(2 * BLOCK))


def _header(name: str, size: int) -> bytes:
    found = tarfile.TarInfo(name)
    found.size = size
    found.mode = 0o644
    return found.tobuf(tarfile.USTAR_FORMAT if size < 8 << 30 else tarfile.GNU_FORMAT)


def _add(tar: tarfile.TarFile, path: str, node: Node, root: str) -> None:
    entry = tarfile.TarInfo(path or ".")
    entry.mode = node.mode
    entry.mtime = node.mtime
    if node.kind == "dir":
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    elif node.kind == "symlink":
        entry.type = tarfile.SYMTYPE
        entry.linkname = node.content
        tar.addfile(entry)
    else:
        entry.size = node.size
        with open(os.open(f"{root}/{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as content:
            tar.addfile(entry, content if node.size else io.BytesIO())


def _config(info: ImageInfo, diff: str) -> dict[str, object]:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    words = {"entrypoint": "Entrypoint", "cmd": "Cmd", "workdir": "WorkingDir", "user": "User"}
    inner: dict[str, object] = {words[key]: value for key, value in info.config.items() if key in words}
    inner["Env"] = [f"{name}={value}" for name, value in info.env.items()]
    return {
        "architecture": machine,
        "os": "linux",
        "config": inner,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
    }
