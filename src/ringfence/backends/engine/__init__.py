"""What backends share in which another program isolates: Docker, Podman, runsc. Public, for your own backend.

`ringfence.backends.contract` says what a backend is, and docs/how-to/add-a-backend.md builds one with these names:

    linux_facts     facts about this host, which `engine_plan` needs
    engine_plan     the plan that shows the image, and refuses what no engine can show
    skeleton        that plan as folders, files, links and binds; `write_skeleton` makes the folder for it
    box_folder      a folder for one sandbox, which a later start removes if this process is killed
    guestd_folder   guestd's program as a folder, to be shown read-only at INSIDE; `guestd_command` starts it
    start_box       begins guestd behind a channel, and returns the `Box` that `launch` returns
    Wall            what `start_box` asks of your isolation: kill, remove, measure

guestd is the first process inside, PID 1 of a pid namespace. It speaks over its standard input and output, starts guest
code with the rights that the plan leaves it, and ends with everything inside when its channel ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time

from ringfence.backends.engine import guestd_bundle
from ringfence.backends.engine.backend import engine_plan, guarded, own_kernel_fence, shared_kernel_fence
from ringfence.backends.engine.box import EngineBox, Wall
from ringfence.backends.engine.guestd_bundle import INSIDE
from ringfence.backends.engine.mount_identity import Meaning
from ringfence.backends.engine.rootfs import BoxBind, Skeleton, skeleton
from ringfence.backends.engine.rootfs import write as write_skeleton
from ringfence.backends.linux import linux_facts
from ringfence.errors import PolicyError
from ringfence.host import process_id, state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from socket import socket

    from ringfence.plan.model import LinuxPlan

__all__ = [
    "INSIDE",
    "BoxBind",
    "Skeleton",
    "Wall",
    "box_folder",
    "engine_plan",
    "guestd_command",
    "guestd_folder",
    "linux_facts",
    "skeleton",
    "start_box",
    "write_skeleton",
]

_END_S = 10.0


def guestd_folder() -> str:
    """Return the folder on this host that holds guestd with its own interpreter. Made once for each version, 60 MB.

    Show it inside at INSIDE, read-only. It needs nothing of the image: no Python, no shell, no libc.
    """
    return guestd_bundle.folder(state.disk_directory("runtime"))


def guestd_command() -> list[str]:
    """Return the command that starts guestd inside. Its standard input and output are the channel."""
    return guestd_bundle.command()


def box_folder(backend: str) -> str:
    """Return a new path for the files of one sandbox, in a folder that this user alone may enter. It is not made yet.

    Removes the folders of processes that were killed: their sandboxes ended with guestd's channel.
    """
    if not backend.isascii() or not backend.replace("-", "").replace("_", "").isalnum():
        fix = "name the backend with letters, digits, - and _"
        raise PolicyError(f"{backend!r} cannot be a part of a path", key="backend", fix=fix)
    root = state.disk_directory(f"backend-{backend}")
    for name in os.listdir(root):
        if process_id.is_dead(name.partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
    return f"{root}/{process_id.name()}_{os.urandom(4).hex()}"


def start_box(
    backend: str,
    plan: LinuxPlan,
    start: Callable[[], tuple[Wall, socket]],
    *,
    binds: Sequence[BoxBind] = (),
    own_kernel: bool = False,
    within_s: float = 30.0,
) -> EngineBox:
    """Start a sandbox that has run nothing, and return it when guestd inside is ready.

    `start` makes the isolation and returns it with our end of guestd's channel; when it raises, nothing is left of it.
    `binds` are the host's files that it shows: before there is a guest, guestd compares them with the plan.
    `own_kernel`: guests have another kernel than the host, and give up there what such a kernel knows.
    No cgroup is assumed: the memory limit is for each process.
    Raises StartTimeoutError, or SandboxLostError with the last line that the isolation said.
    """
    deadline = time.monotonic() + within_s
    fence = own_kernel_fence(plan) if own_kernel else shared_kernel_fence(plan, memory=plan.policy.limits.memory)

    def begin() -> EngineBox:
        with contextlib.closing(Meaning(binds, flags=not own_kernel)) as meaning:
            wall, channel = start()
            box = EngineBox(backend, wall, channel, enforcement=plan.enforcement, env=plan.env)
            try:
                box.begin(fence, deadline, outlets=plan.outlets, meant=meaning.meant)
            except BaseException:
                box.close()
                box.wait_destroyed(_END_S)
                raise
            return box

    return guarded(plan, begin, starts_python_anew=True)
