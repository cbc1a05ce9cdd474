"""Run `ringfence image`: list, build, import, inspect, export, remove and collect images."""

from __future__ import annotations

import os

from ringfence.cli.console import ERR, Problem, colours, write
from ringfence.cli.options import action_of, image_table
from ringfence.cli.terminal_filter import charset
from ringfence.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from ringfence.cli.console import Console
    from ringfence.cli.options import CommandLine
    from ringfence.images import ImageInfo
    from ringfence.values import Json

ACTIONS = ("list", "build", "import", "inspect", "export", "remove", "gc")
_OPTIONS = {
    "--json": ("list", "inspect", "build", "import", "export", "remove", "gc"),
    "--no-cache": ("build",),
    "--preset": ("build",),
    "--yes": ("remove", "gc"),
}
_UNITS = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def main(argv: list[str], console: Console) -> int:
    """Run an action and return the exit code. Raises Problem or RingfenceError."""
    if argv[:1] == ["prepare"]:
        _refuse_prepare(argv, console)
    given = image_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("image", console)
    action, words = action_of("image", given.words, ACTIONS)
    for name, _ in given.options:
        if action not in _OPTIONS[name]:
            raise Problem(f"image {action} takes no {name}", fix="see: ringfence image --help")
    if action == "list":
        _count(action, words, 0, 0)
        return _list(console)
    if action == "build":
        return _build(words, given, console)
    if action == "import":
        _count(action, words, 2, 2, "NAME SOURCE")
        return _import(words, console)
    if action == "inspect":
        _count(action, words, 1, 1, "NAME")
        return _inspect(words[0], console)
    if action == "export":
        _count(action, words, 2, 2, "NAME FILE")
        return _export(words, console)
    return _remove(words, given, console) if action == "remove" else _gc(words, given, console)


def _count(action: str, words: list[str], least: int, most: int, usage: str = "") -> None:
    if len(words) < least:
        raise Problem(f"image {action} needs {usage}", fix=f"write: ringfence image {action} {usage}")
    if len(words) > most:
        raise Problem(f"image {action} takes no {words[most]!r}", fix="see: ringfence image --help")


def size(count: int) -> str:
    """Return a number of bytes for people: 143M."""
    for unit, factor in _UNITS:
        if count >= factor:
            return f"{count / factor:.1f}{unit}" if count < 10 * factor else f"{count // factor}{unit}"
    return f"{count}"


