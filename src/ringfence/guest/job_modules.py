"""Computes which modules a job needs in its process, from the packages that hold the modules.

A job runs where no file of this package can be seen: its root is the sandbox's. What it needs is therefore loaded
while the files are still there (`load`, `load_late`), or its text goes along with the job (`texts`).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ringfence.guest.guestd.protocols import BundleLoader

_FILES, _INTERPRETER, _SHARED = "ringfence.guest.files", "ringfence.guest.interpreter", "ringfence.shared"
_CONNECTOR = "ringfence.guest.guestd.connector"  # the only job that is in neither package
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load() -> None:
    """Import every module that may run in a job's process, and with each what it imports."""
    for name in (*_members(_FILES), *_members(_INTERPRETER), _CONNECTOR):
        __import__(name)


def load_late() -> None:
    """Import also what file jobs import inside functions, for jobs that will not see the standard library."""
    load()
    for name in _members(_FILES):
        for late in imports_in_functions(text_of(f"{name.replace('.', '/')}.py")):
            __import__(late)


def texts(*begin: str) -> dict[str, str]:
    """Return, by full name, the texts of these interpreter modules and of our modules that they import."""
    known = {*_members(_INTERPRETER), *_members(_SHARED)}
    found: dict[str, str] = {}
    waiting = [f"{_INTERPRETER}.{name}" for name in begin]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = text_of(f"{name.replace('.', '/')}.py")
            waiting += known.intersection(imports_at_top(found[name].splitlines()))
    return found


def text_of(path: str) -> str:
    """Return the text of a file, named from the folder that our package lies in; a bundle holds it in memory."""
    data: bytes = __spec__.loader.get_data(f"{_ROOT}/{path}")  # type: ignore[union-attr]  # loaders of files, and ours, have it
    return data.decode()


def _members(package: str) -> list[str]:
    """Return the full names of a package's modules, in the bundle or in the package's folder."""
    loader: BundleLoader | object = __spec__.loader
    if hasattr(loader, "members"):
        held: list[str] = loader.members(package)
        return held
    names = (name.removesuffix(".py") for name in os.listdir(f"{_ROOT}/{package.replace('.', '/')}") if ".py" in name)
    return sorted(f"{package}.{name}" for name in names if name.isidentifier() and not name.startswith("__"))


def imports_at_top(lines: Iterable[str]) -> Iterator[str]:
    """Yield each name that may be a module of ours in `from … import …` lines that stand at the margin."""
    for line in lines:
        if line.startswith("from ringfence."):
            package, _, names = line.removeprefix("from ").partition(" import ")
            yield package
            yield from (f"{package}.{name.split()[0]}" for name in names.split(",") if name.strip())


def imports_in_functions(text: str) -> Iterator[str]:
    """Yield the modules that indented lines of `text` import, without those for type checkers."""
    for_types = False
    for line in text.splitlines():
        words = line.split()
        if line and not line[0].isspace():
            for_types = line == "if TYPE_CHECKING:"
        elif not for_types and (words[:1] == ["import"] or (words[:1] == ["from"] and words[2:3] == ["import"])):
            yield words[1]
