"""An OCI bundle for one sandbox: config.json and a root folder, below our state directory."""

from __future__ import annotations

import json
import os

from ringfence.backends.walled import runtime
from ringfence.backends.walled.skeleton import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ringfence.backends.walled.skeleton import Skeleton
    from ringfence.policy.model import Limits

_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


# For guestd's first moments: an address for loopback; and to give both up before there is a guest.
_NETWORK_CAPABILITIES = ("CAP_NET_ADMIN", "CAP_SETPCAP")


def make(
    path: str,
    made: Skeleton,
    limits: Limits,
    *,
    guestd: str,
    env: Mapping[str, str],
    network: bool = False,
    loosen: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """`loosen` is for our own attacks, which leave out one control: it changes the configuration."""
    os.makedirs(path, 0o755)
    write(made, f"{path}/root")
    os.mkdir(f"{path}/empty", 0o555)
    with open(f"{path}/nothing", "wb"):
        pass
    config = _config(path, made, limits, guestd=guestd, env=env)
    if network:
        process = config["process"]
        assert isinstance(process, dict)
        process["capabilities"] = dict.fromkeys(("bounding", "permitted", "effective"), _NETWORK_CAPABILITIES)
    if loosen is not None:
        loosen(config)
    with open(f"{path}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)


def _config(path: str, made: Skeleton, limits: Limits, *, guestd: str, env: Mapping[str, str]) -> dict[str, object]:
    binds = [_bind(bind.source, bind.target, writable=bind.writable) for bind in made.binds]
    hidden = [_bind(f"{path}/{_cover(made, target)}", target, writable=False) for target in made.hidden]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 1000, "gid": 1000},
            "args": runtime.command(),
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
            _memory("/tmp", limits.disk, "1777"),
            _memory("/workspace", limits.disk, "0777"),
            _memory("/dev/shm", min(64 << 20, limits.memory // 2), "1777"),
            *binds,
            *hidden,
            _bind(guestd, runtime.INSIDE, writable=False),
        ],
        "linux": {"namespaces": [{"type": name} for name in _NAMESPACES]},
    }


def _memory(target: str, size: int, mode: str) -> dict[str, object]:
    options = ["nosuid", "nodev", f"mode={mode}", f"size={size}", "uid=1000", "gid=1000"]
    return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": options}


def _bind(source: str, target: str, *, writable: bool) -> dict[str, object]:
    options = ["rbind", "nosuid", "nodev", "rw" if writable else "ro"]
    return {"destination": target, "type": "bind", "source": source, "options": options}


def _cover(made: Skeleton, target: str) -> str:
    """What hides it: a folder, or a file where it is one on the host."""
    for bind in reversed(made.binds):
        if target.startswith(f"{bind.target}/"):
            return "empty" if os.path.isdir(bind.source + target[len(bind.target) :]) else "nothing"
    return "empty"
