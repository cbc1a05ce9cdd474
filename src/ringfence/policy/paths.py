"""Paths in a policy, as text: absolute, without "..", one spelling each. Nothing here touches a file system."""

from __future__ import annotations

import os

from ringfence.errors import PolicyError
from ringfence.policy.checks import text
from ringfence.policy.sizes import shorten

_LONGEST = 4095  # PATH_MAX without its NUL
# What the sandbox makes itself and containment stands on; a mount over it would replace that.
_RESERVED = ("/proc", "/sys", "/dev")


def host_path(value: object, key: str) -> str:
    """An absolute host path. A relative one starts at the working directory of this moment, not of a later one."""
    path = plain_path(value, key)
    if path.startswith("~"):
        fix = "pass os.path.expanduser(…), or write ./~ for a folder of that name"
        raise PolicyError(f'{key}: "~" is not expanded here: {shorten(path)}', key=key, fix=fix)
    if os.path.isabs(path):
        return os.path.normpath(path).replace("//", "/")
    try:
        return os.path.abspath(path)
    except OSError:
        fix = "write an absolute path"
        raise PolicyError(f"{key}: the working directory of {shorten(path)} is gone", key=key, fix=fix) from None


def plain_path(value: object, key: str) -> str:
    """A path of any form as a non-empty str."""
    try:
        path = os.fspath(value)  # type: ignore[call-overload]  # it refuses what is no path, which is the point
    except TypeError:
        raise PolicyError(f"{key} must be a path, not {type(value).__name__}", key=key) from None
    path = text(path, key)
    if not path or len(path.encode()) > _LONGEST:
        raise PolicyError(f"{key} must have 1 to {_LONGEST} bytes", key=key)
    return path


def guest_target(value: object, key: str) -> str:
    """Where a mount appears inside: absolute, not "/", not over what the sandbox makes itself."""
    path = plain_path(value, key)
    parts = path.split("/")
    if not path.startswith("/"):
        fix = f"write it from the root: {shorten('/' + path)}"
        raise PolicyError(f"{key}: {shorten(path)} is not absolute", key=key, fix=fix)
    if ".." in parts:
        raise PolicyError(f'{key}: {shorten(path)} holds ".."', key=key, fix="write the path without it")
    found = "/" + "/".join(part for part in parts if part not in ("", "."))
    if found == "/":
        raise PolicyError(f"{key}: nothing can be mounted onto /", key=key, fix='choose a folder, such as "/data"')
    for reserved in _RESERVED:
        if within(found, reserved):
            fix = "choose another target"
            raise PolicyError(f"{key}: {shorten(found)} is in {reserved}, which is the sandbox's own", key=key, fix=fix)
    return found


def below(value: object, key: str) -> str:
    """A path below a mount's source: relative, without ".."."""
    path = plain_path(value, key)
    if path.startswith("/"):
        raise PolicyError(f"{key}: {shorten(path)} is not relative to the source", key=key, fix="remove the first /")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise PolicyError(f"{key}: {shorten(path)} is not below the source", key=key, fix='write it as ".env"')
    return "/".join(parts)


def within(path: str, folder: str) -> bool:
    """Whether a normal absolute path is `folder` or below it, as text: symbolic links are not looked at."""
    return path == folder or folder == "/" or path.startswith(folder + "/")
