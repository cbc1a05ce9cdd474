"""guestd's own interpreter, as a folder that is shown inside: images need no Python, and no particular libc.

The folder holds a copy of the caller's Python with its standard library, its libraries and their loader, and a copy of
`ringfence.guest`. It is made once for each version of either, below the user's data directory, and takes about 60 MB.

guestd is also compiled into one file: every module of its package, and the paths of the extension modules it needs. A
start then opens one file instead of sixty, which saves a third of a start under gVisor.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from functools import cache
from importlib import _bootstrap_external  # what writes every .pyc
from importlib.machinery import SourceFileLoader

from ringfence.errors import UnsupportedError
from ringfence.host import process_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType
    from typing import TypeAlias

    Module: TypeAlias = tuple[str, str, bool, CodeType]

INSIDE = "/.ringfence"
_PRELOAD = b"/etc/ld.so.preload\0"  # a loader reads this file before all else, and no option turns that off
_NO_PRELOAD = b"/.ringfence/lib/-\0\0"  # its replacement, as long: a name that is missing in our folder
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data")
)
_SHIPPED = ("guest", "shared")  # our packages that guestd needs
_MAIN = "ringfence/guest/guestd/__main__.py"
_STANDARD = ("__future__", "struct", "types")
_TEXTS = ("guest/interpreter", "shared")  # folders whose source files guestd may hand to other interpreters
_EXTENSIONS = ("_ctypes", "_json", "_socket", "_struct", "fcntl", "select")
_as_file = _bootstrap_external._code_to_hash_pyc  # type: ignore[attr-defined]  # noqa: SLF001  # as py_compile does
_PLACE = "held"  # the constant in guestd's __main__ that all modules take the place of


def make(target: str, inside: str, version: str) -> None:
    """Write guestd.pyc into `target`, the folder that is shown at `inside`.

    `target` already holds our package and the interpreter's library.
    """
    contents = (
        tuple(_modules(target, inside, version)),
        tuple(_extensions(target, inside, version)),
        tuple(_texts(target, inside)),
    )
    code = _compiled(f"{target}/{_MAIN}", f"{inside}/{_MAIN}")
    assert _PLACE in code.co_consts
    whole = code.replace(co_consts=tuple(contents if each == _PLACE else each for each in code.co_consts))
    with open(f"{target}/guestd.pyc", "wb") as file:
        file.write(_as_file(whole, bytes(8), checked=False))


def _modules(target: str, inside: str, version: str) -> Iterator[Module]:
    for folder, _, names in sorted(os.walk(f"{target}/ringfence")):
        package = os.path.relpath(folder, target)
        for name in sorted(names):
            if not name.endswith(".py") or name == "__main__.py":
                continue
            path = f"{package}/{name}"
            own = name == "__init__.py"
            dotted = package.replace("/", ".") if own else path.removesuffix(".py").replace("/", ".")
            yield dotted, f"{inside}/{path}", own, _compiled(f"{target}/{path}", f"{inside}/{path}")
    for name in _STANDARD:
        path = f"lib/{version}/{name}.py"
        yield name, f"{inside}/{path}", False, _compiled(f"{target}/{path}", f"{inside}/{path}")


def _extensions(target: str, inside: str, version: str) -> Iterator[tuple[str, str]]:
    """Yield the extension modules that are files. The others are built into the interpreter."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in _EXTENSIONS:
        path = f"lib/{version}/lib-dynload/{name}{suffix}"
        if os.path.exists(f"{target}/{path}"):
            yield name, f"{inside}/{path}"


