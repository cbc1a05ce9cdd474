"""Names what stays read-only inside a writable mount: files that a program on the host later runs or believes (L01).

Decides which paths are held and by which operations; makes nothing. backends/process/protect.py makes the placeholders
and watches. Below the mount's first level only `.git` is looked into; the end scan finds these names at any depth.
Repositories that the mount is inside of are found by looking upward: one `stat` for each folder on the way.
"""

from __future__ import annotations

import os
import stat
import sys

from ringfence.errors import PolicyError
from ringfence.plan.model import Pin, Protect
from ringfence.policy.host_paths import within
from ringfence.policy.secrets import read_head
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ringfence.plan.model import Op


# Held whether they exist or not: a placeholder is made on the host for what does not (A13, CVE-2026-25725).
HELD_FILES = (
    ".mcp.json",
    ".envrc",
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".zlogin",
)
HELD_DIRECTORIES = (".vscode", ".idea", ".claude", ".cursor", ".devcontainer")

# Every Python runs these at its start, from any folder of its path: `pip install -e .` makes one of a project's. The
# next `ringfence` would, too. No placeholder: a folder of the same name would go before it.
_STARTUP_ENDINGS = ("", ".py", ".pyc", ".so", ".abi3.so", f".{sys.implementation.cache_tag}-x86_64-linux-gnu.so")
STARTUP = tuple(f"{name}{ending}" for name in ("sitecustomize", "usercustomize") for ending in _STARTUP_ENDINGS)

# Held when they exist; one that appears is reported at the end. A placeholder would get in the way of common tools.
HELD_IF_PRESENT = (
    ".gitconfig",
    ".npmrc",
    ".yarnrc",
    ".yarnrc.yml",
    ".pnpmfile.cjs",
    ".devcontainer.json",
    ".exrc",
    ".nvim.lua",
    ".vimrc",
    ".husky",
    ".githooks",
    ".gemini",
    ".codex",
    ".windsurf",
    ".zed",
    ".kiro",
    ".fish",
    *STARTUP,
)

# Inside a git directory. `commondir` is the one nobody lists: a file of that name makes git take hooks and
# configuration from wherever it points. "." in it means what its absence means; an empty one stops git.
_GIT_FILES = ("config", "commondir")
_GIT_DIRECTORIES = ("hooks",)
_GIT_IF_PRESENT = ("config.worktree", "worktrees")
GIT_MARKS = ("objects", "refs")  # by which a git directory is known; a guest may take its HEAD away, but not these
_MODULES = 64  # submodules looked into; with more, all of .git/modules is read-only

_LISTED, _SEARCHED = 1000, 400_000  # entries of a protected folder, and of a mount, that are looked at for hard links

CONTENT = {"commondir": ".\n", ".mcp.json": '{"mcpServers": {}}\n'}  # of placeholders that may not be empty

NAMES = frozenset((*HELD_FILES, *HELD_DIRECTORIES, *HELD_IF_PRESENT))


@final
class Protected(Struct):
    """One path that must stay what it was when the sandbox started: same inode under the same name."""

    root: str  # the mount's source on the host
    path: str  # on the host, below root
    target: str  # inside
    directory: bool
    content: str | None = None  # of a placeholder, should the path be missing at the start; None: then nothing is held
    missing: bool = False  # when the plan was made
    hidden: bool = False  # covered, not read-only


@final
class Protection(Struct):
    """What is done inside one writable mount."""

    ops: tuple[Op, ...]
    paths: tuple[Protected, ...]


