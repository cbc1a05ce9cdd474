"""Builds images: a base, then packages, then files. What each step came to is kept under the digest of its inputs."""

from __future__ import annotations

import hashlib
import json
import os
import time

from ringfence.errors import ImageError, PolicyError
from ringfence.files.imagestore import ImageInfo
from ringfence.files.tarstream import TarError, parts
from ringfence.images import debian, presets
from ringfence.images.archives import apply_directory, apply_host_file
from ringfence.images.importing import check_free_name
from ringfence.images.making import Making, Wanted, silent
from ringfence.images.outfit import find_python, real_path
from ringfence.images.packages import add_npm, add_pip
from ringfence.images.recipe import Recipe, RecipeFile, load
from ringfence.policy.image import Image
from ringfence.values import Struct, final, frozen_map, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence._sync.sandbox import Sandbox
    from ringfence.files.imagelocks import Held
    from ringfence.files.imagestore import Store
    from ringfence.values import HostPath, Json

_FORM = 1  # of what steps make: another number makes old steps unknown


def build_image(
    store: Store,
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
    debian.check_host()
    build = _Build(store, name, whole, progress or silent, use_cache=use_cache)
    try:
        return build.run()
    finally:
        build.close()


def _chosen(
    store: Store, image: str | Image, recipe: HostPath | Recipe | None, preset: str | None
) -> tuple[str, Recipe]:
    if isinstance(image, Image):
        from ringfence.files.usedimages import stored_name

        if recipe is not None or preset is not None:
            raise PolicyError("an Image says itself what is added", key="recipe", fix="give its name, or no recipe")
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
            fix=f"--preset {'|'.join(presets.NAMES)}, or the path of a recipe",
        )
    if preset is not None:
        return image, presets.preset(preset)
    assert recipe is not None
    return image, recipe if isinstance(recipe, Recipe) else load(recipe)


def _recorded(info: ImageInfo) -> Recipe:
    """The recipe that an image was built from, which is Debian and what is added."""
    kept = dict(info.recipe)
    files = kept.pop("files", [])
    assert isinstance(files, list)
    pairs = [(str(one["source"]), str(one["target"])) for one in files if isinstance(one, dict)]
    return Recipe(files=tuple(RecipeFile(*pair) for pair in pairs), **kept)  # type: ignore[arg-type]  # our own record


def _with_base(store: Store, recipe: Recipe, name: str) -> Recipe:
    """With an image as its base: that image's recipe, and what this one adds."""
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
    """One build. Holds the trees of its steps until it is closed."""

    def __init__(self, store: Store, name: str, recipe: Recipe, say: Callable[[str], None], *, use_cache: bool) -> None:
        self._store = store
        self._name = name
        self._recipe = recipe
        self._say = say
        self._use_cache = use_cache
        self._held: list[Held] = []

    def run(self) -> ImageInfo:
        recipe = self._recipe
        suite = debian.suite_of(recipe.base)
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
        """The image under its name, when one was made of the same steps."""
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
        with Making(self._store, f"image {self._name}") as making:
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

    def _step(self, key: str, what: str, make: Callable[[Making], None], before: _Step | None = None) -> _Step:
        """A tree from the cache, else what `make` makes, beginning with the tree of the step before."""
        cached = self._cached(key)
        if cached is not None:
            self._say(f"{what}: from the cache")
            return cached
        with Making(self._store, f"image {self._name}") as making:
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

        def make(making: Making) -> None:
            debian.debootstrap(making.tree, suite=suite, packages=packages, scratch=making.scratch, progress=self._say)

        return self._step(_key("debian", suite, list(packages)), f"Debian {suite}", make)

    def _pip(self, before: _Step) -> _Step:
        packages = tuple(sorted(self._recipe.pip))

        def make(making: Making) -> None:
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

        def make(making: Making) -> None:
            add_npm(making.tree, packages, making.scratch, self._say)

        return self._step(_key("npm", before.key, list(packages)), "npm packages", make, before)

    def _copy(self, making: Making, one: RecipeFile) -> None:
        """A folder goes into the folder that its target is, or leads to; a file takes its target's place."""
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
        except FileNotFoundError as error:  # of a base's recipe, perhaps, which was whole when that was built
            raise ImageError(
                f"{error.filename} is not there, which goes to {one.target}; nothing was kept",
                code="image-source",
                fix="put it back, or take it out of the recipe; files of a base are read again too",
            ) from None


def _key(*inputs: Json) -> str:
    return hashlib.sha256(json.dumps([_FORM, *inputs]).encode()).hexdigest()


def _sandbox(name: str, root: str, python: str, wheels: str) -> Sandbox:
    """A sandbox of a tree that has no name yet, with room to install packages in."""
    from ringfence._sync.sandbox import Sandbox
    from ringfence.files.usedimages import Used
    from ringfence.launching import ProcessLauncher
    from ringfence.plan.imageview import Root
    from ringfence.policy.model import Limits, Mount, Policy

    limits = Limits(timeout_s=1200, cpu_time_s=1200, cpus=2, memory="2G", disk="4G", disk_files=300_000, processes=256)
    policy = Policy(limits=limits, mounts=[Mount(wheels, target="/wheels", mode="ro")])
    info = ImageInfo(name, "0" * 64, 0, 0, 0.0, "recipe")
    used = Used(info, Root(name, root, python))
    box = Sandbox(policy=policy)
    box._launcher = ProcessLauncher(policy, Image("build"), fresh=True, rejected={}, used=used)  # noqa: SLF001  # a tree without a name
    return box
