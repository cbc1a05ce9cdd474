"""Builds images: a base, then packages, then files. The tree of each step is kept under the digest of its inputs."""

from __future__ import annotations

import hashlib
import json
import os
import time

from ringfence.errors import ImageError, PolicyError
from ringfence.images.importer import apply_directory, apply_host_file, check_free_name
from ringfence.images.make import ImageWorkplace, Wanted, find_python, real_path, silent
from ringfence.images.packages import add_npm, add_pip, check_host, debootstrap, suite_of
from ringfence.images.tar_reader import TarError, parts
from ringfence.policy.checks import identifier, plain_path, shorten, suggestion, text
from ringfence.policy.image import IMAGE_CHECKS, Image
from ringfence.policy.load import TooDeepError, find_lines
from ringfence.policy.secrets import read_regular
from ringfence.values import FrozenMap, Struct, final, frozen_map, put, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfence._sync.sandbox import Sandbox
    from ringfence.images.store import Held, ImageInfo, ImageStore
    from ringfence.policy.load import Path
    from ringfence.values import HostPath, Json, Strings


# ── recipes: the sources of an image, as a value and as TOML ──────────────────────────────────────

# base = "debian"                # or "debian:SUITE", or an image that was built from a recipe
# apt = ["git", "curl"]
# pip = ["numpy==2.1"]
# npm = ["typescript"]
# preload = ["numpy"]            # for backends with a warm interpreter
# user = "agent"                 # another name of uid 1000, besides "user"
#
# [env]
# LANG = "C.UTF-8"
#
# [[files]]
# source = "tool.sh"             # relative to the recipe
# target = "/usr/local/bin/tool"

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
    """The sources that an image is built from. Data only; checked when it is made."""

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
        """Return the recipe as JSON for the image's record. The content of files is in the image."""
        plain: dict[str, Json] = {"base": self.base, "user": self.user, "env": dict(self.env)}
        for name in ("apt", "pip", "npm", "preload"):
            plain[name] = list(getattr(self, name))
        plain["files"] = [{"source": one.source, "target": one.target} for one in self.files]
        return plain

    def plus(self, *, apt: Strings = (), pip: Strings = (), npm: Strings = ()) -> Recipe:
        """Return this recipe with packages added, each once."""
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
    """Return the recipe in a file. Raises PolicyError with the first mistake's line, OSError for an unreadable file."""
    place = os.path.abspath(plain_path(path, "recipe"))
    data = read_regular(place, _LARGEST)
    try:
        found = data.decode("utf-8")
    except UnicodeDecodeError:
        raise PolicyError(f"recipe {shorten(place)} is not UTF-8 text", key="recipe", fix="save it as UTF-8") from None
    return loads(found, os.path.dirname(place))


def loads(toml: str, folder: str) -> Recipe:
    """Return the recipe in a text. Sources of files start at `folder`."""
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


# ── presets: recipes for what agents usually need ─────────────────────────────────────────────────

_TOOLS = ("ca-certificates", "curl", "git", "less", "procps", "ripgrep")
_PYTHON = ("libstdc++6", "python3", "python3-pip", "python3-venv")  # most wheels with C++ need libstdc++
_DATA = ("matplotlib", "numpy", "pandas", "requests")
_NPM = ("npm@10",)  # the version for Debian's Node

NAMES = ("python", "data", "node", "polyglot")


def recipe_of_preset(name: str) -> Recipe:
    """Return the recipe of a preset. Raises PolicyError for an unknown name."""
    if name == "python":
        return Recipe(apt=(*_TOOLS, *_PYTHON), pip=("requests",))
    if name == "data":
        return Recipe(apt=(*_TOOLS, *_PYTHON), pip=_DATA, preload=("numpy",))
    if name == "node":
        return Recipe(apt=(*_TOOLS, "nodejs"), npm=_NPM)
    if name == "polyglot":
        compilers = ("g++", "gcc", "golang-go", "make", "nodejs", "ruby")
        return Recipe(apt=(*_TOOLS, *_PYTHON, *compilers), pip=_DATA, npm=_NPM, preload=("numpy",))
    raise PolicyError(f"no preset named {name!r}", key="preset", fix=f"one of: {', '.join(NAMES)}")


_FORM = 1  # the format of a step's tree: another number makes old steps unknown


def build_image(
    store: ImageStore,
    image: str | Image,
    recipe: HostPath | Recipe | None,
    *,
    preset: str | None,
    use_cache: bool,
    progress: Callable[[str], None] | None,
) -> ImageInfo:
    """See ringfence.images.build."""
    name, chosen = _chosen(store, image, recipe, preset)
    whole = _with_base(store, chosen, name)
    check_host()
    build = _Build(store, name, whole, progress or silent, use_cache=use_cache)
    try:
        return build.run()
    finally:
        build.close()


