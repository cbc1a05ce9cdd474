"""Finds what the programs of `policy.commands` need, so that a view shows only these programs.

A program that is not in the view cannot be run. That does not stop code that the guest brings itself, nor a program
inside another program (A19): `--explain` prints the closure of each name, so that a person sees what the name brings.
"""

from __future__ import annotations

import os
import struct

from ringfence.errors import PolicyError
from ringfence.plan.rootfs.interpreter import SHARED_STORES
from ringfence.shared.paths import is_below, is_within
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.rootfs.interpreter import Interpreter


# ── what a native program needs to load: its ELF interpreter and its libraries ────────────────────

# Libraries are found as the dynamic linker finds them, for 64-bit little-endian files. Nothing is known about, and
# nothing is added for, any other file and a malformed file.

_DEFAULT_DIRECTORIES = (
    *("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"),
    "/usr/local/lib",
)
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 15, 29
_LARGEST = 1 << 20  # of any table read
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_X86_64_LIBC6 = 0x0303


@final
class Needs(Struct):
    """The ELF interpreter, libraries and search path that one ELF file names."""

    interpreter: str | None
    libraries: tuple[str, ...]
    search: tuple[str, ...]  # DT_RUNPATH or DT_RPATH, $ORIGIN filled in


NOTHING = Needs(interpreter=None, libraries=(), search=())


def needs(path: str) -> Needs:
    """Return what the real file `path` needs; NOTHING for a file that cannot be read. Reads headers only."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return NOTHING
    try:
        return _parse(fd, os.path.dirname(path))
    except (struct.error, OSError, OverflowError):
        return NOTHING
    finally:
        os.close(fd)


def linker_cache() -> dict[str, str]:
    """Return the path of each library by name, from ldconfig's cache; {} without a cache of the current format."""
    try:
        with open("/etc/ld.so.cache", "rb") as file:
            data = file.read(64 << 20)
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)  # a cache of the old format may come before
    if start < 0:
        return {}
    data = data[start:]
    found: dict[str, str] = {}
    try:
        (count,) = struct.unpack_from("<I", data, 20)
        for index in range(min(count, 1 << 16)):
            flags, key, value = struct.unpack_from("<iII", data, 48 + 24 * index)
            if flags == _X86_64_LIBC6:
                found.setdefault(_text(data, key), _text(data, value))
    except struct.error:
        return found
    return found


def find_library(name: str, search: tuple[str, ...], cache: dict[str, str]) -> str | None:
    """Return where the dynamic linker would find the library `name`; None when the linker would not find it."""
    if "/" in name:
        return name if os.path.exists(name) else None
    for directory in search:
        if os.path.exists(f"{directory}/{name}"):
            return f"{directory}/{name}"
    cached = cache.get(name)
    if cached is not None and os.path.exists(cached):
        return cached
    return next((f"{one}/{name}" for one in _DEFAULT_DIRECTORIES if os.path.exists(f"{one}/{name}")), None)


def _parse(fd: int, origin: str) -> Needs:
    header = os.pread(fd, 64, 0)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return NOTHING
    offset, size, count = struct.unpack_from("<Q", header, 32)[0], *struct.unpack_from("<HH", header, 54)
    if size != 56:
        return NOTHING
    table = os.pread(fd, size * count, offset)
    segments = [_segment(table, size * index) for index in range(count)]
    interpreter, dynamic = None, b""
    for kind, where, _, length in segments:
        if kind == _PT_INTERP:
            interpreter = os.fsdecode(os.pread(fd, min(length, 4096), where).rstrip(b"\0"))
        elif kind == _PT_DYNAMIC:
            dynamic = os.pread(fd, min(length, _LARGEST), where)
    entries = [struct.unpack_from("<qQ", dynamic, index) for index in range(0, len(dynamic) - 15, 16)]
    values = dict(entries)
    strings = _strings(fd, segments, values)
    libraries = tuple(_text(strings, value) for tag, value in entries if tag == _DT_NEEDED)
    search = values.get(_DT_RUNPATH, values.get(_DT_RPATH))
    listed = _text(strings, search) if search is not None else ""
    return Needs(interpreter=interpreter, libraries=libraries, search=_directories(listed, origin))


