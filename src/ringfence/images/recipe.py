"""Recipes: what an image is built from, as a value and as TOML, with every mistake at its line.

base = "debian"                # or "debian:SUITE", or an image that was built from a recipe
apt = ["git", "curl"]
pip = ["numpy==2.1"]
npm = ["typescript"]
preload = ["numpy"]            # for backends with a warm interpreter
user = "agent"                 # another name of uid 1000, besides "user"

[env]
LANG = "C.UTF-8"

[[files]]
source = "tool.sh"             # relative to the recipe
target = "/usr/local/bin/tool"
"""

from __future__ import annotations

import os

from ringfence.errors import PolicyError
from ringfence.policy.checks import identifier, suggestion, text
from ringfence.policy.image import IMAGE_CHECKS
from ringfence.policy.lines import TooDeepError, find_lines
from ringfence.policy.paths import plain_path
from ringfence.policy.sizes import shorten
from ringfence.policy.source import read_regular
from ringfence.values import FrozenMap, Struct, final, frozen_map, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfence.policy.lines import Path
    from ringfence.values import HostPath, Json, Strings

_LARGEST = 1 << 20
_SUITE = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_APT = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.+-:")


@final
class RecipeFile(Struct):
    """A file or folder of the host, copied into the image."""

    source: str  # absolute
    target: str  # absolute, inside


@final
class Recipe(Struct):
    """What an image is built from. Data only; checked when it is made."""

    base: str = "debian"
    apt: Strings = ()
    pip: Strings = ()
    npm: Strings = ()
    files: tuple[RecipeFile, ...] = ()
    env: Mapping[str, str] = FrozenMap()
    preload: Strings = ()
    user: str = "user"

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            put(self, name, check(getattr(self, name), name))
        put(self, "files", tuple(self.files))
        put(self, "env", frozen_map(self.env))

    def to_dict(self) -> dict[str, Json]:
        """For the image's record; the content of files is in the image."""
        plain: dict[str, Json] = {"base": self.base, "user": self.user, "env": dict(self.env)}
        for name in ("apt", "pip", "npm", "preload"):
            plain[name] = list(getattr(self, name))
        plain["files"] = [{"source": one.source, "target": one.target} for one in self.files]
        return plain

    def plus(self, *, apt: Strings = (), pip: Strings = (), npm: Strings = ()) -> Recipe:
        """This recipe with packages added, each once."""
        more = {"apt": apt, "pip": pip, "npm": npm}
        lists = {name: tuple(dict.fromkeys((*getattr(self, name), *added))) for name, added in more.items()}
        return Recipe(base=self.base, files=self.files, env=self.env, preload=self.preload, user=self.user, **lists)


def _base(value: object, key: str) -> str:
    name = text(value, key)
    distribution, colon, suite = name.partition(":")
    if colon and (distribution != "debian" or not suite or not _SUITE.issuperset(suite) or suite[0] == "-"):
        raise PolicyError(f"{key}: {shorten(name)} is no base", key=key, fix='such as "debian" or "debian:stable"')
    return name if colon else str(IMAGE_CHECKS["name"](name, key))


def _apt(value: object, key: str) -> tuple[str, ...]:
    found: tuple[str, ...] = tuple(IMAGE_CHECKS["apt"](value, key))
    for name in found:
        if not _APT.issuperset(name) or not name[0].isalnum():
            raise PolicyError(f"{key}: {shorten(name)} is no name of a Debian package", key=key, fix='such as "git"')
    return found


def _user(value: object, key: str) -> str:
    name = str(identifier(value, key))
    if name == "root" or len(name) > 32:
        raise PolicyError(f"{key}: uid 1000 cannot be called {shorten(name)}", key=key, fix='such as "agent"')
    return name


CHECKS: dict[str, Callable[[object, str], object]] = {
    "base": _base,
    "apt": _apt,
    "pip": IMAGE_CHECKS["pip"],
    "npm": IMAGE_CHECKS["npm"],
    "env": IMAGE_CHECKS["env"],
    "preload": IMAGE_CHECKS["preload"],
    "user": _user,
}


def load(path: HostPath) -> Recipe:
    """The recipe in a file. Raises PolicyError with the line of the first mistake, OSError when it cannot be read."""
    place = os.path.abspath(plain_path(path, "recipe"))
    data = read_regular(place, _LARGEST)
    try:
        found = data.decode("utf-8")
    except UnicodeDecodeError:
        raise PolicyError(f"recipe {shorten(place)} is not UTF-8 text", key="recipe", fix="save it as UTF-8") from None
    return loads(found, os.path.dirname(place))


def loads(toml: str, folder: str) -> Recipe:
    """The recipe in a text; sources of files start at `folder`."""
    import tomllib

    toml = toml.replace("\r\n", "\n").removeprefix("\ufeff")
    try:
        lines = find_lines(toml)
        data = tomllib.loads(toml)
    except TooDeepError as error:
        raise PolicyError(f"a key or value is {error}", key="recipe", line=error.line, fix="flatten it") from None
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"not TOML: {shorten(str(error))}", key="recipe", line=_line_of(str(error))) from None
    known = [*CHECKS, "files"]
    for key in data:
        if key not in known:
            fix = suggestion(key, known) or f"a recipe has: {', '.join(known)}"
            raise PolicyError(f"unknown key {shorten(key)} in the recipe", key=key, line=lines.get((key,)), fix=fix)
    values = {key: _checked(data[key], key, lines) for key in CHECKS if key in data}
    files = _files(data.get("files", []), folder, lines)
    return Recipe(files=files, **values)  # type: ignore[arg-type]  # each was checked above


def _line_of(message: str) -> int | None:
    digits = message.rpartition(" (at line ")[2].partition(",")[0]
    return int(digits) if digits.isdecimal() and len(digits) < 8 else None


def _checked(value: object, key: str, lines: dict[Path, int]) -> object:
    try:
        return CHECKS[key](value, key)
    except PolicyError as error:
        raise PolicyError(str(error), key=error.key, line=lines.get((key,)), fix=error.fix) from None


def _files(value: object, folder: str, lines: dict[Path, int]) -> tuple[RecipeFile, ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        fix = 'write [[files]], then source = "…" and target = "…"'
        raise PolicyError("files must be a list of tables", key="files", line=lines.get(("files",)), fix=fix)
    return tuple(_file(one, index, folder, lines) for index, one in enumerate(value))


def _file(one: dict[str, object], index: int, folder: str, lines: dict[Path, int]) -> RecipeFile:
    for key in one:
        if key not in ("source", "target"):
            fix = suggestion(key, ["source", "target"]) or "a file has a source and a target"
            line = lines.get(("files", index, key))
            raise PolicyError(f"unknown key {shorten(key)} in files", key=f"files[{index}].{key}", line=line, fix=fix)
    line = lines.get(("files", index))
    if one.keys() != {"source", "target"}:
        raise PolicyError("a file needs a source and a target", key=f"files[{index}]", line=line, fix="add it")
    source = os.path.normpath(os.path.join(folder, plain_path(one["source"], "source")))
    target = plain_path(one["target"], "target")
    if not target.startswith("/") or ".." in target.split("/") or target.strip("/") == "":
        fix = 'such as "/usr/local/bin/tool"'
        raise PolicyError(
            f"target {shorten(target)} is no place inside", key=f"files[{index}].target", line=line, fix=fix
        )
    if not os.path.lexists(source):
        raise PolicyError(f"{source} is not there", key=f"files[{index}].source", line=line, fix="correct the path")
    return RecipeFile(source, target)
