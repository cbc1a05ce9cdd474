"""Turns a plan with its workspace in memory into one with its workspace on disk. Pure."""

from __future__ import annotations

from ringfence.results import Control
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.model import Limits

_PAGE = 4096
_SOURCE = ".sources/workspace"
_NOTE = "each file is held to limits.disk by RLIMIT_FSIZE, their sum and their number by nothing"


def on_disk(plan: ProcessPlan, limits: Limits) -> ProcessPlan:
    """As root an image of exactly that size; for others a folder, which has no quota and says so.

    `limits.memory` is then not shared with the workspace, whose pages are the host's cache.
    """
    size = -(-limits.disk // _PAGE) * _PAGE
    if plan.box["as_root"]:
        held = Control("ext4 in an image file: its blocks and inodes", "full")
        less = plan.memory_bytes - size
        return replace(
            plan, disk=(size, limits.disk_files), memory_bytes=less, enforcement=replace(plan.enforcement, disk=held)
        )
    fence = dict(plan.fence)
    fence["rlimits"] = {**plan.fence["rlimits"], "FSIZE": size}  # type: ignore[dict-item]  # a dict: see plan.process
    in_memory = any(op[0] == "overlay" for op in plan.box_ops)  # what copies of mounts change stays there
    held = Control("a folder on the host's disk + RLIMIT_FSIZE", "weaker", _NOTE)
    return replace(
        plan,
        disk="folder",
        box={**plan.box, "fence": fence},
        memory_bytes=plan.memory_bytes - (0 if in_memory else size),
        enforcement=replace(plan.enforcement, disk=held),
    )


def with_folder(plan: ProcessPlan, path: str) -> ProcessPlan:
    """The plan of one sandbox: `path` on the host is its workspace. Mounts below /workspace come after it."""
    shown = {"rw": True, "idmap": False, "exec": True}
    template = (*plan.template, ["bind", path, _SOURCE, shown])
    ops = [["bind", f"/{_SOURCE}", "workspace", shown], *plan.box_ops]
    return replace(plan, template=template, box={**plan.box, "ops": ops}, shared=False)