def _segment(table: bytes, at: int) -> tuple[int, int, int, int]:
    kind, _, where, address, _, length, _, _ = struct.unpack_from("<IIQQQQQQ", table, at)
    return kind, where, address, length


def _strings(fd: int, segments: list[tuple[int, int, int, int]], values: dict[int, int]) -> bytes:
    address = values.get(_DT_STRTAB)
    if address is None:
        return b""
    for kind, where, start, length in segments:
        if kind == _PT_LOAD and start <= address < start + length:
            return os.pread(fd, min(values.get(_DT_STRSZ, 0), _LARGEST), where + address - start)
    return b""


def _text(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    return os.fsdecode(data[at:end]) if 0 <= at < end else ""


def _directories(listed: str, origin: str) -> tuple[str, ...]:
    filled = listed.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
    return tuple(os.path.normpath(one) for one in filled.split(":") if one.startswith("/"))


PROGRAM_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/games")
_PYTHONS = ("python", "python3")
_SHEBANG = 512
_DEPTH = 8  # a script whose interpreter is a script, and so on

# What a program starts or reads beyond what its header or its first line names. Missing programs and folders are left
# out.
_BRINGS: dict[str, tuple[str, ...]] = {
    "git": ("/usr/lib/git-core", "/usr/libexec/git-core", "sh", "sed", "basename", "uname", "tr", "cat", "less"),
    "npm": ("node", "sh"),
    "npx": ("node", "sh"),
    "make": ("sh",),
    "gcc": ("/usr/lib/gcc", "/usr/libexec/gcc", "/usr/include", "/usr/local/include", "as", "ld"),
    "rustc": ("/usr/lib/rustlib", "cc"),
    "cargo": ("rustc",),
    "go": ("/usr/lib/go", "/usr/local/go"),
    "perl": ("/usr/lib/perl5",),
    "ruby": ("/usr/lib/ruby",),
    "php": ("/usr/lib/php",),
    "R": ("/usr/lib/R", "sh", "sed", "uname"),
    "tclsh": ("/usr/lib/tcltk",),
    "vim": ("/usr/lib/vim",),
    "file": ("/usr/lib/file",),
    "man": ("/usr/lib/man-db", "/usr/lib/groff"),
    "ssh": ("/usr/lib/openssh", "/usr/libexec/openssh"),
    "postgres": ("/usr/lib/postgresql",),
}
_ALIASES = {"cc": "gcc", "c++": "gcc", "g++": "gcc", "rview": "vim", "vi": "vim"}
# A program below one of these folders brings the next folder on its path: a JDK, an npm package.
_BUNDLES = (
    "/usr/lib/jvm",
    "/usr/lib/node_modules",
    "/usr/local/lib/node_modules",
    "/usr/share/nodejs",
    "/usr/lib/llvm",
)


@final
class ShownProgram(Struct):
    """A named program and all that it brings. Paths are the host's; the guest sees the same paths."""

    name: str
    path: str
    files: tuple[str, ...]  # real files: programs, libraries, the ELF interpreter
    links: tuple[tuple[str, str], ...]  # link, and its text
    directories: tuple[str, ...]  # shown as a whole
    programs: tuple[str, ...]  # other programs that it starts
    missing: tuple[str, ...]  # libraries that the linker would not find either


@final
class Closure(Struct):
    """All named programs with what they bring."""

    programs: tuple[ShownProgram, ...]
    python: bool  # the interpreter itself is among them

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for program in self.programs for path in program.files))

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        return tuple(dict.fromkeys(link for program in self.programs for link in program.links))

    @property
    def directories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for program in self.programs for path in program.directories))

    def explain_lines(self) -> tuple[str, ...]:
        """Return the lines of --explain: a line for each program and for each kind of thing that it brings."""
        lines: list[str] = []
        for program in self.programs:
            lines.append(f"{program.name}: {program.path}")
            for title, values in (
                ("starts", program.programs),
                ("folders", program.directories),
                ("files", tuple(path for path in program.files if path != program.path)),
                ("links", tuple(f"{link} -> {text}" for link, text in program.links if not link.startswith("/lib"))),
                ("not found on this host", program.missing),
            ):
                lines += [f"  {title}: {', '.join(values)}"] if values else []
        return tuple(lines)


