"""An OCI bundle for one sandbox: config.json, a root folder, and what is mounted before runsc starts.

As root, runsc starts in a mount namespace of its own, which ends with runsc. There the image and guestd are bound below
the root folder, so that the gofer serves one tree instead of twenty. Where files must be counted, a guest writes to a
tmpfs of the host's kernel: gVisor's own tmpfs counts bytes alone. The host's is slower and reports no removed folder to
a watch, and is therefore not used elsewhere.
"""

from __future__ import annotations

import json
import os

from ringfence.backends.engine import guestd_bundle
from ringfence.backends.engine.rootfs import BoxBind, write
from ringfence.plan.controls import ALL_ON
from ringfence.shared.paths import is_below
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ringfence.backends.engine.rootfs import Skeleton
    from ringfence.plan.controls import Controls
    from ringfence.policy.model import Limits

_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
# For guestd's first moments: it has processes counted, gives loopback an address, and drops them all before a guest.
_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE", "CAP_SETPCAP")
_NETWORK = ("CAP_NET_ADMIN",)
_ESCAPED = {ord(sign): f"\\{ord(sign):03o}" for sign in "\\ \t\n#"}


@final
class MadeBundle(Struct):
    """A bundle that was made, and how to start it."""

    mounted: bool  # it has an fstab, to be mounted first
    network: str  # in runsc's words: "none", unless config.json names another
    binds: tuple[BoxBind, ...]  # of host files, with the covers of hidden names


def make(
    path: str,
    made: Skeleton,
    limits: Limits,
    *,
    guestd: str,
    python: str | None = None,
    env: Mapping[str, str],
    network: bool = False,
    mounted: bool = False,
    shares: bool = False,
    exact: bool = False,
    controls: Controls = ALL_ON,
) -> MadeBundle:
    """Write the bundle to the folder `path` and return how to start it.

    `guestd`: the folder of guestd's own interpreter; `python`: as `guestd_bundle.command` takes it.
    `mounted`: we may mount; the bundle gets an `fstab` to be mounted first.
    `shares`: other processes may change host files that are shown inside, and the guest must see each change.
    `exact`: files are counted, which needs `mounted`.
    """
    os.makedirs(path, 0o755)
    write(made, f"{path}/root")
    os.mkdir(f"{path}/empty", 0o555)
    with open(f"{path}/nothing", "wb"):
        pass
    config = _config(path, made, limits, guestd=guestd, env=env, exact=exact)
    config["process"]["args"] = guestd_bundle.command(python)
    capabilities = [*_CAPABILITIES, *(_NETWORK if network else ())]
    config["process"]["capabilities"] = dict.fromkeys(("bounding", "permitted", "effective"), capabilities)
    config = controls.bundle(config)
    shown = [mount for mount in config["mounts"] if mount["type"] == "bind"]
    inodes = {(bind.source, bind.target): bind.inode for bind in made.binds}
    binds = tuple(
        BoxBind(where, target, "rw" in mount["options"], inodes.get((where, target)))
        for mount in shown
        for where, target in [(mount["source"], mount["destination"])]
    )
    if mounted:
        config["mounts"], lines = _mounted_first(path, config["mounts"], binds=not shares)
        with open(f"{path}/fstab", "w", encoding="utf-8") as file:
            file.writelines(lines)
    assert mounted or not exact
    with open(f"{path}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    return MadeBundle(mounted, network=str(config.get("network", "none")), binds=binds)


def _mounted_first(path: str, mounts: list[dict[str, Any]], *, binds: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the mounts that runsc makes, and the fstab lines for the mounts that are made before it starts."""
    left: list[dict[str, Any]] = []
    lines: list[str] = []
    for mount in mounts:
        target, options = mount["destination"], mount.get("options", [])
        if mount["type"] == "tmpfs" and any(option.startswith("nr_inodes=") for option in options):
            place = f"{path}/memory{len(lines)}"
            os.mkdir(place)
            lines.append(_line("tmpfs", place, "tmpfs", options))
            left.append(_bind(place, target, writable=True))
        elif (
            binds
            and mount["type"] == "bind"
            and "ro" in options
            and not any(is_below(target, other["destination"]) for other in left)
        ):
            lines.append(_line(mount["source"], f"{path}/root{target}", "none", options))
        else:
            left.append(mount)
    return left, lines


def _line(source: str, target: str, kind: str, options: list[str]) -> str:
    words = (source, target, kind, ",".join(options))
    return " ".join(word.translate(_ESCAPED) for word in words) + " 0 0\n"


def _config(
    path: str, made: Skeleton, limits: Limits, *, guestd: str, env: Mapping[str, str], exact: bool
) -> dict[str, Any]:
    files = limits.disk_files if exact else None
    binds = [_bind(bind.source, bind.target, writable=bind.writable) for bind in made.binds]
    hidden = [_bind(f"{path}/{_cover(made, target)}", target, writable=False) for target in made.hidden]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 1000, "gid": 1000},
            "env": [f"{name}={value}" for name, value in env.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}],
        },
        "root": {"path": "root", "readonly": True},
        "hostname": "ringfence",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys", "type": "tmpfs", "source": "tmpfs", "options": ["ro", "mode=0555"]},  # B04
            _memory("/tmp", limits.disk, "1777", files),
            _memory("/workspace", limits.disk, "0777", files),
            _memory("/dev/shm", min(64 << 20, limits.memory // 2), "1777", files),
            *binds,
            *hidden,
            _bind(guestd, guestd_bundle.INSIDE, writable=False),
        ],
        "linux": {"namespaces": [{"type": name} for name in _NAMESPACES]},
    }


def _memory(target: str, size: int, mode: str, files: int | None) -> dict[str, object]:
    """Return the mount of a tmpfs. `files`: the most it can hold; the file system takes another inode."""
    options = ["nosuid", "nodev", f"mode={mode}", f"size={size}", "uid=1000", "gid=1000"]
    if files is not None:
        options.append(f"nr_inodes={files + 1}")
    return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": options}


def _bind(source: str, target: str, *, writable: bool) -> dict[str, object]:
    options = ["rbind", "nosuid", "nodev", "rw" if writable else "ro"]
    return {"destination": target, "type": "bind", "source": source, "options": options}


def _cover(made: Skeleton, target: str) -> str:
    """Return the name of what covers `target`: the empty folder, or the empty file where the host has a file."""
    for bind in reversed(made.binds):
        if is_below(target, bind.target):
            return "empty" if os.path.isdir(bind.source + target[len(bind.target) :]) else "nothing"
    return "empty"
