"""Makes archives by hand: layers, `docker save`, OCI layouts, and ones no honest program writes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable
from typing import Any, NamedTuple


class E(NamedTuple):
    """An entry of a tar, exactly as the test wants it written."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    mtime: int = 1_700_000_000


def directory(name: str, mode: int = 0o755) -> E:
    return E(name, kind=tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> E:
    return E(name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> E:
    return E(name, kind=tarfile.LNKTYPE, link=target)


def device(name: str) -> E:
    return E(name, kind=tarfile.CHRTYPE)


def tar(entries: Iterable[E], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for one in entries:
            entry = tarfile.TarInfo(one.name)
            entry.type, entry.linkname, entry.mode, entry.mtime = one.kind, one.link, one.mode, one.mtime
            entry.size = len(one.data)
            archive.addfile(entry, io.BytesIO(one.data))
    return out.getvalue()


# The least that passes for a root file system.
ROOT = (directory("bin"), E("bin/tool", b"#!/bin/sh\n", mode=0o755), directory("etc"))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config(layers: list[bytes], **inner: object) -> dict[str, Any]:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    ids = [f"sha256:{sha(layer)}" for layer in layers]
    return {"architecture": machine, "os": "linux", "config": inner, "rootfs": {"type": "layers", "diff_ids": ids}}


def docker(layers: list[bytes], described: dict[str, Any] | None = None, *, packed: bool = False) -> bytes:
    """Return an archive in the form of `docker save`; `packed`: with compressed layers, as some tools write."""
    text = json.dumps(config(layers) if described is None else described).encode()
    names = [f"blobs/sha256/{sha(layer)}" for layer in layers]
    manifest = [{"Config": f"{sha(text)}.json", "RepoTags": ["x:latest"], "Layers": names}]
    parts = [E(f"{sha(text)}.json", text)]
    parts += [E(name, gzip.compress(one) if packed else one) for name, one in zip(names, layers, strict=True)]
    unique = {part.name: part for part in parts}
    return tar([directory("blobs/"), directory("blobs/sha256/"), *unique.values(), as_json("manifest.json", manifest)])


def as_json(name: str, value: object) -> E:
    return E(name, json.dumps(value).encode())


def oci(layers: list[bytes], described: dict[str, Any] | None = None, *, spoil: str = "") -> bytes:
    """An OCI layout with gzip layers. `spoil`: what is not as its digest says: config, manifest, layer0, packing."""
    text = json.dumps(config(layers) if described is None else described).encode()
    packed = [gzip.compress(layer, mtime=0) for layer in layers]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": _descriptor(text, "application/vnd.oci.image.config.v1+json"),
            "layers": [_descriptor(layer, "application/vnd.oci.image.layer.v1.tar+gzip") for layer in packed],
        }
    ).encode()
    blobs = {"config": text, "manifest": manifest, **{f"layer{i}": layer for i, layer in enumerate(packed)}}
    parts = []
    for name, data in blobs.items():
        stored = data
        if name == spoil == "layer0":
            stored = gzip.compress(layers[0] + bytes(512), mtime=0)
        elif name == "layer0" and spoil == "packing":
            stored = gzip.compress(layers[0], mtime=1)
        elif name == spoil:
            stored = data + b" "
        parts.append(E(f"blobs/sha256/{sha(data)}", stored))
    index = {"schemaVersion": 2, "manifests": [_descriptor(manifest, "application/vnd.oci.image.manifest.v1+json")]}
    return tar([as_json("oci-layout", {"imageLayoutVersion": "1.0.0"}), as_json("index.json", index), *parts])


def _descriptor(data: bytes, media: str) -> dict[str, object]:
    return {"mediaType": media, "digest": f"sha256:{sha(data)}", "size": len(data)}
