"""M10: images with a hostile configuration. Ringfence uses the files of an image, and nothing of its configuration."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from contextlib import closing

from ringfence import Limits, Mount, Policy
from ringfence_attacks.case import ESCAPE, HOST_CODE, Seen, attack, cases
from ringfence_attacks.engine_arena import wall_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.images.store import Used
    from ringfence_attacks.arena import Arm

_FOLDERS = ("bin", "etc", "lib", "lib64", "out", "tmp", "workspace")
# Set, because Podman's own defaults may be above what it is permitted to set.
_ULIMITS = [{"Name": name, "Soft": 512, "Hard": 512} for name in ("nofile", "nproc")]
_LIMITS = Limits(timeout_s=20, memory="96M", processes=24, disk="1M", disk_files=200)


@attack(
    "M10",
    "an image's entry point and working directory are not used",
    ESCAPE,
    off=HOST_CODE,
    label="our own entry point",
)
def hostile_configuration(arm: Arm) -> Seen:
    """Off: the engine runs the image as the image's configuration says. Witness: a host file, in a mount, that only the
    image's entry point makes; and guestd's working directory."""
    out = os.path.join(arm.directory, "out")
    os.mkdir(out)
    os.chmod(out, 0o777)
    place = "/" if arm.off else "/proc/self/fd/8"  # CVE-2024-21626; an engine with the fix refuses to start the image
    data = _archive(f"echo {arm.canary} > /out/taken", place, arm.canary)
    said = _run_by_engine(data, out, arm.canary) if arm.off else _run_by_ringfence(arm, data, out)
    return Seen(os.path.exists(f"{out}/taken") or "/proc" in said, said)


def _run_by_ringfence(arm: Arm, data: bytes, out: str) -> str:
    policy = Policy(limits=_LIMITS, mounts=[Mount(out, target="/out", mode="rw")])
    box = arm.sandbox(policy, used=_imported(arm, data))
    result = box.exec(["/bin/sh", "-c", "pwd"])
    return f"guestd is in {os.readlink(f'/proc/{wall_of(box).pid}/cwd')}, the guest in {result.stdout.strip()}"


def _imported(arm: Arm, data: bytes) -> Used:
    from ringfence.images.importer import import_source
    from ringfence.images.store import ImageStore, Used
    from ringfence.plan.rootfs.image_view import Root

    path = f"{arm.directory}/archive.tar"
    with open(path, "wb") as file:
        file.write(data)
    store = ImageStore(f"{arm.directory}/store/images")
    import_source(store, "one", path, None)
    info = store.find("one")
    held = arm.enter(closing(store.hold(info.digest)))
    return Used(info, Root(info.name, held.root, info.python))


def _run_by_engine(data: bytes, out: str, canary: str) -> str:
    from ringfence.backends.container import api as engine

    api = engine.find().api
    api.load_image(data)
    name = f"ringfence-attack:{canary}"
    binds = {out: {"bind": "/out", "mode": "rw"}}
    config = api.create_host_config(
        network_mode="none", read_only=True, cap_drop=["ALL"], binds=binds, ulimits=_ULIMITS
    )
    made = api.create_container(name, host_config=config, network_disabled=True)["Id"]
    try:
        api.start(made)
        return f"it ended with {api.wait(made, timeout=20)['StatusCode']}"
    finally:
        api.remove_container(made, force=True, v=True)
        api.remove_image(name, force=True)


def _archive(script: str, place: str, canary: str) -> bytes:
    """Return an archive in the form that `docker save` writes."""
    layer = _layer()
    settings = {"Entrypoint": ["/bin/sh", "-c", script], "Cmd": ["x"], "WorkingDir": place, "User": "0:0"}
    diff = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    config = json.dumps(
        {
            "architecture": machine,
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [diff]},
            "history": [{}],
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    row = {"Config": name, "RepoTags": [f"ringfence-attack:{canary}"], "Layers": [f"{diff[7:]}/layer.tar"]}
    parts = {"manifest.json": json.dumps([row]).encode(), name: config, f"{diff[7:]}/layer.tar": layer}
    return _tar({path: (data, 0o644) for path, data in parts.items()})


def _layer() -> bytes:
    """Return a tar of a root file system with the host's shell and the libraries that the shell needs."""
    from ringfence.plan.rootfs import commands

    shell = os.path.realpath("/bin/sh")
    needed = commands.needs(shell)
    cache = commands.linker_cache()
    found = [commands.find_library(name, needed.search, cache) for name in needed.libraries]
    files = {"bin/sh": shell, **{str(path)[1:]: str(path) for path in (needed.interpreter, *found) if path}}
    return _tar({name: (_content(path), 0o755) for name, path in files.items()}, folders=_FOLDERS)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _tar(files: dict[str, tuple[bytes, int]], folders: tuple[str, ...] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


CASES = cases(globals())
