"""Defines `Image`, a root file system by name, as data. `ringfence.images` builds and finds images."""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.checks import environment, identifier, listed, shorten, text
from ringfence.values import FrozenMap, Struct, final, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.policy.checks import Check
    from ringfence.values import Strings

_IMAGE_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


def _image_name(value: object, key: str) -> str:
    name = text(value, key)
    if not name or len(name) > 64 or not _IMAGE_NAME.issuperset(name) or not name[0].isalnum():
        fix = 'use letters, digits, ".", "_" and "-", at most 64'
        raise PolicyError(f"{key}: {shorten(name)} is not the name of an image", key=key, fix=fix)
    return name


def _package(value: object, key: str) -> str:
    """Return a package requirement that an installer cannot take for an option."""
    found = text(value, key)
    if not found or found[0] == "-" or not found.isprintable() or found != found.strip():
        fix = 'write it as "numpy==2.1"'
        raise PolicyError(f"{key}: {shorten(found)} is not the name of a package", key=key, fix=fix)
    return found


def _module(value: object, key: str) -> str:
    found = text(value, key)
    for part in found.split("."):
        identifier(part, key)
    return found


IMAGE_CHECKS: dict[str, Check] = {
    "name": _image_name,
    "pip": listed(_package),
    "apt": listed(_package),
    "npm": listed(_package),
    "preload": listed(_module),
    "env": environment,
}


@final
class Image(Struct):
    """A root file system by name, and the packages added. Data only: `ringfence.images.build()` builds the image."""

    name: str = "host"
    pip: Strings = ()
    apt: Strings = ()
    npm: Strings = ()
    preload: Strings = ()  # Python modules imported before the fork; runs no guest code
    env: Mapping[str, str] = FrozenMap()

    def __post_init__(self) -> None:
        for name, check in IMAGE_CHECKS.items():
            put(self, name, check(getattr(self, name), f"image.{name}"))
