"""What Ringfence itself reads of a person's settings, and keeps for later: no guest may write there (L19).

Who could would choose what the next sandbox is or may do.

The same for a folder that is not there yet: a policy by name could be made in it.
"""

from __future__ import annotations

import os

from ringfence.errors import PolicyError
from ringfence.plan.rootfs.protected import first_missing
from ringfence.policy.host_paths import within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = "ringfence"
_POLICIES = "policies"  # as cli/policies.py finds them
_MOST = 1000  # policies that are looked at for where they lead


def check_settings(source: str, home: str, *, key: str) -> None:
    """Raises PolicyError where a writable `source` is one of these, or lies in one."""
    for path in _settings(home):
        if within(source, path):
            raise PolicyError(
                f"{source} is never writable: policies of Ringfence's own are read from {path}",
                key=key,
                fix='mode = "copy"',
            )


def settings_within(source: str, home: str, stored: tuple[str, ...]) -> tuple[str, ...]:
    """What is to be held read-only of a writable folder that has them in it, as paths relative to it.

    Of what is not there the first folder that is missing, with a slash at its end. `stored`: more such folders.
    """
    found = dict.fromkeys(first_missing(path) for path in (*_settings(home), *stored) if within(path, source))
    return tuple(os.path.relpath(path, source) + ("" if os.path.lexists(path) else "/") for path in found)


def _settings(home: str) -> Iterator[str]:
    """By their own names and by where links lead: a folder of settings is often kept in another place."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    for above in dict.fromkeys((f"{home}/.config", os.path.normpath(named) if os.path.isabs(named) else "")):
        if above:
            folder = f"{above}/{_FOLDER}"
            yield from _both(folder)
            yield from _both(f"{folder}/{_POLICIES}")
            try:
                names = sorted(os.listdir(f"{folder}/{_POLICIES}"))[:_MOST]
            except OSError:
                continue
            for name in names:
                if os.path.islink(f"{folder}/{_POLICIES}/{name}"):
                    yield os.path.realpath(f"{folder}/{_POLICIES}/{name}")


def _both(path: str) -> Iterator[str]:
    yield path
    real = os.path.realpath(path)
    if real != path:
        yield real