def _chosen(
    store: ImageStore, image: str | Image, recipe: HostPath | Recipe | None, preset: str | None
) -> tuple[str, Recipe]:
    if isinstance(image, Image):
        from ringfence.images.store import stored_name

        if recipe is not None or preset is not None:
            raise PolicyError("an Image already names its packages", key="recipe", fix="give its name, or no recipe")
        found = store.find(image.name)
        if not found.recipe:
            raise ImageError(
                f"image {image.name} was imported: packages are added only to images built from a recipe",
                code="image-recipe",
                fix='build one: a recipe with base = "debian" and the packages',
            )
        return stored_name(image), _recorded(found).plus(apt=image.apt, pip=image.pip, npm=image.npm)
    check_free_name(image)
    if (recipe is None) == (preset is None):
        raise PolicyError(
            "an image is built from a recipe or from a preset: give one of them",
            key="recipe",
            fix=f"--preset {'|'.join(NAMES)}, or the path of a recipe",
        )
    if preset is not None:
        return image, recipe_of_preset(preset)
    assert recipe is not None
    return image, recipe if isinstance(recipe, Recipe) else load(recipe)


def _recorded(info: ImageInfo) -> Recipe:
    """Return the recipe that an image was built from, which is Debian and additions."""
    kept = dict(info.recipe)
    files = kept.pop("files", [])
    assert isinstance(files, list)
    pairs = [(str(one["source"]), str(one["target"])) for one in files if isinstance(one, dict)]
    return Recipe(files=tuple(RecipeFile(*pair) for pair in pairs), **kept)  # type: ignore[arg-type]  # our own record


def _with_base(store: ImageStore, recipe: Recipe, name: str) -> Recipe:
    """Return a recipe based on Debian: where the base is an image, the image's recipe with this recipe's additions."""
    if recipe.base.partition(":")[0] == "debian":
        return recipe
    found = store.find(recipe.base)
    if not found.recipe or recipe.base == name:
        why = "is to be built itself" if recipe.base == name else "was imported, not built from a recipe"
        raise ImageError(f"base {recipe.base} {why}", code="image-recipe", fix='base = "debian"')
    base = _recorded(found)
    return Recipe(
        base=base.base,
        apt=tuple(dict.fromkeys((*base.apt, *recipe.apt))),
        pip=tuple(dict.fromkeys((*base.pip, *recipe.pip))),
        npm=tuple(dict.fromkeys((*base.npm, *recipe.npm))),
        files=(*base.files, *recipe.files),
        env={**base.env, **recipe.env},
        preload=tuple(dict.fromkeys((*base.preload, *recipe.preload))),
        user=recipe.user if recipe.user != "user" else base.user,
    )


@final
class _Step(Struct):
    key: str
    held: Held