def closure(names: tuple[str, ...], interpreter: Interpreter) -> Closure:
    """Return what the programs `names` need. Raises PolicyError for a name that this host has no program for.

    Costs a few milliseconds for each program that is not a plain binary; meant to be done once for a policy.
    """
    finder = _LibraryFinder(interpreter)
    for index, name in enumerate(names):
        if finder.find(name) is None:
            raise _unknown(name, index, finder)
        finder.add(name)
    return Closure(programs=tuple(finder.programs.values()), python=finder.python)


def library_directories() -> tuple[str, ...]:
    """Return the folders of libraries and data. They are shown as a whole: programs load files there by name."""
    libraries = [f"/usr/lib/{name}" for name in _listed("/usr/lib") if "-linux-" in name]
    data = [f"/usr/lib/{name}" for name in ("locale", "ssl", "terminfo", "os-release", "mime", "sasl2")]
    if os.path.exists("/usr/lib/libc.so.6"):  # distributions that keep all libraries in one folder
        libraries, data = ["/usr/lib"], []
    named = (*libraries, "/usr/lib64", "/usr/lib32", "/usr/libx32", *data, "/usr/share")
    return tuple(path for path in named if os.path.exists(path) and not os.path.islink(path))


def roots_without_programs(interpreter: Interpreter, named: Closure) -> tuple[str, ...]:
    """Return the parts of the interpreter's roots that are shown when programs are listed: all but program folders.

    Raises PolicyError for an interpreter in a store where programs and libraries are not in separate folders.
    """
    kept: list[str] = []
    for root in interpreter.roots:
        if root in SHARED_STORES:
            raise PolicyError(
                f"commands cannot be limited: the interpreter shares {root} with all programs",
                key="commands",
                fix='commands = "any", or run Ringfence with an interpreter outside that store',
            )
        if os.path.isdir(f"{root}/bin"):
            kept += [f"{root}/{name}" for name in _listed(root) if name not in ("bin", "sbin", "libexec", "condabin")]
        elif os.path.basename(root) != "bin" and (named.python or root != interpreter.executable):
            kept.append(root)
    return tuple(kept)


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _unknown(name: str, index: int, finder: _LibraryFinder) -> PolicyError:
    from ringfence.text import nearest

    near = nearest(name, finder.all_names())
    return PolicyError(
        f"no program {name!r} on this host: it is in none of {', '.join(finder.path)}",
        key=f"commands[{index}]",
        fix=f"install it, or did you mean {near}?" if near else "install it, or leave it out",
    )