def protection(
    source: str, target: str, extra: tuple[str, ...], hidden: tuple[Protected, ...] = (), *, key: str
) -> Protection:
    """Operations for a writable directory `source` shown at `target`. `extra`: relative paths besides the built-in.

    Every ancestor below the mount is made a mount point of its own, or `mv .git .git2` would take the protection along
    (A12, kernel fact 10); so are those of `hidden` paths, and what a git directory is known by: the next sandbox looks
    for it.
    Raises PolicyError for a path that leaves the mount, is a link or has a second name there: none can be held.
    """
    wanted = _builtin(source)
    for relative in extra:
        _add(wanted, source, relative, key=key)
    pinned: dict[str, None] = {}
    paths: list[Protected] = []
    for relative in sorted(wanted, key=lambda name: (name.count("/"), name)):
        if any(relative.startswith(f"{one}/") for one in wanted):
            continue  # below one that is read-only as a whole
        _refuse_links(source, relative, key=key)
        if not _can_be_held(f"{source}/{relative}", key=key):
            continue
        pinned |= _ancestors(relative) | _marks(source, relative)
        paths.append(_protected(source, target, relative, wanted[relative]))
    _refuse_second_names(source, paths, key=key)
    for one in hidden:
        relative = os.path.relpath(one.path, source)
        if not any(relative.startswith(f"{other}/") for other in wanted):
            pinned |= _ancestors(relative)
    inside = target.lstrip("/")
    ops: list[Op] = [Pin(f"{inside}/{relative}") for relative in sorted(pinned, key=lambda name: name.count("/"))]
    ops += [Protect(path.target.lstrip("/")) for path in paths]
    return Protection(ops=tuple(ops), paths=tuple(paths))


def startup_files() -> list[str]:
    """What the Python that runs this would run at its next start, in folders that are not its own: those are held."""
    own = (f"{sys.prefix}/", f"{sys.base_prefix}/")
    # A command has left out of `sys.path` what the next one starts with all the same (L12).
    named = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    added = [folder for folder in (*sys.path, *named) if os.path.isabs(folder) and not folder.startswith(own)]
    places = [f"{folder}/{name}" for folder in added for name in STARTUP]
    return [path for path in places if os.path.lexists(path)]


def _marks(source: str, relative: str) -> dict[str, None]:
    """What tells that the folder of `relative` is a git directory, where that holds hooks."""
    folder, name = os.path.split(relative)
    if name not in _GIT_DIRECTORIES:
        return {}
    marks = [os.path.join(folder, mark) for mark in GIT_MARKS]
    return dict.fromkeys(
        mark for mark in marks if os.path.isdir(f"{source}/{mark}") and not os.path.islink(f"{source}/{mark}")
    )


def _ancestors(relative: str) -> dict[str, None]:
    parts = relative.split("/")
    return dict.fromkeys("/".join(parts[:depth]) for depth in range(1, len(parts)))


def is_protected_source(source: str) -> str | None:
    """The protected name that `source` itself is or lies in, if any: showing it writable would undo the list."""
    parts = source.strip("/").split("/")
    for index, part in enumerate(parts):
        if part in HELD_DIRECTORIES or part in HELD_FILES:
            return part
        if part == ".git" and parts[index + 1 : index + 2] in ([name] for name in (*_GIT_DIRECTORIES, *_GIT_FILES)):
            return f".git/{parts[index + 1]}"
    for path in _upward(source):
        folder, name = os.path.split(path)
        if name in (*_GIT_DIRECTORIES, *_GIT_FILES, *_GIT_IF_PRESENT) and _may_be_git_directory(folder):
            return f"{os.path.basename(folder)}/{name}"
    for path, setting in _named_by_git(source).items():
        if source == path or source.startswith(f"{path}/"):
            return setting
    if _is_among_modules(source) and _git_directories_below(source) is None:
        return ".git/modules"  # which is read-only as a whole then
    return None


def _builtin(source: str) -> dict[str, bool]:
    """Relative path → whether it is a directory where it does not exist yet."""
    wanted: dict[str, bool] = dict.fromkeys(HELD_FILES, False) | dict.fromkeys(HELD_DIRECTORIES, True)
    wanted |= {name: False for name in HELD_IF_PRESENT if os.path.lexists(f"{source}/{name}")}
    if os.path.basename(source) == ".git" or _is_git_directory(source):
        wanted |= _git_paths(source, "")
    wanted |= _dot_git(source)
    return wanted | _of_repositories_around(source)