class _Build:
    """A build of an image. Holds the trees of its steps until `close`."""

    def __init__(
        self, store: ImageStore, name: str, recipe: Recipe, say: Callable[[str], None], *, use_cache: bool
    ) -> None:
        self._store = store
        self._name = name
        self._recipe = recipe
        self._say = say
        self._use_cache = use_cache
        self._held: list[Held] = []

    def run(self) -> ImageInfo:
        recipe = self._recipe
        suite = suite_of(recipe.base)
        step = self._debian(suite)
        if recipe.pip:
            step = self._pip(step)
        if recipe.npm:
            step = self._npm(step)
        wanted = Wanted(
            name=self._name,
            source="recipe",
            env=recipe.env,
            config={},
            preload=tuple(recipe.preload),
            recipe={**recipe.to_dict(), "base": f"debian:{suite}"},
            user=recipe.user,
        )
        key = "" if recipe.files else _key("image", step.key, recipe.user)  # files of the host may have changed
        return self._made_before(key, wanted) or self._make(step, key, wanted)

    def _made_before(self, key: str, wanted: Wanted) -> ImageInfo | None:
        """Return the image, named anew, when an image of the same steps exists; else None."""
        if not self._use_cache or not key:
            return None
        with self._store.exclusive():
            digest = self._store.step(key)
            for name in self._store.names() if digest else ():
                try:
                    known = self._store.find(name)
                except ImageError:
                    continue
                if known.digest == digest and known.recipe == frozen_map(wanted.recipe):
                    self._say("image: from the cache")
                    info = replace(known, name=wanted.name, created_at=float(int(time.time())))
                    self._store.name(info)
                    return info
        return None

    def _make(self, step: _Step, key: str, wanted: Wanted) -> ImageInfo:
        with ImageWorkplace(self._store, f"image {self._name}") as making:
            making.tree.adopt(step.held.root)
            for one in self._recipe.files:
                self._copy(making, one)
            self._say("storing")
            info = making.keep(wanted)
            if key:
                self._store.set_step(key, info.digest)
            return info

    def close(self) -> None:
        for held in self._held:
            held.close()

    def _step(self, key: str, what: str, make: Callable[[ImageWorkplace], None], before: _Step | None = None) -> _Step:
        """Return the step's tree from the cache; else let `make` change a copy of the step before."""
        cached = self._cached(key)
        if cached is not None:
            self._say(f"{what}: from the cache")
            return cached
        with ImageWorkplace(self._store, f"image {self._name}") as making:
            if before is not None:
                making.tree.adopt(before.held.root)
            make(making)
            self._held.append(making.keep_step(key))
        return _Step(key, self._held[-1])

    def _cached(self, key: str) -> _Step | None:
        digest = self._store.step(key) if self._use_cache else None
        if digest is None:
            return None
        try:
            held = self._store.hold(digest)
        except ImageError:
            return None
        self._held.append(held)
        return _Step(key, held)

    def _debian(self, suite: str) -> _Step:
        packages = tuple(sorted(self._recipe.apt))

        def make(making: ImageWorkplace) -> None:
            debootstrap(making.tree, suite=suite, packages=packages, scratch=making.scratch, progress=self._say)

        return self._step(_key("debian", suite, list(packages)), f"Debian {suite}", make)

    def _pip(self, before: _Step) -> _Step:
        packages = tuple(sorted(self._recipe.pip))

        def make(making: ImageWorkplace) -> None:
            python = find_python(making.tree, self._recipe.env)
            if python is None:
                raise ImageError(
                    "pip packages need a Python in the image", code="image-python", fix='apt = ["python3", …]'
                )
            making.tree.begin_layer()

            def open_box(wheels: str) -> Sandbox:
                return _sandbox(self._name, before.held.root, python, wheels)

            add_pip(making.tree, packages, python, open_box, making.scratch, self._say)

        return self._step(_key("pip", before.key, list(packages)), "pip packages", make, before)

    def _npm(self, before: _Step) -> _Step:
        packages = tuple(sorted(self._recipe.npm))

        def make(making: ImageWorkplace) -> None:
            add_npm(making.tree, packages, making.scratch, self._say)

        return self._step(_key("npm", before.key, list(packages)), "npm packages", make, before)

    def _copy(self, making: ImageWorkplace, one: RecipeFile) -> None:
        """Copy a file or folder of the recipe.

        A folder is merged into the folder at its target, or where a link there leads. A file replaces its target.
        """
        self._say(f"copying {one.target}")
        wanted = parts(one.target.lstrip("/"), making.tree.caps)
        is_folder = os.path.isdir(one.source)
        place = real_path(making.tree, wanted if is_folder else wanted[:-1])
        if place is None:
            raise TarError(f"{one.target} lies behind a link that leads nowhere")
        try:
            if is_folder:
                apply_directory(making.tree, one.source, below="/".join(place), whole=False)
            else:
                apply_host_file(making.tree, one.source, "/".join((*place, wanted[-1])))
        except FileNotFoundError as error:  # perhaps a file of the base's recipe, which existed when the base was built
            raise ImageError(
                f"{error.filename}, which goes to {one.target}, does not exist; nothing was kept",
                code="image-source",
                fix="put it back, or take it out of the recipe; files of a base are read again too",
            ) from None


def _key(*inputs: Json) -> str:
    return hashlib.sha256(json.dumps([_FORM, *inputs]).encode()).hexdigest()


def _sandbox(name: str, root: str, python: str, wheels: str) -> Sandbox:
    """Return a sandbox of a tree without a name, with space to install packages."""
    from ringfence._sync.sandbox import Sandbox
    from ringfence.backends.auto import Launcher
    from ringfence.plan.model import FoundImage
    from ringfence.plan.rootfs.image_view import Root
    from ringfence.policy.model import Limits, Mount, Policy

    limits = Limits(timeout_s=1200, cpu_time_s=1200, cpus=2, memory="2G", disk="4G", disk_files=300_000, processes=256)
    policy = Policy(limits=limits, mounts=[Mount(wheels, target="/wheels", mode="ro")])
    box = Sandbox(policy=policy)
    box._launcher = Launcher(("process",), policy, FoundImage(Image("build"), Root(name, root, python)))  # noqa: SLF001  # a tree without a name
    return box
