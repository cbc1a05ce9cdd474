"""Keeps Ringfence's own imports out of folders that a guest can write: a module there is the guest's code (L12).

A mount with mode "rw" may be, contain or be inside a folder of `sys.path`, mostly the folder of the caller's script.
What a guest leaves there would be run here, with the caller's rights, by the next import of a module that was not
needed before. Therefore such folders are noted, for good, before the guest runs. From then on our finder comes before
all others. It answers imports that Ringfence asks for, by itself or through the standard library and installed
packages: from every other folder, or not at all. What the caller's own code imports is left alone.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib_external import PathFinder  # the path-based finder of `sys.meta_path`

from ringfence.plan.rootfs.interpreter import HELPERS
from ringfence.shared.paths import is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

IMPORTABLE = (
    "writable, and a folder of sys.path: what your own Python imports from there later may be the guest's; "
    "Ringfence's own imports leave it out"
)
_INSTALLED = ("/site-packages/", "/dist-packages/")
_MOST_LINKS = 40  # the kernel's own limit on one path


class WritableFolders:
    """The folders that guests of this process can write to, or could.

    `verdicts` says whether a guest can write in a folder, by its name. The table is replaced whenever there are more
    writable folders: another thread that still works with the old table leaves there what may no longer be true.
    """

    def __init__(self) -> None:
        self.folders: dict[str, list[tuple[str, ...]]] = {}  # with the read-only paths in each
        self.verdicts: dict[str, bool] = {}


_written = WritableFolders()


def shown_writable(sources: Iterable[str], read_only: Iterable[str] = ()) -> None:
    """Note `sources`, real host paths, before a guest can write there. `read_only`: paths inside that stay read-only.

    No note is ever taken back: what a guest has written stays.
    """
    for source in sources:
        inside = tuple(path for path in read_only if is_within(path, source))
        if inside not in _written.folders.setdefault(source, []):
            _written.folders[source].append(inside)
            _written.verdicts = {}
    guard()


def guard() -> None:
    """Keep our imports, from here on, out of writable folders and of "" and ".", the working directory."""
    if sys.meta_path[:1] != [_finder]:
        sys.meta_path[:] = [_finder, *(finder for finder in sys.meta_path if finder is not _finder)]


def keep_first() -> None:
    """Put our finder first again, at every call: a finder that the caller put there would find a guest's modules."""
    if _written.folders:
        guard()


def guest_can_write(path: str) -> bool:
    """Return whether `path`, or a link on the way, is where a guest can write or could."""
    left = path.split("/")[::-1]
    at = "/"
    links = 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        here = os.path.dirname(at) if part == ".." else f"{at.rstrip('/')}/{part}"
        try:
            target = os.readlink(here)
        except OSError:
            at = here
            continue
        links += 1
        if links > _MOST_LINKS or _is_written(here):
            return True
        at = "/" if target.startswith("/") else at
        left += target.split("/")[::-1]
    return _is_written(at)


def untouched(folders: Iterable[str]) -> tuple[str, ...]:
    """Return the folders in which, at any depth, no guest of this process can write or could."""
    return tuple(
        folder
        for folder in folders
        if not guest_can_write(folder) and not any(is_within(one, os.path.realpath(folder)) for one in _written.folders)
    )


def importable(sources: Iterable[str], read_only: Iterable[str] = ()) -> list[str]:
    """Return the folders of `sys.path` that a guest with `sources` could write to, for a warning to the caller."""
    writable = tuple(sources)
    excepted = tuple(read_only)
    found: dict[str, None] = {}
    for entry in map(str, sys.path):  # Python ignores entries that are no text
        try:
            folder = os.path.realpath(entry)  # "" is the working directory
        except OSError:  # which was removed
            continue
        if any(is_within(folder, path) for path in writable) and not any(is_within(folder, path) for path in excepted):
            found[folder] = None
    return list(found)


def guests_folders() -> list[str]:
    """Return the folders of `sys.path` that a guest of this process can write to or could."""
    return list(dict.fromkeys(entry for entry in map(str, sys.path) if entry[:1] == "/" and guest_can_write(entry)))