def _of_repositories_around(source: str) -> dict[str, bool]:
    """What lies in the mount of repositories that it is in, or is: git directories, and what configuration names."""

    wanted: dict[str, bool] = {}
    for path, setting in _named_by_git(source).items():
        if path.startswith(f"{source}/"):
            held = first_missing(path)  # of several missing folders the first: no placeholder lies in another
            wanted[os.path.relpath(held, source)] = held != path or setting == HOOKS
    directories = [directory for root in _upward(source) for directory in _git_directories_of(root)]
    if _is_among_modules(source):
        directories += _git_directories_below(source) or []  # too many: such a source is refused
    for directory in directories:
        if directory.startswith(f"{source}/"):
            wanted |= _git_paths(source, os.path.relpath(directory, source))
    return wanted


def _upward(path: str) -> Iterator[str]:
    """It, and every folder it is in."""
    while path != "/":
        yield path
        path = os.path.dirname(path)
    yield path


def _is_among_modules(source: str) -> bool:
    """Whether it is, or is in, the folder where a repository has the git directories of its submodules."""
    above = (os.path.split(path) for path in _upward(source))
    return any(name == "modules" and _may_be_git_directory(folder) for folder, name in above)


def _dot_git(source: str) -> dict[str, bool]:
    """A `.git` in the mount's top that is no folder. None there: none is made, because an empty one would break `git`
    for the whole folder; the end scan reports one that appears."""
    dot_git = f"{source}/.git"
    return (
        {".git": False} if os.path.lexists(dot_git) and (os.path.islink(dot_git) or not os.path.isdir(dot_git)) else {}
    )


def _git_paths(source: str, relative: str) -> dict[str, bool]:
    def inside(name: str) -> str:
        return f"{relative}/{name}" if relative else name

    common = _common_directory(os.path.normpath(f"{source}/{relative}"))
    if common is not None:
        held = [inside(n) for n in ("commondir", "config.worktree") if os.path.lexists(f"{source}/{inside(n)}")]
        elsewhere = {}
        if common.startswith(f"{source}/") and _common_directory(common) is None:
            elsewhere = _git_paths(source, os.path.relpath(common, source))
        return dict.fromkeys(held, False) | elsewhere
    wanted = {inside(name): False for name in _GIT_FILES} | {inside(name): True for name in _GIT_DIRECTORIES}
    wanted |= {inside(name): False for name in _GIT_IF_PRESENT if os.path.lexists(f"{source}/{inside(name)}")}
    modules = _git_directories_below(f"{source}/{inside('modules')}")
    if modules is None:
        return wanted | {inside("modules"): True}
    for module in modules:
        wanted |= _git_paths(source, os.path.relpath(module, source))
    return wanted


def _common_directory(directory: str) -> str | None:
    """Where a linked worktree has its hooks and configuration: what `commondir` in its git directory names.

    None where that is the directory itself: no such file, or the placeholder of another sandbox that runs on the same
    folder, which says ".". To take that one for a worktree's would leave hooks and configuration open (A13).
    """
    try:
        text = _git_text(f"{directory}/commondir").strip()
    except OSError:
        return None
    common = os.path.realpath(os.path.join(directory, text)) if text else directory
    return None if common == os.path.realpath(directory) else common


def _git_directories_below(directory: str) -> list[str] | None:
    """Git directories of submodules; None: too many, or too many folders to look into.

    Every folder is looked into: a name may have slashes, and a guest can make the folder above a submodule look like a
    git directory.
    """
    found: list[str] = []
    queue = [directory]
    for current in queue:
        try:
            names = sorted(entry.name for entry in os.scandir(current) if entry.is_dir(follow_symlinks=False))
        except OSError:
            continue
        is_git = _is_git_directory(current)
        for name in names:
            path = f"{current}/{name}"
            if _is_git_directory(path):
                found.append(path)
            elif is_git and name in GIT_MARKS:
                continue
            queue.append(path)
        if len(found) > _MODULES or len(queue) > 16 * _MODULES:
            return None
    return found


