"""Has a process's first sandbox made while the rest of the library is still loaded.

Only where nothing can refuse the call later: no policy that is refused starts anything.
"""

from __future__ import annotations

from ringfence.errors import need_linux
from ringfence.host import zygote_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.policy.model import Policy


def begin(backend: object, image: object, policy: Policy, meanwhile: Callable[[], object] | None = None) -> None:
    """Start its zygote. `meanwhile` is called once all is asked of it, and it has yet to answer."""
    need_linux()
    if _is_sure(backend, image, policy) and zygote_start.begin_first() and meanwhile is not None:
        zygote_start.meanwhile.append(meanwhile)


def ask(backend: object, image: object, policy: Policy) -> None:
    """For a command, whose zygote has begun: ask for the sandbox itself, which the launcher finds then.

    Failing is no error here: the launcher tries again and says why.
    """
    if not zygote_start.is_command() or not _is_sure(backend, image, policy):
        return
    from ringfence import launching
    from ringfence.errors import RingfenceError

    try:
        launching.ask(policy)
    except (RingfenceError, OSError):
        return


def end_unneeded() -> None:
    """What `begin` began, when no sandbox came about."""
    zygote_start.end_unneeded()


def _is_sure(backend: object, image: object, policy: Policy) -> bool:
    if backend not in ("auto", "process") or image != "host" or policy.isolation == "own-kernel":
        return False
    return not (policy.mounts or policy.commands != "any" or policy.network.allow or policy.network.rules)