def places() -> list[str]:
    """Return the entries of `sys.path` that our own imports use: absolute, and where no guest can write or could."""
    return [entry for entry in sys.path if _may_be_used(entry)]


def is_installed(name: str) -> bool:
    """Return whether our own import would find a module. Where our finder refuses, `find_spec` raises."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def callers_own(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the caller's function. What the function imports is left alone, wherever its code is."""
    return work(*args, **kwargs)


async def callers_own_awaited(work: Awaitable[T]) -> T:
    """Await the caller's awaitable. What its code imports is left alone."""
    return await work


_BORDERS = frozenset((callers_own.__code__, callers_own_awaited.__code__))
_OURS, _PASSED, _CALLERS = "ours", "passed", "caller's"
_PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/"
_LIBRARY = f"{os.path.dirname(os.__file__)}/"
_kinds: dict[str, str] = {}  # whose code a file holds, by file name


class _GuardedFinder:
    """The first finder of `sys.meta_path`. It finds nothing for the caller's own code."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module for our own code, outside the folders that a guest can write.

        Raises ModuleNotFoundError if there is none: the finders behind would look everywhere.
        """
        if not _is_for_us(sys._getframe(1), name):  # noqa: SLF001  # `inspect` is slow to import
            return None
        places = [entry for entry in (sys.path if path is None else path) if _may_be_used(entry)]
        for finder in tuple(sys.meta_path):
            if finder is _finder or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, places if finder is PathFinder else path, target)
            if spec is not None and _may_be_run(spec):
                return spec
        raise ModuleNotFoundError(f"No module named {name!r} outside the folders that a guest can write", name=name)


_finder = _GuardedFinder()


def _is_for_us(frame: FrameType | None, name: str) -> bool:
    """Return whether our own code asks for the import. The nearest frame that is no machinery decides.

    If there is no such frame, as in a thread of the standard library, modules of the standard library are for us.
    """
    while frame is not None:
        code = frame.f_code
        if code in _BORDERS:
            return False
        kind = _kinds.get(code.co_filename) or _kind_of(frame)
        if kind != _PASSED:
            return kind == _OURS
        frame = frame.f_back
    return name.partition(".")[0] in sys.stdlib_module_names


def _kind_of(frame: FrameType) -> str:
    """Return whose code a frame runs: ours, the caller's, or a library's, which imports for its own caller."""
    name = frame.f_code.co_filename
    file = name if name.startswith(("/", "<frozen ")) else str(frame.f_globals.get("__file__") or "")
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    if file.startswith(_PACKAGE):
        kind = _OURS
    elif file.startswith(("<frozen ", _LIBRARY)) or any(part in file for part in _INSTALLED) or package in HELPERS:
        kind = _PASSED
    else:
        kind = _CALLERS
    if file is name:  # "<string>" stands for many files
        _kinds[name] = kind
    return kind


def _may_be_used(entry: object) -> bool:
    """Return whether modules may come from an entry of a path: it is absolute and no guest can write there."""
    return isinstance(entry, str) and os.path.isabs(entry) and not _verdict(entry)


def _may_be_run(spec: ModuleSpec) -> bool:
    """Return whether neither the module's file nor the compiled file beside it may be a guest's."""
    files = (spec.origin, spec.cached) if spec.has_location else ()
    return not any(file is not None and _is_guests(file) for file in files)


def _is_guests(file: str) -> bool:
    return _is_written(file) or _verdict(os.path.dirname(file)) or (os.path.islink(file) and guest_can_write(file))


def _verdict(folder: str) -> bool:
    known = _written.verdicts
    found = known.get(folder)
    if found is None:
        found = known[folder] = guest_can_write(folder)
    return found


def _is_written(path: str) -> bool:
    """Return whether a path is, by its name, in a writable folder and not below a path that was read-only there."""
    above = path
    while True:
        for read_only in _written.folders.get(above, ()):
            if not any(is_within(path, each) for each in read_only):
                return True
        if above in ("/", ""):
            return False
        above = os.path.dirname(above)
