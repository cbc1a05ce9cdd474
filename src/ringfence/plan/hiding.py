"""Decides what `hide` takes away below one mount's source: names that a layer over it lacks, or paths that are covered.

A layer serves what the guest cannot write through: read-only mounts and copies. In a writable mount the file itself is
covered, and nothing on its way may be moved or replaced by the guest: the next sandbox would show it (L01).
"""

from __future__ import annotations

import os

from ringfence.errors import PolicyError
from ringfence.plan.interpreter import within
from ringfence.plan.protected import Protected, beneath, first_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def absent(source: str, names: tuple[str, ...], *, key: str) -> tuple[str, ...]:
    """Relative paths that a layer has whiteouts for."""
    found = {way for name in names for way in _ways(source, beneath(name, key=key))}
    return _outermost(found)


def covered(source: str, target: str, names: tuple[str, ...], *, writable: bool, key: str) -> tuple[Protected, ...]:
    """What is there and has to be covered in a mount at `target`. Raises PolicyError for a link that the guest could
    replace: the next sandbox would hide what that leads to, and show what it hid before."""
    found = set()
    for name in names:
        relative = beneath(name, key=key)
        path = os.path.realpath(f"{source}/{relative}")
        if path == source or not within(path, source) or not os.path.exists(path):
            continue
        link = first_link(source, relative) if writable else None
        if link is not None:
            raise PolicyError(
                f"{relative!r} cannot be hidden in a writable mount: {link} is a symbolic link, which the guest could "
                "replace",
                key=key,
                fix=f'hide what it leads to ({os.path.relpath(path, source)!r}), or use mode "copy"',
            )
        found.add(os.path.relpath(path, source))
    return tuple(
        Protected(
            root=source,
            path=f"{source}/{name}",
            target=f"{target.rstrip('/')}/{name}",
            directory=os.path.isdir(f"{source}/{name}"),
            hidden=True,
        )
        for name in _outermost(found)
    )


def _ways(source: str, relative: str) -> Iterator[str]:
    """The name itself, which may be a link, and what it leads to. Not what lies outside: that does not show."""
    folder, base = os.path.split(f"{source}/{relative}")
    for path in (f"{os.path.realpath(folder)}/{base}", os.path.realpath(f"{folder}/{base}")):
        if path != source and within(path, source):
            whited = _first_missing(source, os.path.relpath(path, source))
            if whited is not None:
                yield whited


def _first_missing(source: str, relative: str) -> str | None:
    """Up to the first part that is not there, because somebody may make it: a layer cannot lack what lies in a folder
    that it would have to make. None: a file is in the way."""
    way = ""
    parts = relative.split("/")
    for number, part in enumerate(parts, 1):
        way = f"{way}/{part}" if way else part
        if not os.path.lexists(f"{source}/{way}"):
            return way
        if number < len(parts) and not os.path.isdir(f"{source}/{way}"):
            return None
    return way


def _outermost(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if not any(within(name, other) for other in names - {name})))
