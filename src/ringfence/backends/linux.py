"""Facts and plans for backends that show a guest files of this Linux host: process, container, gVisor.

Plans of policies that name no host files are kept: the same policy gives the same plan object, and with it the same
template and spares.
"""

from __future__ import annotations

import os

from ringfence.errors import Missing, UnsupportedError, need_linux
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.host.cgroups.base import Tree
    from ringfence.plan.model import FoundImage, HostFacts, LinuxPlan
    from ringfence.plan.rootfs.host_view import View
    from ringfence.plan.rootfs.image_view import Root
    from ringfence.plan.rootfs.interpreter import Interpreter
    from ringfence.policy.model import Policy

_MOST_PLANS = 64


class _Kept:
    """Plans, views and facts that this process has made."""

    def __init__(self) -> None:
        self.plans: dict[object, LinuxPlan] = {}  # by the policy and everything else that decides a plan
        self.last: tuple[tuple[object, ...], LinuxPlan] | None = None  # the plan used last, of the image "host"
        self.views: dict[tuple[int, Root | None], View] = {}  # of policies without host files, by uid and image
        self.interpreter: Interpreter | None = None
        self.facts: tuple[tuple[Tree | None, int], HostFacts] | None = None


_kept = _Kept()


def interpreter() -> Interpreter:
    """Return the description of the Python that runs this process. Made once."""
    if _kept.interpreter is None:
        from ringfence.plan.rootfs.interpreter import interpreter as found

        _kept.interpreter = found()
    return _kept.interpreter


def facts_with(tree: Tree | None) -> HostFacts:
    """Return the facts of this host with these cgroups."""
    key = (tree, os.geteuid())
    kept = _kept.facts
    if kept is None or kept[0] != key:
        kept = _kept.facts = (key, _read_facts(tree))
    return kept[1]


def linux_facts() -> HostFacts:
    """Return the facts of this host with the cgroups that this process could use now. Changes nothing."""
    from ringfence.host import cgroups

    return _read_facts(cgroups.find_or_delegable())


def _read_facts(tree: Tree | None) -> HostFacts:
    """Return the facts of this Linux host. `tree`: the cgroups that limits would be set in; None without cgroups.

    Raises UnsupportedError on another system.
    """
    need_linux()
    from ringfence.plan.model import HostFacts
    from ringfence.shared import syscalls

    uname = os.uname()
    as_root, landlock_abi = os.geteuid() == 0, syscalls.landlock_abi()
    if tree is None:
        return HostFacts(as_root, uname.machine, uname.release, landlock_abi)
    by = tree.mechanisms
    return HostFacts(
        as_root,
        uname.machine,
        uname.release,
        landlock_abi,
        memory_by=by.memory,
        cpu_by=by.cpu,
        cpu_time_by=by.cpu_time,
        pids_by=by.processes,
        has_freezer=tree.has_freezer,
    )


def linux_plan(policy: Policy, image: FoundImage, facts: HostFacts, *, fresh: bool = False) -> LinuxPlan:
    """Return what the process backend would do to keep a policy. Other backends adapt the plan to their mechanisms.

    Reads metadata of the host's files and changes nothing. `fresh`: Python code gets an interpreter of its own.
    Raises PolicyError for a mount or command that cannot be shown, UnsupportedError for another kind of machine.
    """
    key = (policy, image, fresh, os.geteuid(), facts)
    last = _kept.last  # read once: another thread may replace it at any moment by another policy's plan
    if last is not None and _is_same(last[0], key):
        return last[1]
    found = _kept.plans.get(key)
    if found is None:
        from ringfence.plan.build import plan_linux

        found = _with_import_path(plan_linux(policy, image, facts, _view(policy, image.root), fresh=fresh))
        if found.shared:
            for oldest in list(_kept.plans)[: 1 - _MOST_PLANS]:  # a copy: other threads add and remove plans
                _kept.plans.pop(oldest, None)
            found = _kept.plans.setdefault(key, found)  # another thread's plan wins: one shelf of spares
    if found.shared and image.root is None:
        _kept.last = (key, found)
    return found


def _with_import_path(plan: LinuxPlan) -> LinuxPlan:
    """Return the plan with a line for each folder of this process's `sys.path` that the guest can write to (L12)."""
    if not plan.writable:
        return plan
    from ringfence.host.import_path import IMPORTABLE, importable

    folders = importable(plan.writable, [each.path for each in plan.protected if not each.missing])
    return replace(plan, shown=(*plan.shown, *(f"{folder}: {IMPORTABLE}" for folder in folders)))


def _is_same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Return whether two keys have the very same policy and image objects. Avoids hashing the objects."""
    return one[0] is other[0] and one[1] is other[1] and one[2:] == other[2:]


def check_pause(policy: Policy, facts: HostFacts) -> None:
    """Raise UnsupportedError where the policy pauses idle sandboxes and no cgroup of this host can."""
    if policy.limits.on_idle == "pause" and not facts.has_freezer:
        raise UnsupportedError(
            'on_idle = "pause" needs a cgroup with a freezer, and there is none here',
            code="pause",
            missing=[Missing("process", "a cgroup with a freezer", 'on_idle = "close"')],
        )


def plans_of_image(digest: str) -> list[LinuxPlan]:
    """Return the kept plans whose root is the stored image of that digest."""
    return [plan for plan in list(_kept.plans.values()) if _is_of(plan.image.root, digest)]


def forget_image(digest: str) -> None:
    """Drop the kept plans and views of a stored image."""
    _kept.plans = {key: plan for key, plan in list(_kept.plans.items()) if not _is_of(plan.image.root, digest)}
    _kept.views = {key: view for key, view in list(_kept.views.items()) if not _is_of(key[1], digest)}


def _is_of(root: Root | None, digest: str) -> bool:
    return root is not None and f"/{digest}/" in root.tree


def _view(policy: Policy, root: Root | None) -> View:
    """Return the view of a guest. Policies that name no host files share one view."""
    if policy.mounts or policy.commands != "any":
        return _new_view(policy, root)
    key = (os.geteuid(), root)
    seen = _kept.views.get(key)
    return seen if seen is not None else _kept.views.setdefault(key, _new_view(policy, root))


def _new_view(policy: Policy, root: Root | None) -> View:
    from ringfence.plan.build import through_sources
    from ringfence.plan.rootfs.interpreter import home_directory

    state, stored = _own_directories(policy)
    python, uid, home = interpreter(), os.geteuid(), home_directory()
    if root is None:
        from ringfence.plan.rootfs.host_view import view

        return through_sources(view(policy, python, uid=uid, home=home, state=state, stored=stored))
    from ringfence.plan.rootfs.image_view import image_view

    return through_sources(image_view(policy, root, python, uid=uid, home=home, state=state, stored=stored))


def _own_directories(policy: Policy) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return our own directories in two groups: never shown, and never shown except by a folder around them.

    Each directory is given by its name and by its real path.
    """
    if not policy.mounts:
        return (), ()
    from ringfence.host.state import disk_root, state_dir
    from ringfence.images.store import PROTECTED, default_directory

    stored = disk_root()  # guestd for containers, snapshots with names (L19)
    workspaces = f"{stored}/workspaces"  # a guest that could write there would write into other sandboxes
    ours = [state_dir(), *([workspaces] if os.path.isdir(workspaces) else [])]
    images = default_directory()  # a guest that could write there would choose what later sandboxes run (L04)
    if os.path.isdir(images):
        ours += [f"{images}/{name}" for name in PROTECTED]
    return _both(*ours), _both(stored)


def _both(*paths: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*paths, *map(os.path.realpath, paths))))
