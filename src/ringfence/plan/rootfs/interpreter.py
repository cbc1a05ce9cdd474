"""Describes the caller's Python as a guest with image "host" gets it: executable, import path, directories to show.

Reads `sys`, and asks the file system what exists. Never imports sysconfig or site: both cost more than a sandbox.
"""

from __future__ import annotations

import os
import sys

from ringfence.errors import Missing, UnsupportedError
from ringfence.shared.paths import is_within
from ringfence.values import Struct, final

# The packages that Ringfence uses, and their dependencies, wherever they are installed.
HELPERS = frozenset(
    (
        *("_cffi_backend", "certifi", "cffi", "charset_normalizer", "cryptography", "docker", "h11", "h2", "hpack"),
        *("hyperframe", "idna", "pycparser", "requests", "typing_extensions", "urllib3"),
    )
)
SHARED_STORES = ("/nix/store", "/gnu/store", "/home/linuxbrew/.linuxbrew")  # interpreters there link across the store


@final
class Interpreter(Struct):
    """The caller's Python. All paths are the same for the guest and on the host."""

    executable: str  # the real file, no shim and no link
    command: str  # what the guest runs as `python3`: the virtual environment's link where there is one
    version: str
    prefix: str  # of the virtual environment, or the base prefix
    base_prefix: str
    stdlib: tuple[str, ...]
    site_packages: tuple[str, ...]
    sys_path: tuple[str, ...]  # for the guest: no working directory, no PYTHONPATH, nothing a .pth file added
    roots: tuple[str, ...]  # what must be shown besides /usr, and no more than that
    programs: tuple[str, ...]  # directories of `roots` for the guest's PATH, in this order


def interpreter() -> Interpreter:
    """Return the running interpreter, as a guest gets it. Costs a few dozen stat calls.

    Raises UnsupportedError when `sys` does not name the interpreter's file.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = os.path.normpath(sys.base_prefix)
    prefix = os.path.normpath(sys.prefix)
    literal = getattr(sys, "_base_executable", None) or sys.executable
    if not literal:
        raise UnsupportedError(
            f"this program does not say which Python it runs: sys.executable is {literal!r}",
            code="no-executable",
            missing=[Missing("process", "the file of this Python", "set sys.executable before the first sandbox")],
        )
    executable = os.path.realpath(literal)
    stdlib = _stdlib(base, name)
    site = _site_packages(prefix, base, name)
    in_venv = prefix != base
    command = _venv_python(prefix) if in_venv else executable
    roots = _base_roots(base, name, executable, stdlib) + (_venv_roots(prefix, site) if in_venv else ())
    roots += tuple(directory for directory in site if not _covered(directory, roots))
    programs = (f"{prefix}/bin", f"{base}/bin") if in_venv else (f"{base}/bin",)
    return Interpreter(
        executable=executable,
        command=command or executable,
        version=".".join(map(str, sys.version_info[:3])),
        prefix=prefix,
        base_prefix=base,
        stdlib=stdlib,
        site_packages=site,
        sys_path=stdlib + site,
        roots=_minimal(roots),
        programs=tuple(path for path in programs if not is_within(path, "/usr") and os.path.isdir(path)),
    )


def home_directory() -> str:
    """Return the caller's home as a normal absolute path, or "/nonexistent". Imports pwd only where HOME is not set."""
    home = os.environ.get("HOME") or os.path.expanduser("~")
    return os.path.normpath(home) if os.path.isabs(home) else "/nonexistent"


def _stdlib(base: str, name: str) -> tuple[str, ...]:
    library = getattr(sys, "_stdlib_dir", None) or os.path.dirname(os.__file__)
    archive = f"{base}/{sys.platlibdir}/{name.replace('.', '')}.zip"
    dynload = [f"{library}/lib-dynload", f"{sys.base_exec_prefix}/{sys.platlibdir}/{name}/lib-dynload"]
    return _existing([archive, library, *dynload])


def _site_packages(prefix: str, base: str, name: str) -> tuple[str, ...]:
    found = [f"{prefix}/{lib}/{name}/site-packages" for lib in ("lib", sys.platlibdir)]
    if prefix == base or _sees_system_packages(prefix):
        found += [f"{base}/{lib}/{name}/site-packages" for lib in ("lib", sys.platlibdir)]
        if base == "/usr":
            found += [f"/usr/local/lib/{name}/dist-packages", f"/usr/local/lib/{name}/site-packages"]
            found += ["/usr/lib/python3/dist-packages", f"/usr/lib/{name}/dist-packages"]
        found += _user_packages(name)
    return _existing(found)


def _user_packages(name: str) -> list[str]:
    """Return the folder of `pip install --user`, not the home, where this interpreter itself uses that folder."""
    user = f"{home_directory()}/.local/lib/{name}/site-packages"
    return [user] if user in sys.path else []


def _sees_system_packages(prefix: str) -> bool:
    try:
        with open(f"{prefix}/pyvenv.cfg", encoding="utf-8", errors="replace") as file:
            lines = file.read(65536).splitlines()
    except OSError:
        return False
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip().lower() == "include-system-site-packages":
            return value.strip().lower() == "true"
    return False


def _venv_python(prefix: str) -> str | None:
    for name in ("python3", "python"):
        if os.access(f"{prefix}/bin/{name}", os.X_OK):
            return f"{prefix}/bin/{name}"
    return None


def _base_roots(base: str, name: str, executable: str, stdlib: tuple[str, ...]) -> tuple[str, ...]:
    """Return the base installation under the name in `sys` and under its real name.

    Links inside the installation lead to either name.
    """
    for store in SHARED_STORES:
        if is_within(executable, store):
            return (store,)
    if _holds_more_than_python(base):
        libraries = _libpythons(f"{base}/{sys.platlibdir}", name)
        return (*stdlib, f"{base}/{sys.platlibdir}/{name}", *libraries, executable)
    own = os.path.dirname(os.path.dirname(executable))
    roots = (base, os.path.realpath(base))
    return roots if _covered(executable, roots) or _holds_more_than_python(own) else (*roots, own)


def _holds_more_than_python(prefix: str) -> bool:
    """Return whether a prefix is a home, contains a home, or is a top directory, and so is not shown as a whole."""
    home = home_directory()
    return is_within(home, prefix) or prefix == f"{home}/.local" or prefix.count("/") < 2


def _libpythons(directory: str, name: str) -> tuple[str, ...]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return ()
    return tuple(f"{directory}/{entry}" for entry in names if entry.startswith((f"lib{name}", "libpython3.so")))


def _venv_roots(prefix: str, site: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of a virtual environment. The project around the environment is not shown."""
    packages = tuple(directory for directory in site if is_within(directory, prefix))
    return (f"{prefix}/pyvenv.cfg", f"{prefix}/bin", *packages)


def _covered(path: str, roots: tuple[str, ...]) -> bool:
    return is_within(path, "/usr") or any(is_within(path, root) for root in roots)


def _minimal(roots: tuple[str, ...]) -> tuple[str, ...]:
    kept: list[str] = []
    for root in sorted(set(roots), key=lambda path: (path.count("/"), path)):
        if os.path.lexists(root) and not _covered(root, tuple(kept)):
            kept.append(root)
    return tuple(kept)


def _existing(paths: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for path in map(os.path.normpath, paths) if os.path.exists(path)))
