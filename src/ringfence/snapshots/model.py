"""A sandbox's files at one moment, as its caller holds them. The tree and its content are of `ringfence.files`."""

from __future__ import annotations

import os

from ringfence.errors import SnapshotError
from ringfence.values import Struct, final, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime
    from typing import Self

    from ringfence.backends.contract import Outlet, SessionMemory
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy
    from ringfence.records import Change
    from ringfence.snapshots.content import Holder, Store
    from ringfence.snapshots.diff import Tree
    from ringfence.snapshots.manifest import Manifest
    from ringfence.values import HostPath, MountMode


@final
class Snapshot(Struct):
    """A sandbox's files at one moment and, with `memory`, its sessions. Bound to backend, image and policy.

    Lives as long as its manager or process; `export()` keeps it.
    """

    id: str
    created_at: datetime
    memory: bool
    size_bytes: int
    digest: str
    policy_digest: str
    _bound: str = ""
    _manifest: Manifest | None = None
    _holder: Holder | None = None
    _sessions: tuple[SessionImage, ...] = ()

    def diff(self, other: Snapshot) -> tuple[Change, ...]:
        """What changed from this one to `other`. A time alone is no change; text has a unified diff, up to a cap."""
        from ringfence.snapshots.diff import changes

        if not isinstance(other, Snapshot):
            raise TypeError(f"other is a Snapshot, not {type(other).__name__}")
        return changes(self._tree(), other._tree())

    def export(self, path: HostPath) -> None:
        """One file with all of it. What is at `path` is replaced as a whole or not at all."""
        from ringfence.snapshots.file import export

        if self.memory:
            raise SnapshotError(
                f"snapshot {self.id} holds memory, which belongs to this process and cannot leave it",
                code="snapshot-memory",
                fix="box.snapshot() keeps the files alone, and can be exported",
            )
        manifest, store = self._tree()
        header: dict[str, object] = {
            "id": self.id,
            "created_us": round(self.created_at.timestamp() * 1_000_000),
            "policy_digest": self.policy_digest,
            "bound": self._bound,
            "digest": self.digest,
        }
        export(os.fspath(path), header, manifest, store)

    def delete(self) -> None:
        """Content that nothing else needs is removed from the host. Idempotent."""
        if self._holder is not None:
            self._holder.close()
            put(self, "_manifest", None)
        for session in self._sessions:
            session.memory.close()

    @classmethod
    def load(cls, path: HostPath) -> Self:
        """Raises SnapshotError when a byte differs from the digest."""
        from ringfence.snapshots.content import own_store
        from ringfence.snapshots.file import load

        header, manifest, holder = load(os.fspath(path), own_store())
        stamp = header["created_us"]
        assert isinstance(stamp, int)
        return _made(
            cls, str(header["id"]), stamp, str(header["bound"]), str(header["policy_digest"]), manifest, holder
        )

    def _tree(self) -> Tree:
        from ringfence.snapshots.diff import Tree

        if self._manifest is None or self._holder is None:
            raise SnapshotError(
                f"snapshot {self.id} was deleted, or belongs to another process",
                code="snapshot-gone",
                fix="take a new one; export() keeps one beyond its process",
            )
        return Tree(self._manifest, self._holder.store)


def make(manifest: Manifest, holder: Holder, bound: str, policy: Policy) -> Snapshot:
    """A snapshot of the tree, which owns `holder` from now on."""
    import time

    stamp = time.time_ns() // 1000
    return _made(Snapshot, f"n-{os.urandom(8).hex()}", stamp, bound, policy.digest, manifest, holder)


def with_memory(snapshot: Snapshot, sessions: tuple[SessionImage, ...]) -> Snapshot:
    """The same one, which owns `sessions` from now on."""
    put(snapshot, "memory", True)
    put(snapshot, "size_bytes", snapshot.size_bytes + sum(session.memory.size_bytes for session in sessions))
    put(snapshot, "_sessions", sessions)
    return snapshot


def sessions_of(snapshot: Snapshot) -> tuple[SessionImage, ...]:
    return snapshot._sessions  # noqa: SLF001  # of this module's own class


def outlet_of(snapshot: Snapshot) -> Outlet | None:
    """Of the sandbox whose memory it holds."""
    return next((session.outlet for session in sessions_of(snapshot)), None)


@final
class SessionImage(Struct):
    """One session at one moment."""

    name: str
    count: int  # cells so far: the next one has the next number
    memory: SessionMemory
    outlet: Outlet | None  # whose placeholders and trusted roots are in that memory


def _made(
    cls: type[Snapshot], number: str, stamp: int, bound: str, policy: str, manifest: Manifest, holder: Holder
) -> Snapshot:
    from datetime import UTC, datetime, timedelta

    made = cls(
        id=number,
        created_at=datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=stamp),
        memory=False,
        size_bytes=manifest.size_bytes,
        digest=manifest.digest(bound),
        policy_digest=policy,
    )
    put(made, "_bound", bound)
    put(made, "_manifest", manifest)
    put(made, "_holder", holder)
    return made


def bound_to(backend: str, image: Image, policy: Policy) -> str:
    """What a snapshot belongs to, as one line."""
    from ringfence.shared import fast_stdlib

    parts = (image.name, list(image.pip), list(image.apt), list(image.npm), sorted(image.env.items()))
    return fast_stdlib.dumps({"backend": backend, "image": parts, "policy": policy.digest}).decode()


def shares_workspace(policy: Policy) -> bool:
    """Whether /workspace itself is the host's: it is no sandbox's to keep, to set back, or to copy."""
    return _workspace_mode(policy) in ("ro", "rw")


def copies_workspace(policy: Policy) -> bool:
    """Whether /workspace starts as a copy of a folder, and so is not empty in a new sandbox."""
    return _workspace_mode(policy) == "copy"


def _workspace_mode(policy: Policy) -> MountMode | None:
    """Of the mount at /workspace, None without one."""
    for mount in policy.mounts:
        target = os.path.normpath(os.fspath(mount.source if mount.target is None else mount.target))
        if target.lstrip("/") == "workspace":
            return mount.mode
    return None


def check_workspace(policy: Policy) -> None:
    """Raises SnapshotError where a rollback would change files of the host."""
    if shares_workspace(policy):
        raise SnapshotError(
            "/workspace is a mount of the host's files, which a snapshot leaves out",
            code="snapshot-mounted",
            fix='mount them with mode "copy", or below /workspace',
        )


def check(snapshot: Snapshot, bound: str, policy: Policy) -> tuple[Manifest, Store]:
    """Its tree and store, when it may be used under `policy`. Raises SnapshotError otherwise (K06)."""
    from ringfence.snapshots.manifest import caps_of

    manifest, store = snapshot._tree()  # noqa: SLF001  # of this module's own class
    if snapshot._bound != bound or snapshot.policy_digest != policy.digest:  # noqa: SLF001  # as above
        what = "policy" if snapshot.policy_digest != policy.digest else "backend or image"
        raise SnapshotError(
            f"snapshot {snapshot.id} was taken under another {what}",
            code="snapshot-bound",
            fix=f"use the {what} that it was taken under",
        )
    manifest.check_caps(caps_of(policy.limits))
    return manifest, store
