"""Owns finding a policy by name: a preset, one of the person's own, or a file. Never one from a working directory."""

from __future__ import annotations

import os

from ringfence.cli.console import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy import Policy
    from ringfence.values import PresetName

PRESETS: tuple[PresetName, ...] = ("offline", "dev", "hostile")
FOLDER = "~/.config/ringfence/policies"


def find(name: str) -> Policy:
    """The policy that NAME|FILE means. Raises Problem or PolicyError when there is none, or it is wrong."""
    from ringfence.policy import Policy

    for preset in PRESETS:
        if name == preset:
            return Policy.preset(preset)
    from ringfence.errors import PolicyError

    path = path_of(name)
    try:
        return Policy.load(path)
    except PolicyError as error:
        if error.line is None:
            raise
        raise Problem(f"{path}:{error.line}: {error}", fix=error.fix, code=error.code) from None


def path_of(name: str) -> str:
    """The file that NAME|FILE means, checked to be one. Raises Problem."""
    own = own_policies()
    if name in own:
        return own[name]
    if name.endswith(".toml"):
        return _checked_file(name)
    from ringfence.cli.names import nearest

    if os.path.exists(name):
        raise Problem(f"{name!r} is not a policy file", fix="a policy file's name ends in .toml")
    near = nearest(name, [*PRESETS, *own])
    fix = f"did you mean {near}? " if near else ""
    raise Problem(
        f"there is no policy {name!r}",
        fix=f"{fix}presets are {', '.join(PRESETS)}; yours are in {FOLDER}; the name of a file ends in .toml",
        code="policy-not-found",
    )


def own_policies() -> dict[str, str]:
    """Name and path of each policy in the person's folder. A preset's name is the preset's."""
    folder = os.path.expanduser(FOLDER)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    own = {name.removesuffix(".toml"): f"{folder}/{name}" for name in names if name.endswith(".toml")}
    return {name: path for name, path in own.items() if name}


def _checked_file(path: str) -> str:
    if os.path.isdir(path):
        raise Problem(
            f"{path!r} is a folder, not a policy file", fix="name a .toml file in it", code="policy-not-found"
        )
    if not os.path.exists(path):
        raise Problem(
            f"there is no file {path!r}",
            fix="to write one: ringfence policy show dev > FILE.toml; to see those there are: ringfence policy list",
            code="policy-not-found",
        )
    return path