def _texts(target: str, inside: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of our programs that guestd hands to other interpreters."""
    for folder in _TEXTS:
        for name in sorted(os.listdir(f"{target}/ringfence/{folder}")):
            if name.endswith((".py", ".js")):
                with open(f"{target}/ringfence/{folder}/{name}", "rb") as file:
                    yield f"{inside}/ringfence/{folder}/{name}", file.read()


def _compiled(path: str, shown: str) -> CodeType:
    with open(path, "rb") as file:
        return SourceFileLoader(path, path).source_to_code(file.read(), shown)


def command(python: str | None = None) -> list[str]:
    """Return the command that starts guestd inside. The loader is ours too: no file of the image is used.

    `python`: the caller's own interpreter, where it is shown inside. Guests' Python code can then run in forks of
    guestd.
    """
    if python is not None:
        return [python, "-I", "-S", f"{INSIDE}/guestd.pyc"]
    loader = f"{INSIDE}/lib/ld.so"
    python = f"{INSIDE}/bin/python3"
    guestd = f"{INSIDE}/guestd.pyc"
    # Without the cache: the loader would read the image's own /etc/ld.so.cache.
    ours = ["--inhibit-cache", "--library-path", f"{INSIDE}/lib", "--argv0", python]
    return [loader, *ours, python, "-I", "-S", guestd]


def folder(root: str) -> str:
    """Return the folder's path on the host, below `root`; make the folder where it is missing."""
    made = f"{root}/guestd-{_key()}"
    if os.path.isdir(made):
        return made
    os.makedirs(root, 0o755, exist_ok=True)
    _sweep(root)
    being_made = f"{made}.{process_id.name()}_{os.urandom(3).hex()}"
    try:
        _make(being_made)
        os.rename(being_made, made)
    except OSError:
        if not os.path.isdir(made):  # another process was first
            raise
    finally:
        shutil.rmtree(being_made, ignore_errors=True)
    return made


def _sweep(root: str) -> None:
    """Remove the unfinished folders of library processes that were killed."""
    for name in os.listdir(root):
        if process_id.is_dead(name.partition(".")[2].partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)


def _sources() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@cache
def _key() -> str:
    import hashlib

    digest = hashlib.sha256(f"6 {sys.version}{os.path.realpath(sys.executable)}".encode())
    digest.update(str(os.stat(os.path.realpath(sys.executable)).st_mtime_ns).encode())
    for package in _SHIPPED:
        for folder, _, names in sorted(os.walk(f"{_sources()}/{package}")):
            for name in sorted(names):
                if name.endswith((".py", ".js")):
                    with open(f"{folder}/{name}", "rb") as file:
                        digest.update(f"{folder}/{name}".encode() + file.read())
    return digest.hexdigest()[:16]


def _make(target: str) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = sysconfig.get_path("stdlib")
    os.makedirs(f"{target}/bin")
    python = os.path.realpath(sys.executable)
    shutil.copy2(python, f"{target}/bin/python3")
    shutil.copytree(stdlib, f"{target}/lib/{version}", ignore=_ignored, symlinks=True)
    dynload = sysconfig.get_config_var("DESTSHARED")
    if dynload and os.path.isdir(dynload) and not os.path.isdir(f"{target}/lib/{version}/lib-dynload"):
        shutil.copytree(dynload, f"{target}/lib/{version}/lib-dynload")
    _copy_libraries(target, python, f"{target}/lib/{version}/lib-dynload")
    for package in _SHIPPED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(f"{_sources()}/{package}", f"{target}/ringfence/{package}", ignore=ignored)
    with open(f"{target}/ringfence/__init__.py", "w", encoding="utf-8") as file:
        file.write('"""The guest\'s half."""\n')
    _compile(target)
    make(target, INSIDE, version)
    for directory, _, files in os.walk(target):  # because of the caller's umask; guestd is mostly another user
        os.chmod(directory, 0o755)
        for path in (f"{directory}/{name}" for name in files):
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)


def _compile(target: str) -> None:
    """Compile our package once: the folder is read-only inside, and every start would compile everything again."""
    import compileall
    import py_compile

    compileall.compile_dir(
        f"{target}/ringfence",
        quiet=2,
        ddir=f"{INSIDE}/ringfence",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _ignored(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name in _LEFT_OUT or name.startswith("config-")]


def _copy_libraries(target: str, python: str, dynload: str) -> None:
    """Copy the libraries of the interpreter and its extension modules, and the loader under a fixed name."""
    from ringfence.plan.rootfs import commands  # rarely needed: the folder is made once

    cache = commands.linker_cache()
    found: dict[str, str] = {}
    waiting = [python, *(f"{dynload}/{name}" for name in os.listdir(dynload))]
    while waiting:
        needed = commands.needs(os.path.realpath(waiting.pop()))
        if needed.interpreter is not None:
            found["ld.so"] = needed.interpreter
        for name in needed.libraries:
            path = commands.find_library(name, needed.search, cache)
            if path is not None and name not in found:
                found[name] = path
                waiting.append(path)
    for name, path in found.items():
        shutil.copy2(os.path.realpath(path), f"{target}/lib/{os.path.basename(name)}")
        os.chmod(f"{target}/lib/{os.path.basename(name)}", 0o755)
    _take_preload_away(f"{target}/lib/ld.so")


def _take_preload_away(loader: str) -> None:
    """Make our copy of the loader ignore the image's /etc/ld.so.preload, which guestd would load with its own rights.

    Raises UnsupportedError for a loader that does not name this file exactly once, as text.
    """
    with open(loader, "rb") as file:
        program = file.read()
    if program.count(_PRELOAD) != 1 or program.count(_PRELOAD.strip(b"\0")) != 1:
        raise UnsupportedError(
            f"the loader of {sys.executable} cannot be kept from an image's /etc/ld.so.preload",
            code="loader",
            fix='backend="process", or a Python that is built for glibc',
        )
    with open(loader, "wb") as file:
        file.write(program.replace(_PRELOAD, _NO_PRELOAD))