def _is_git_directory(path: str) -> bool:
    return all(os.path.lexists(f"{path}/{name}") for name in GIT_MARKS)


def _may_be_git_directory(path: str) -> bool:
    return os.path.basename(path) == ".git" or _is_git_directory(path)


def _git_directories_of(root: str) -> list[str]:
    """Where the repository whose working tree is `root` has its own and the common git directory; [] if it is none."""
    dot_git = f"{root.rstrip('/')}/.git"
    try:
        mode = os.stat(dot_git).st_mode
    except OSError:
        return [root] if _is_git_directory(root) else []  # a bare one is its own
    directory = os.path.realpath(dot_git) if stat.S_ISDIR(mode) else _gitfile_target(dot_git)
    if directory is None:
        return []
    common = _common_directory(directory)
    return [directory] if common is None else [directory, common]


def _named_by_git(source: str) -> dict[str, str]:
    """Paths that git's configuration of the repositories that `source` is in, or is, names as hooks or as more of it.

    Each with the setting that names it; it need not exist.
    """

    found: dict[str, str] = {}
    for root in _upward(source):
        directories = _git_directories_of(root)
        if directories:
            configs = [f"{directory}/{name}" for directory in directories for name in ("config", "config.worktree")]
            for setting, path in named_by(configs, root):
                found |= dict.fromkeys((os.path.normpath(path), os.path.realpath(path)), setting)
    return found


def first_missing(path: str) -> str:
    """It, or the first part of the way that is no folder."""
    while not os.path.isdir(os.path.dirname(path)):
        path = os.path.dirname(path)
    return path


def _git_text(path: str) -> str:
    """A small file of git's up to the first NUL, where git stops too. A FIFO that a guest left is not waited for."""
    return os.fsdecode(read_head(path, 4096).partition(b"\0")[0])


def _gitfile_target(path: str) -> str | None:
    try:
        text = _git_text(path)
    except OSError:
        return None
    if not text.startswith("gitdir:"):
        return None
    return os.path.realpath(os.path.join(os.path.dirname(path), text[7:].strip()))


def _add(wanted: dict[str, bool], source: str, relative: str, *, key: str) -> None:
    name = beneath(relative, key=key)
    wanted[name] = relative.endswith("/") or os.path.isdir(f"{source}/{name}")
    if not os.path.isdir(os.path.dirname(f"{source}/{name}")):
        raise PolicyError(
            f"{relative!r} cannot be protected: its folder does not exist in {source}",
            key=key,
            fix="protect the first folder of the path that exists, or make the folder",
        )


def beneath(relative: str, *, key: str) -> str:
    """A relative path in normal form; PolicyError when it is absolute, leaves its root, or is a pattern's root."""
    name = os.path.normpath(relative) if relative else ""
    if not name or name.startswith(("/", "../")) or name in (".", "..") or "\0" in name:
        raise PolicyError(
            f"{relative!r} is not a path below the mount's source", key=key, fix="write it relative to the source"
        )
    if ".." in relative.split("/"):
        raise PolicyError(f"{relative!r} has '..' in it", key=key, fix=f"write {name!r}")
    return name


def _refuse_links(source: str, relative: str, *, key: str) -> None:
    link = first_link(source, relative)
    if link is not None:
        raise PolicyError(
            f"{link} is a symbolic link, which the guest could replace; a protected path must be a file or folder",
            key=key,
            fix='use mode "copy", or replace the link by what it leads to',
        )


def first_link(source: str, relative: str) -> str | None:
    """The first part of the way that is a symbolic link."""
    path = source
    for part in relative.split("/"):
        path = f"{path}/{part}"
        if os.path.islink(path):
            return path
    return None


def _refuse_second_names(source: str, paths: list[Protected], *, key: str) -> None:
    """A hard link that a guest made when nobody held the file, say: read-only by one name, writable by the other."""
    there = (one.path for one in paths if not one.missing and not _is_environment(one.path))
    files = {inode: path for top in there for path, inode in _of_several_names(top)}
    if not files:
        return
    held = tuple(f"{one.path}/" for one in paths)
    for path, inode in _of_several_names(source, most=_SEARCHED):
        if inode in files and not f"{path}/".startswith(held):
            raise PolicyError(
                f"{files[inode]} cannot be protected: {path} is the same file, and a guest could change it there",
                key=key,
                fix=f'remove {path}, or use mode "ro" or "copy"',
            )