class _LibraryFinder:
    """Collects programs by name, each once."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self.path = (*interpreter.programs, *PROGRAM_DIRECTORIES)
        self.programs: dict[str, ShownProgram] = {}
        self.python = False
        self._cache: dict[str, str] | None = None

    def find(self, name: str) -> str | None:
        """Return the program's path. `python3` is the caller's interpreter, whatever else is installed."""
        if name in _PYTHONS:
            return self.interpreter.command
        for directory in self.path:
            path = f"{directory}/{name}"
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
        return None

    def all_names(self) -> list[str]:
        found: set[str] = set(_PYTHONS)
        for directory in self.path:
            found.update(_listed(directory))
        return sorted(found)

    def add(self, name: str, depth: int = 0) -> None:
        path = self.find(name)
        if path is None or name in self.programs or depth > _DEPTH:
            return
        parts = _Parts()
        real = parts.follow(path)
        started: list[str] = []
        self._pythonic(name, real, parts)
        self._load(real, parts)
        self._scripted(real, parts, started)
        self._bundled(real, parts)
        self._known(name, real, parts, started)
        self.programs[name] = ShownProgram(
            name=name,
            path=path,
            files=tuple(dict.fromkeys((real, *parts.files))),
            links=tuple(dict.fromkeys(parts.links)),
            directories=tuple(dict.fromkeys(parts.directories)),
            programs=tuple(dict.fromkeys(started)),
            missing=tuple(dict.fromkeys(parts.missing)),
        )
        for other in started:
            self.add(other, depth + 1)

    def _load(self, real: str, parts: _Parts) -> None:
        """Add the ELF interpreter and every library of a program, and the libraries of these in turn."""
        if self._cache is None:
            self._cache = linker_cache()
        queue: list[tuple[str, tuple[str, ...]]] = [(real, ())]
        seen = {real}
        for path, inherited in queue:
            need = needs(path)
            search = (*need.search, *inherited)
            wanted = [find_library(name, search, self._cache) or name for name in need.libraries]
            for library in (*([need.interpreter] if need.interpreter else []), *wanted):
                if not library.startswith("/") or not os.path.exists(library):
                    parts.missing.append(library)
                    continue
                target = parts.follow(library)
                if target not in seen:
                    seen.add(target)
                    parts.files.append(target)
                    queue.append((target, search))

    def _scripted(self, real: str, parts: _Parts, started: list[str]) -> None:
        """Add the interpreter that a script's first line names, and behind `env` the program that `env` looks up."""
        words = _shebang(real)
        if not words:
            return
        runner = words[0]
        if self._is_python(runner):
            started.append("python3")
        elif os.path.dirname(runner) in self.path:
            started.append(os.path.basename(runner))
        elif os.path.exists(runner):
            target = parts.follow(runner)
            parts.files.append(target)
            self._load(target, parts)
        if os.path.basename(runner) == "env":
            started += [word for word in words[1:] if not word.startswith("-") and "=" not in word][:1]

    def _bundled(self, real: str, parts: _Parts) -> None:
        for bundle in _BUNDLES:
            if is_below(real, bundle):
                name = real[len(bundle) + 1 :].split("/", maxsplit=1)[0]
                parts.directories.append(f"{bundle}/{name}")
                break
            if bundle == "/usr/lib/llvm" and real.startswith("/usr/lib/llvm-"):
                parts.directories.append("/".join(real.split("/")[:4]))

    def _known(self, name: str, real: str, parts: _Parts, started: list[str]) -> None:
        for key in dict.fromkeys((name, _ALIASES.get(name, name), _without_version(os.path.basename(real)))):
            for item in _BRINGS.get(key, ()):
                if not item.startswith("/"):
                    started += [item] if self.find(item) else []
                elif os.path.isdir(item):
                    parts.directories.append(item)

    def _pythonic(self, name: str, real: str, parts: _Parts) -> None:
        """Add the library that a Python brings, and all names of the caller's Python."""
        if name in _PYTHONS or real == self.interpreter.executable:
            self.python = True
            here = os.path.dirname(self.interpreter.command)
            for other in (*_PYTHONS, os.path.basename(real)):
                if os.path.realpath(f"{here}/{other}") == real:
                    parts.follow(f"{here}/{other}")
            parts.directories += [*self.interpreter.stdlib, *self.interpreter.site_packages]
        elif os.path.dirname(real) == "/usr/bin" and _without_version(os.path.basename(real)) == "python":
            version = os.path.basename(real)
            named = (f"/usr/lib/{version}", "/usr/lib/python3", f"/usr/lib64/{version}", f"/usr/local/lib/{version}")
            parts.directories += [path for path in named if os.path.isdir(path)]

    def _is_python(self, runner: str) -> bool:
        return os.path.realpath(runner) == self.interpreter.executable and is_within(runner, self.interpreter.prefix)


class _Parts:
    """The files, links and folders that a program needs, while they are collected."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.directories: list[str] = []
        self.missing: list[str] = []

    def follow(self, path: str) -> str:
        """Return the real file behind `path`. Keeps every link on the way, links to folders too."""
        todo = path.strip("/").split("/")
        real = ""
        for _ in range(256):
            if not todo:
                return real
            part = todo.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                real = os.path.dirname(real)
                continue
            here = f"{real.rstrip('/')}/{part}"
            if not os.path.islink(here):
                real = here
                continue
            text = os.readlink(here)
            self.links.append((here, text))
            todo = [*text.split("/"), *todo]
            real = "/" if text.startswith("/") else real or "/"
        return os.path.realpath(path)


def _shebang(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            line = file.read(_SHEBANG).split(b"\n", 1)[0]
    except OSError:
        return []
    return os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []


def _without_version(name: str) -> str:
    """Return the common name of a program: `python` for `python3.11`, `gcc` for `x86_64-linux-gnu-gcc-12`."""
    base = name.rsplit("-linux-gnu-", 1)[-1]
    return base.rstrip("0123456789.").rstrip("-") or base
