"""K and J19: hostile images: archives that write outside the root, a changed layer, modules planted for an import."""

from __future__ import annotations

import io
import json
import os
import tarfile

from ringfence.errors import ImageError
from ringfence.images.store import ImageInfo, ImageStore
from ringfence.values import replace
from ringfence_attacks.case import HOST_CODE, SPOOF, WRITE, Seen, attack, cases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import LinuxPlan
    from ringfence_attacks.arena import Arm


def _tar(*entries: tuple[str, str, str]) -> bytes:
    """Return a tar of entries (kind, name, text); the text is a file's content, or the target of a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for kind, name, text in entries:
            entry = tarfile.TarInfo(name)
            entry.type = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}[kind]
            entry.mode = 0o755
            if kind == "link":
                entry.linkname = text
            data = text.encode() if kind == "file" else b""
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


_ROOT = (("dir", "bin", ""), ("file", "bin/tool", "x"), ("dir", "etc", ""))


def _import(arm: Arm, data: bytes) -> str:
    """Import the archive into a store of this arm. Returns "imported", or the text of the error."""
    from ringfence.images.importer import import_source

    path = f"{arm.directory}/archive.tar"
    with open(path, "wb") as file:
        file.write(data)
    try:
        import_source(ImageStore(f"{arm.directory}/store/images"), "one", path, None)
    except ImageError as error:
        return str(error)
    return "imported"


def _careless(arm: Arm, data: bytes) -> str:
    """Extract the archive as a careless program would, and return the folder."""
    root = f"{arm.directory}/root"
    os.mkdir(root)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):  # the default of every Python before 3.14
            archive.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
        archive.extractall(root)  # noqa: S202  # the careless thing, in a folder of this arm
    return root


@attack("K01-image", "an image's archive that goes through its own link does not write outside", WRITE, off=HOST_CODE)
def through_a_link(arm: Arm) -> Seen:
    """Off: an extraction that trusts the archive."""
    victim = arm.host_file(text="as it was")
    folder, name = os.path.split(victim)
    data = _tar(*_ROOT, ("link", "out", folder), ("file", f"out/{name}", arm.canary))
    said = _careless(arm, data) if arm.off else _import(arm, data)
    with open(victim, encoding="utf-8") as file:
        text = file.read()
    return Seen(text != "as it was", f"the host's file reads {text!r}; {said}")


@attack("K01-passwd", "no host file is written through an image's /etc/passwd that is a link", WRITE, off=HOST_CODE)
def passwd_is_a_link(arm: Arm) -> Seen:
    """M10. Off: the user is added by opening etc/passwd below the image's root, through the link."""
    victim = arm.host_file(text="as it was")
    data = _tar(*_ROOT, ("link", "etc/passwd", victim))
    if arm.off:
        with open(f"{_careless(arm, data)}/etc/passwd", "a", encoding="utf-8") as file:
            file.write("user:x:1000:1000::/:/bin/sh\n")
        said = "appended"
    else:
        said = _import(arm, data)
    with open(victim, encoding="utf-8") as file:
        text = file.read()
    return Seen(text != "as it was", f"the host's file reads {text!r}; {said}")


@attack("K07-image", "a layer that was changed after its digest was written is refused", SPOOF, off=HOST_CODE)
def changed_layer(arm: Arm) -> Seen:
    """Off: layers are unpacked and their digests are not checked."""
    import hashlib

    good, bad = _tar(*_ROOT), _tar(*_ROOT, ("file", "bin/evil", arm.canary))
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    diff = f"sha256:{hashlib.sha256(good).hexdigest()}"
    config = json.dumps({"architecture": machine, "os": "linux", "rootfs": {"diff_ids": [diff]}})
    name = f"blobs/sha256/{hashlib.sha256(config.encode()).hexdigest()}"
    layer = f"blobs/sha256/{hashlib.sha256(good).hexdigest()}"
    manifest = json.dumps([{"Config": name, "Layers": [layer]}])
    if arm.off:
        root = _careless(arm, bad)
        return Seen(os.path.exists(f"{root}/bin/evil"), "unpacked")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for part, data in ((name, config.encode()), (layer, bad), ("manifest.json", manifest.encode())):
            entry = tarfile.TarInfo(part)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    said = _import(arm, out.getvalue())
    kept = [files for _, _, files in os.walk(f"{arm.directory}/store") if "evil" in files]
    return Seen(said == "imported" or bool(kept), said)


def _ours_may_import(plan: LinuxPlan, arm: Arm) -> LinuxPlan:
    """Return the plan as for the host's own image, whose modules Ringfence's processes inside may import."""
    del arm
    return replace(plan, foreign=False, python=None)


_POISON = """
import os
os.close(os.open("/workspace/{canary}", os.O_WRONLY | os.O_CREAT, 0o644))
def fnmatchcase(name, pattern): return True
def fnmatch(name, pattern): return True
"""


@attack("J19", "modules planted in a foreign image are not run by Ringfence's processes", SPOOF, off=_ours_may_import)
def poisoned_modules(arm: Arm) -> Seen:
    """No guest code runs at all. The witness: a file that only the image's module makes."""
    from ringfence.images.store import Used
    from ringfence.plan.rootfs.image_view import Root
    from ringfence.plan.rootfs.interpreter import interpreter

    tree = f"{arm.directory}/tree"
    for place in interpreter().stdlib:
        if place.endswith(".zip"):
            continue
        os.makedirs(tree + place, exist_ok=True)
        with open(f"{tree}{place}/fnmatch.py", "w", encoding="utf-8") as file:
            file.write(_POISON.format(canary=arm.canary))
    used = Used(ImageInfo("attack", "0" * 64, 0, 0, 0.0, "tar"), Root("attack", tree, None))
    box = arm.sandbox(used=used)
    try:
        names = [info.path for info in box.files.list(pattern="*")]
    except OSError as error:
        names = [str(error)]
    return Seen(box.files.exists(arm.canary), f"listed {names}")


CASES = cases(globals())