def _is_environment(path: str) -> bool:
    """Whether it is one of Python, where package managers link every file to their cache."""
    return os.path.basename(path) not in (*NAMES, *_GIT_DIRECTORIES) and os.path.exists(f"{path}/pyvenv.cfg")


def _of_several_names(path: str, *, most: int = _LISTED) -> Iterator[tuple[str, tuple[int, int]]]:
    """Files at or below `path` with hard links, and their inodes. Looks at `most` entries; the end scan at all."""
    queue = [path]
    for current in queue:
        try:
            info = os.lstat(current)
            if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
                yield current, (info.st_dev, info.st_ino)
            if stat.S_ISDIR(info.st_mode) and len(queue) < most:
                queue += [f"{current}/{name}" for name in sorted(os.listdir(current))]
        except OSError:
            continue  # it went away, or is not ours to look into
        if len(queue) > most:
            del queue[most:]


def _can_be_held(path: str, *, key: str) -> bool:
    """False when it is missing where neither we nor a guest with our rights can make it: there is nothing to hold."""
    folder = os.path.dirname(path)
    if os.path.lexists(path) or os.access(folder, os.W_OK | os.X_OK):
        return True
    if os.statvfs(folder).f_flag & os.ST_RDONLY or os.stat(folder).st_uid != os.getuid():
        return False
    raise PolicyError(
        f"{path} cannot be protected: its folder is not writable, and a guest with your rights could make it so",
        key=key,
        fix=f'chmod u+wx {folder}, or use mode "ro" or "copy"',
    )


def _protected(source: str, target: str, relative: str, as_directory: bool) -> Protected:
    path = f"{source}/{relative}"
    try:
        as_directory = stat.S_ISDIR(os.lstat(path).st_mode)
        missing = False
    except OSError:
        missing = True
    return Protected(
        root=source,
        path=path,
        target=f"{target.rstrip('/')}/{relative}",
        directory=as_directory,
        content="" if as_directory else CONTENT.get(os.path.basename(relative), ""),
        missing=missing,
    )


# ── other files that git's configuration names, and git runs or believes ──────────────────────────

# Ringfence reads the configuration itself: git would run what a repository tells it to (`core.fsmonitor`), although no
# person vouched for that repository.

HOOKS = "core.hooksPath"
INCLUDED = "include.path"
_READ = 1 << 20  # bytes of one file
_FILES = 100  # looked into; git itself stops at ten levels
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}


def named_by(configs: Sequence[str], root: str) -> Iterator[tuple[str, str]]:
    """Each path that `configs` and the user's own configuration name, existing or not, with the setting's name.

    `root`: the working tree. Conditions of `includeIf` are taken to hold.
    """
    queue = [*configs, *_own()]
    seen: set[str] = set()
    for config in queue:
        if config in seen or len(seen) >= _FILES:
            continue
        seen.add(config)
        for section, key, value in settings(_text(config)):
            path = os.path.expanduser(value)
            if (section, key) == ("core", "hookspath"):
                yield HOOKS, os.path.join(root, path)
            elif section in ("include", "includeif") and key == "path":
                path = os.path.join(os.path.dirname(config), path)
                yield INCLUDED, path
                queue.append(path)


