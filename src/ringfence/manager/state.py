"""The directory in which a manager keeps agents' workspaces.

Only one manager at a time uses it; no guest ever sees it.
"""

from __future__ import annotations

import fcntl
import os
import stat

from ringfence.errors import PolicyError, SandboxError
from ringfence.host import lifecycle
from ringfence.policy.host_paths import LinkError, without_links
from ringfence.shared.paths import is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Policy
    from ringfence.values import HostPath


# ── agents' ids, and the folder that keeps what an agent owns ─────────────────────────────────────

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")
_MOST = 64
_PREFIX = "agent-"


def check_agent(agent: object) -> str:
    """Return the id of an agent. Raise PolicyError for what is no id."""
    if not isinstance(agent, str):
        raise TypeError(f"an agent's id is a str, not {type(agent).__name__}")
    if not 0 < len(agent) <= _MOST or not _LETTERS.issuperset(agent):
        shown = repr(agent if len(agent) <= _MOST else agent[:_MOST] + "…")
        fix = f"1 to {_MOST} of a-z, 0-9, `.`, `_` and `-`"
        raise PolicyError(f"{shown} is no agent's id", key="agent", code="agent-id", fix=fix)
    return agent


def folder_of(agent: str) -> str:
    """Return the name of an agent's directory. The prefix makes `.` and `..` harmless, which are valid ids."""
    return _PREFIX + check_agent(agent)


def agent_of(folder: str) -> str | None:
    """Return the agent that a folder belongs to, or None for a folder that no manager made."""
    agent = folder.removeprefix(_PREFIX)
    if agent == folder or not 0 < len(agent) <= _MOST or not _LETTERS.issuperset(agent):
        return None
    return agent


_WORKSPACE = "workspace.snapshot"
_PLACE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StateDirectory:
    """A manager's state directory, made when missing, for this user alone.

    Raises PolicyError when the path cannot be one.
    """

    def __init__(self, path: HostPath) -> None:
        self.path = _without_links(os.path.abspath(os.fspath(path)))
        self._lock = -1

    def open(self) -> None:
        """Lock the directory for this manager, until `close` or the end of the process.

        Raise SandboxError when it is in use.
        """
        if self._lock >= 0:
            return
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            found = os.stat(self.path)
            descriptor = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(self.path, error.strerror or "it cannot be opened") from None
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            os.close(descriptor)
            raise _unusable(self.path, "other users than this one may write to it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise SandboxError(
                f"another manager uses the state directory {self.path}",
                code="state-in-use",
                fix="close that manager, or name another directory",
            ) from None
        self._lock = descriptor
        lifecycle.after_fork(_close_all_in_child)
        _taken.append(self)

    def close(self) -> None:
        if self._lock >= 0:
            _taken.remove(self)
            os.close(self._lock)
            self._lock = -1

    def agents(self) -> list[str]:
        """Return the agents that have a folder here, sorted."""
        self.open()
        return sorted(agent for name in os.listdir(self.path) if (agent := agent_of(name)) is not None)

    def workspace(self, agent: str) -> str:
        """Return the path where an agent's workspace is kept; its folder is made."""
        self.open()
        folder = os.path.join(self.path, folder_of(agent))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.close(os.open(folder, _PLACE))  # a folder, and not a link that another process put there
        return os.path.join(folder, _WORKSPACE)

    def kept(self, agent: str) -> str | None:
        """Return the file that keeps an agent's workspace, or None."""
        path = self.workspace(agent)
        return path if os.path.isfile(path) else None

    def remove(self, agent: str) -> None:
        """Remove everything that is kept of an agent. Only names that we make are removed: no tree is walked."""
        self.open()
        folder = os.path.join(self.path, folder_of(agent))
        try:
            place = os.open(folder, _PLACE)
        except FileNotFoundError:
            return
        try:
            for name in os.listdir(place):
                os.unlink(name, dir_fd=place)
        finally:
            os.close(place)
        os.rmdir(folder)

    def check_hidden(self, policy: Policy) -> None:
        """Raise PolicyError for a mount that shows this directory: one agent would see another's workspace."""
        for index, mount in enumerate(policy.mounts):
            source = os.path.realpath(os.fspath(mount.source))
            if is_within(source, self.path) or is_within(self.path, source):
                raise PolicyError(
                    f"mounts[{index}] shows {source}, which is or holds the manager's state directory {self.path}",
                    key=f"mounts[{index}]",
                    code="state-mounted",
                    fix="keep the state outside of what is mounted",
                )


def _without_links(path: str) -> str:
    """Return the path after checking it for links: no guest may have chosen where workspaces are kept (L15)."""
    try:
        return without_links(path)
    except LinkError as error:
        raise PolicyError(
            f"{path} cannot be a state directory: {error.strerror}", key="state", code="link", fix=error.fix
        ) from None
    except OSError:
        return path  # the directory does not exist yet


_taken: list[StateDirectory] = []


def _close_all_in_child() -> None:
    """Close a fork's copies of the locks: they would outlive the manager's process and keep the directory in use."""
    while _taken:
        _taken[-1].close()


def _unusable(path: str, reason: str) -> PolicyError:
    return PolicyError(
        f"{path} cannot be a state directory: {reason}", key="state", code="state", fix="a directory of this user's own"
    )
