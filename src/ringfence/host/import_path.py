"""Keeps Ringfence's own imports out of folders that a guest can write: a module there is the guest's code (L12).

A mount with mode "rw" may be, hold or lie in a folder of `sys.path`: the one of the caller's script, mostly. What a
guest leaves there would be run here, with the caller's rights, by the next import of a module that was not needed
before. So such folders are noted before the guest's first byte, for good, and from then on a finder stands before all
others. It answers imports that Ringfence asks for, by itself or through the standard library and installed packages:
from every other folder, or not at all. What the caller's own code imports is left alone.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib_external import PathFinder  # what the path-based finder of `sys.meta_path` is

from ringfence.plan.rootfs.interpreter import HELPERS
from ringfence.policy.host_paths import within

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

_written: dict[str, list[tuple[str, ...]]] = {}  # what was shown writable, each time with what was read-only in it
# Whether a guest can write in a folder, by its name. A new one whenever more is written: who still works with the old
# one, in another thread, leaves there what may be true no more.
_verdicts: list[dict[str, bool]] = [{}]


def shown_writable(sources: Iterable[str], read_only: Iterable[str] = ()) -> None:
    """To be called before a guest can write to `sources`, real host paths. `read_only`: paths in them that it cannot.

    Nothing is ever taken back: what a guest has written stays.
    """
    for source in sources:
        held = tuple(path for path in read_only if within(path, source))
        if held not in _written.setdefault(source, []):
            _written[source].append(held)
            _verdicts[0] = {}
    guard()


def guard() -> None:
    """From here on, our imports use neither writable folders nor "" and ".", which are wherever the caller goes."""
    if sys.meta_path[:1] != [_finder]:
        sys.meta_path[:] = [_finder, *(finder for finder in sys.meta_path if finder is not _finder)]


def keep_first() -> None:
    """At every call of ours: a finder that the caller put before this one since would find what a guest left."""
    if _written:
        guard()


def guest_can_write(path: str) -> bool:
    """Whether `path`, or a link on the way to it, lies where a guest can write, or could."""
    left, at, links = path.split("/")[::-1], "/", 0
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
    """Those that a guest can write neither to nor anywhere in."""
    return tuple(
        folder
        for folder in folders
        if not guest_can_write(folder) and not any(within(one, os.path.realpath(folder)) for one in _written)
    )


def importable(sources: Iterable[str], read_only: Iterable[str] = ()) -> list[str]:
    """Folders of `sys.path` that a guest could write to if it were shown `sources`; for telling the caller."""
    real, held = tuple(sources), tuple(read_only)
    found: dict[str, None] = {}
    for entry in map(str, sys.path):  # Python passes over what is no text
        try:
            folder = os.path.realpath(entry)  # "" is the working directory
        except OSError:  # which somebody removed
            continue
        if any(within(folder, one) for one in real) and not any(within(folder, one) for one in held):
            found[folder] = None
    return list(found)


def guests_folders() -> list[str]:
    """Folders of `sys.path` that a guest of this process can write to, or could."""
    return list(dict.fromkeys(entry for entry in map(str, sys.path) if entry[:1] == "/" and guest_can_write(entry)))


def is_installed(name: str) -> bool:
    """Whether an import of ours would find it. `find_spec` alone raises where the answer is ours, and no."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def callers_own(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of the caller's: what it imports is the caller's matter, wherever its code lies."""
    return work(*args, **kwargs)


async def callers_own_awaited(work: Awaitable[T]) -> T:
    """The same for what has to be awaited."""
    return await work


_BORDERS = frozenset((callers_own.__code__, callers_own_awaited.__code__))
_OURS, _PASSED, _CALLERS = "ours", "passed", "caller's"
_PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/"
_LIBRARY = f"{os.path.dirname(os.__file__)}/"
_kinds: dict[str, str] = {}  # of the files that code came from


class _Finder:
    """Stands first in `sys.meta_path`. It finds nothing for the caller's own code."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raises ModuleNotFoundError instead of leaving it to the finders behind, which would look everywhere."""
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


_finder = _Finder()


def _is_for_us(frame: FrameType | None, name: str) -> bool:
    """Who asks: the nearest code that is no machinery. With none, a thread of the standard library's own, say, its
    modules are never taken from a guest's folder."""
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
    name = frame.f_code.co_filename
    file = name if name.startswith(("/", "<frozen ")) else str(frame.f_globals.get("__file__") or "")
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    if file.startswith(_PACKAGE):
        kind = _OURS
    elif file.startswith(("<frozen ", _LIBRARY)) or any(part in file for part in _INSTALLED) or package in HELPERS:
        kind = _PASSED
    else:
        kind = _CALLERS
    if file is name:  # "<string>" is many things
        _kinds[name] = kind
    return kind


def _may_be_used(entry: object) -> bool:
    """A folder or an archive of a path. "" and relative ones are wherever the process is."""
    return isinstance(entry, str) and os.path.isabs(entry) and not _verdict(entry)


def _may_be_run(spec: ModuleSpec) -> bool:
    """Neither its file nor the compiled one beside it may be a guest's."""
    files = (spec.origin, spec.cached) if spec.has_location else ()
    return not any(file is not None and _is_guests(file) for file in files)


def _is_guests(file: str) -> bool:
    return _is_written(file) or _verdict(os.path.dirname(file)) or (os.path.islink(file) and guest_can_write(file))


def _verdict(folder: str) -> bool:
    known = _verdicts[0]
    found = known.get(folder)
    if found is None:
        found = known[folder] = guest_can_write(folder)
    return found


def _is_written(path: str) -> bool:
    """By its name alone: below something that was shown writable, and not below what was read-only there."""
    above = path
    while True:
        for held in _written.get(above, ()):
            if not any(within(path, one) for one in held):
                return True
        if above in ("/", ""):
            return False
        above = os.path.dirname(above)