def _own() -> list[str]:
    """The user's and the machine's: a relative `core.hooksPath` in them means a folder of every repository."""
    own = os.environ.get("GIT_CONFIG_GLOBAL")
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    users = [own] if own else ["~/.gitconfig", f"{folder}/git/config"]
    return [os.path.expanduser(path) for path in (*users, os.environ.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig")]


def _text(path: str) -> str:
    """Nothing for what cannot be read: git would not read it either."""
    try:
        return read_head(path, _READ).decode("utf-8-sig", "surrogateescape")
    except OSError:
        return ""  # as git takes it


def settings(text: str) -> Iterator[tuple[str, str, str]]:
    """Section, key, both in lower case and without a subsection, and value; those without a value are left out."""
    section = ""
    lines = iter(text.replace("\r\n", "\n").split("\n"))
    for line in lines:
        rest = line.strip()
        while _goes_on(rest):
            rest = rest[:-1] + next(lines, "")
        if rest.startswith("["):
            name, _, rest = rest[1:].partition("]") if '"' not in rest.partition("]")[0] else _subsection(rest[1:])
            section = name.split('"')[0].strip().lower().partition(".")[0]
        key, equals, value = rest.partition("=")
        if equals and not key.lstrip().startswith(("#", ";")) and (value := _value(value)):
            yield section, key.strip().lower(), value


def _goes_on(line: str) -> bool:
    return line.endswith("\\") and not line.startswith(("#", ";")) and (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _subsection(rest: str) -> tuple[str, str, str]:
    """As `partition("]")`, where the name in quotes may have a bracket in it."""
    name, _, quoted = rest.partition('"')
    index = 0
    while index < len(quoted) and quoted[index] != '"':
        index += 2 if quoted[index] == "\\" else 1
    return name, "]", quoted[index + 1 :].partition("]")[2]


def _value(text: str) -> str:
    """Without quotes, escapes and a comment. "" for what is no path."""
    value, quoted, signs = "", False, iter(text.strip())
    kept = 0  # blanks at the end count only in quotes
    for sign in signs:
        if sign == "\\":
            escaped = next(signs, "")
            value += _ESCAPES.get(escaped, escaped)
        elif sign == '"':
            quoted = not quoted
        elif sign in "#;" and not quoted:
            break
        else:
            value += sign
            if sign.isspace() and not quoted:
                continue
        kept = len(value)
    return "" if "\0" in value else value[:kept]


# ── Ringfence's own settings of a person: no guest may write there ────────────────────────────────

# A guest that could write there would choose what the next sandbox is or may do (L19). The same holds for a folder
# that does not exist yet: a policy by name could be made in it.

_FOLDER = "ringfence"
_POLICIES = "policies"  # as cli/policies.py finds them
_MOST_POLICIES = 1000  # policies that are looked at for where they lead


def check_settings(source: str, home: str, *, key: str) -> None:
    """Raises PolicyError where a writable `source` is one of these, or lies in one."""
    for path in _settings(home):
        if within(source, path):
            raise PolicyError(
                f"{source} is never writable: policies of Ringfence's own are read from {path}",
                key=key,
                fix='mode = "copy"',
            )


def settings_within(source: str, home: str, stored: tuple[str, ...]) -> tuple[str, ...]:
    """What is to be held read-only of a writable folder that has them in it, as paths relative to it.

    Of what is not there the first folder that is missing, with a slash at its end. `stored`: more such folders.
    """
    found = dict.fromkeys(first_missing(path) for path in (*_settings(home), *stored) if within(path, source))
    return tuple(os.path.relpath(path, source) + ("" if os.path.lexists(path) else "/") for path in found)


def _settings(home: str) -> Iterator[str]:
    """By their own names and by where links lead: a folder of settings is often kept in another place."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    for above in dict.fromkeys((f"{home}/.config", os.path.normpath(named) if os.path.isabs(named) else "")):
        if above:
            folder = f"{above}/{_FOLDER}"
            yield from _both(folder)
            yield from _both(f"{folder}/{_POLICIES}")
            try:
                names = sorted(os.listdir(f"{folder}/{_POLICIES}"))[:_MOST_POLICIES]
            except OSError:
                continue
            for name in names:
                if os.path.islink(f"{folder}/{_POLICIES}/{name}"):
                    yield os.path.realpath(f"{folder}/{_POLICIES}/{name}")


def _both(path: str) -> Iterator[str]:
    yield path
    real = os.path.realpath(path)
    if real != path:
        yield real