def _when(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _list(console: Console) -> int:
    from ringfence import images

    found = images.list_images()
    if console.json:
        rows: list[Json] = [info.to_dict() for info in found]
        console.out_json({"directory": images.directory(), "images": rows})
        return 0
    width = max([len(info.name) for info in found] + [len("host")])
    lines = [f"{'host':{width}}  this machine's programs, read-only; always there"]
    for info in found:
        python = "Python" if info.python else "no Python"
        row = f"{info.name:{width}}  {info.digest[:12]}  {size(info.size):>6}  {_when(info.created_at)}"
        lines.append(f"{row}  {info.source}, {python}")
    if not found:
        lines.append("to add one: ringfence image build data --preset data")
    console.out("".join(f"{line}\n" for line in lines))
    return 0


def _progress(console: Console) -> Callable[[str], None] | None:
    """Return a function that shows progress, on a terminal in a line that is redrawn; None with --json or --quiet."""
    if console.json or console.quiet:
        return None
    if not os.isatty(ERR):
        return lambda message: console.say(printable(message))

    def draw(message: str) -> None:
        text = printable(message)[:100]
        shown = f"\r\x1b[K\x1b[2m{text}\x1b[0m" if colours(ERR) else f"\r\x1b[K{text}"
        write(ERR, shown.encode(charset(ERR), "replace"))

    return draw


def _clear(console: Console) -> None:
    if not console.json and os.isatty(ERR):
        write(ERR, b"\r\x1b[K")


def _build(words: list[str], given: CommandLine, console: Console) -> int:
    import warnings

    from ringfence import images
    from ringfence.errors import WeakerLimitWarning

    preset = given.last("--preset")
    if preset is not None and len(words) > 1:
        raise Problem(f"a recipe and a preset: {words[1]} and --preset {preset}", fix="leave one of the two out")
    _count("build", words, 1, 2, "NAME [RECIPE.toml | --preset PRESET]")
    recipe = words[1] if len(words) > 1 else None
    if recipe is None and preset is None:
        from ringfence.images.builder import NAMES

        fix = f"ringfence image build {words[0]} --preset {'|'.join(NAMES)}, or with the path of a recipe"
        raise Problem("build needs a recipe or a preset", fix=fix)
    try:
        use_cache = not given.has("--no-cache")
        warnings.simplefilter("ignore", WeakerLimitWarning)  # about the installing sandbox, not the image
        info = images.build(words[0], recipe, preset=preset, use_cache=use_cache, progress=_progress(console))
    finally:
        _clear(console)
    return _made(info, console)


def _import(words: list[str], console: Console) -> int:
    from ringfence import images

    try:
        info = images.import_image(words[0], words[1], progress=_progress(console))
    except FileNotFoundError:
        if os.path.exists(words[1]):
            raise
        fix = "name a folder, a tar, a docker-save or OCI archive, or docker:NAME, podman:NAME"
        raise Problem(f"there is no {words[1]!r} to import", fix=fix, code="source-missing", status=125) from None
    finally:
        _clear(console)
    return _made(info, console)


def _made(info: ImageInfo, console: Console) -> int:
    if console.json:
        console.out_json(info.to_dict())
        return 0
    for note in info.notes:
        console.note(note)
    console.out(f"{info.name}  {info.digest[:12]}  {size(info.size)}, {info.files:,} files\n")
    return 0


def _refuse_prepare(argv: list[str], console: Console) -> NoReturn:
    console.json = "--json" in argv
    raise Problem(
        "image prepare is not in this version",
        fix="no backend of this version needs it: ringfence run --image NAME",
        code="not-in-this-version",
        status=125,
    )


def _inspect(name: str, console: Console) -> int:
    from ringfence import images

    if name == "host":
        raise Problem('"host" is this machine itself, not a stored image', fix="see: ringfence doctor")
    info = images.inspect(name)
    if console.json:
        console.out_json(info.to_dict())
        return 0
    lines = [
        ("name", info.name),
        ("digest", f"sha256:{info.digest}"),
        ("size", f"{size(info.size)}, {info.files:,} files"),
        ("made", f"{_when(info.created_at)}, from {info.source}"),
        ("python", info.python or "none: exec works, run of Python code does not"),
        *(("env", f"{key}={value}") for key, value in sorted(info.env.items())),
        *(("preload", module) for module in info.preload),
        *((key, f"{value} (as data; not used)") for key, value in sorted(info.config.items())),
        *(("recipe", f"{key} = {value}") for key, value in sorted(info.recipe.items()) if value),
        *(("note", note) for note in info.notes),
    ]
    console.out("".join(f"{label:8}{printable(str(text))}\n" for label, text in lines))
    return 0


def _export(words: list[str], console: Console) -> int:
    from ringfence import images

    images.export(words[0], words[1])
    if console.json:
        console.out_json({"name": words[0], "file": os.path.abspath(words[1]), "size": os.path.getsize(words[1])})
        return 0
    console.note(f"{words[1]}: {size(os.path.getsize(words[1]))}; docker load and ringfence image import read it")
    return 0


def _remove(words: list[str], given: CommandLine, console: Console) -> int:
    from ringfence import images

    if not words:
        raise Problem("image remove needs a NAME", fix="ringfence image list shows all")
    for name in words:
        if name == "host":
            raise Problem('"host" is this machine itself and cannot be removed', fix="name a stored image")
        _known(name)
    if not _agreed(f"remove {', '.join(words)}?", given):
        return 1
    images.remove(*words)
    if console.json:
        console.out_json({"removed": list(words)})
    else:
        console.note(f"removed {', '.join(words)}")
    return 0


def _known(name: str) -> None:
    """Raise for a name that does not exist. A damaged image counts as existing, so that it can be removed."""
    from ringfence import images
    from ringfence.errors import ImageError

    try:
        images.inspect(name)
    except ImageError as error:
        if error.code != "image-damaged":
            raise


def _gc(words: list[str], given: CommandLine, console: Console) -> int:
    from ringfence import images

    _count("gc", words, 0, 0)
    if not _agreed("remove files that no image uses, and the caches of builds?", given):
        return 1
    found = images.gc()
    if console.json:
        console.out_json({"trees": found.trees, "freed_bytes": found.freed_bytes})
    else:
        console.out(f"{found.trees} trees removed, {size(found.freed_bytes)} freed\n")
    return 0


def _agreed(question: str, given: CommandLine) -> bool:
    if given.has("--yes"):
        return True
    if not os.isatty(0):
        raise Problem(f"there is no terminal to ask: {question}", fix="to do it without a question: --yes")
    write(ERR, f"ringfence: {printable(question)} [y/N] ".encode())
    return os.read(0, 64).strip().lower() in (b"y", b"yes")
