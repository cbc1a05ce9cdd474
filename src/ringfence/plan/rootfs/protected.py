"""Names what stays read-only inside a writable mount: files that a program on the host later runs or trusts (L01).

Decides which paths are held, that is, kept read-only, and by which operations; makes nothing. `host/mount_guard.py`
makes the placeholders and watches. Below the mount's first level only `.git` is searched; the scan at the end of a
sandbox (`host/mount_scan.py`) finds these names at any depth. Repositories around the mount are found by looking
upward: one `stat` for each folder on the way.
"""

from __future__ import annotations

import os
import stat
import sys

from ringfence.errors import PolicyError
from ringfence.plan.model import Pin, Protect
from ringfence.policy.secrets import read_head
from ringfence.shared.paths import is_below, is_within
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ringfence.plan.model import Op


# Held whether they exist or not: where a path does not exist, a placeholder is made on the host (A13, CVE-2026-25725).
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

# Every Python runs these files at its start, from any folder of its path: `pip install -e .` puts a project's folder on
# the path. The next `ringfence` would run them too. No placeholder: a folder of the same name would take precedence.
_STARTUP_ENDINGS = ("", ".py", ".pyc", ".so", ".abi3.so", f".{sys.implementation.cache_tag}-x86_64-linux-gnu.so")
STARTUP = tuple(f"{name}{ending}" for name in ("sitecustomize", "usercustomize") for ending in _STARTUP_ENDINGS)

# Held when they exist; a new file is reported at the end. A placeholder would get in the way of common tools.
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

# Inside a git directory. Lists of dangerous files often lack `commondir`: a file of that name makes git take hooks and
# configuration from wherever the file points. A file that says "." changes nothing; an empty file stops git.
_GIT_FILES = ("config", "commondir")
_GIT_DIRECTORIES = ("hooks",)
_GIT_IF_PRESENT = ("config.worktree", "worktrees")
GIT_MARKS = ("objects", "refs")  # what marks a git directory; a guest may remove HEAD, but not these folders
_MODULES = 64  # submodules searched; with more, all of .git/modules is read-only

_LISTED = 1000  # entries of a protected folder that are checked for hard links
_SEARCHED = 400_000  # entries of a mount that are searched for other names of these files

CONTENT = {"commondir": ".\n", ".mcp.json": '{"mcpServers": {}}\n'}  # of placeholders that must not be empty

NAMES = frozenset((*HELD_FILES, *HELD_DIRECTORIES, *HELD_IF_PRESENT))


@final
class Protected(Struct):
    """A path that must keep its name and inode from the start of the sandbox to the end."""

    root: str  # the mount's source on the host
    path: str  # on the host, below root
    target: str  # inside
    directory: bool
    content: str | None = None  # of a placeholder, where the path is missing at the start; None: no placeholder
    missing: bool = False  # when the plan was made
    hidden: bool = False  # covered, not read-only


@final
class Protection(Struct):
    """The operations that protect paths inside one writable mount, and the paths."""

    ops: tuple[Op, ...]
    paths: tuple[Protected, ...]


def protection(
    source: str, target: str, extra: tuple[str, ...], hidden: tuple[Protected, ...] = (), *, key: str
) -> Protection:
    """Return the operations that protect a writable directory `source`, shown at `target`.

    `extra`: relative paths to protect besides the built-in list. Every ancestor of a protected path below the mount is
    made a mount point of its own, or `mv .git .git2` would take the protection along (A12, kernel fact 10). The same is
    done for the ancestors of `hidden` paths, and for the marks of a git directory, by which the next sandbox finds it.
    Raises PolicyError for a path that leaves the mount, is a link or has a second name in the mount: it cannot be held.
    """
    wanted = _builtin(source)
    for relative in extra:
        _add(wanted, source, relative, key=key)
    pinned: dict[str, None] = {}
    paths: list[Protected] = []
    for relative in sorted(wanted, key=lambda name: (name.count("/"), name)):
        if any(is_below(relative, one) for one in wanted):
            continue  # below a folder that is read-only as a whole
        _refuse_links(source, relative, key=key)
        if not _can_be_held(f"{source}/{relative}", key=key):
            continue
        pinned |= _ancestors(relative) | _marks(source, relative)
        paths.append(_protected(source, target, relative, wanted[relative]))
    _refuse_second_names(source, paths, key=key)
    for one in hidden:
        relative = os.path.relpath(one.path, source)
        if not any(is_below(relative, other) for other in wanted):
            pinned |= _ancestors(relative)
    inside = target.lstrip("/")
    ops: list[Op] = [Pin(f"{inside}/{relative}") for relative in sorted(pinned, key=lambda name: name.count("/"))]
    ops += [Protect(path.target.lstrip("/")) for path in paths]
    return Protection(ops=tuple(ops), paths=tuple(paths))


def startup_files() -> list[str]:
    """Return the files that this Python runs at its next start, but for files in its own folders.

    Its own folders are protected as folders.
    """
    own = (f"{sys.prefix}/", f"{sys.base_prefix}/")
    # The `ringfence` command removes folders from its `sys.path`, but the next command starts with them again (L12).
    named = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    added = [folder for folder in (*sys.path, *named) if os.path.isabs(folder) and not folder.startswith(own)]
    places = [f"{folder}/{name}" for folder in added for name in STARTUP]
    return [path for path in places if os.path.lexists(path)]


def _marks(source: str, relative: str) -> dict[str, None]:
    """Return the marks of the git directory that holds `relative`, where `relative` is its hooks."""
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
    """Return the protected name that `source` is or lies in, or None: to show `source` writable would undo the list."""
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
        if is_within(source, path):
            return setting
    if _is_among_modules(source) and _git_directories_below(source) is None:
        return ".git/modules"  # with so many submodules it is read-only as a whole
    return None


def _builtin(source: str) -> dict[str, bool]:
    """Return the relative paths to protect, and whether the placeholder of a missing path is a directory."""
    wanted: dict[str, bool] = dict.fromkeys(HELD_FILES, False) | dict.fromkeys(HELD_DIRECTORIES, True)
    wanted |= {name: False for name in HELD_IF_PRESENT if os.path.lexists(f"{source}/{name}")}
    if os.path.basename(source) == ".git" or _is_git_directory(source):
        wanted |= _git_paths(source, "")
    wanted |= _dot_git(source)
    return wanted | _of_repositories_around(source)


def _of_repositories_around(source: str) -> dict[str, bool]:
    """Return the paths in the mount that belong to repositories around the mount, or to the mount as a repository.

    They are git directories and the files that git's configuration names.
    """
    wanted: dict[str, bool] = {}
    for path, setting in _named_by_git(source).items():
        if is_below(path, source):
            held = first_missing(path)  # of several missing folders only the first: a placeholder holds no other
            wanted[os.path.relpath(held, source)] = held != path or setting == HOOKS
    directories = [directory for root in _upward(source) for directory in _git_directories_of(root)]
    if _is_among_modules(source):
        directories += _git_directories_below(source) or []  # a source with too many is refused
    for directory in directories:
        if is_below(directory, source):
            wanted |= _git_paths(source, os.path.relpath(directory, source))
    return wanted


def _upward(path: str) -> Iterator[str]:
    """Yield `path` and every folder around it."""
    while path != "/":
        yield path
        path = os.path.dirname(path)
    yield path


def _is_among_modules(source: str) -> bool:
    """Return whether `source` is in, or is, a folder with the git directories of a repository's submodules."""
    above = (os.path.split(path) for path in _upward(source))
    return any(name == "modules" and _may_be_git_directory(folder) for folder, name in above)


def _dot_git(source: str) -> dict[str, bool]:
    """Return the `.git` at the mount's top where it is a file or link, to be held.

    No placeholder is made for a missing `.git`, because an empty file would break `git` for the whole folder; the end
    scan reports a new `.git`.
    """
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
        if is_below(common, source) and _common_directory(common) is None:
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
    """Return the folder of a linked worktree's hooks and configuration, which `commondir` in `directory` names.

    Return None where that is the directory itself: `commondir` is missing, or is the placeholder of another sandbox on
    the same folder, which says ".". To take the placeholder for a worktree's file would leave hooks and configuration
    open (A13).
    """
    try:
        text = _git_text(f"{directory}/commondir").strip()
    except OSError:
        return None
    common = os.path.realpath(os.path.join(directory, text)) if text else directory
    return None if common == os.path.realpath(directory) else common


def _git_directories_below(directory: str) -> list[str] | None:
    """Return the git directories of submodules; None for too many, or too many folders to search.

    Every folder is searched: a submodule's name may have slashes, and a guest can make the folder above a submodule
    look like a git directory.
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
    """Return the git directory and the common git directory of the repository with the working tree `root`.

    Return [] where `root` is no working tree.
    """
    dot_git = f"{root.rstrip('/')}/.git"
    try:
        mode = os.stat(dot_git).st_mode
    except OSError:
        return [root] if _is_git_directory(root) else []  # a bare repository is its own git directory
    directory = os.path.realpath(dot_git) if stat.S_ISDIR(mode) else _gitfile_target(dot_git)
    if directory is None:
        return []
    common = _common_directory(directory)
    return [directory] if common is None else [directory, common]


def _named_by_git(source: str) -> dict[str, str]:
    """Return the paths that git's configuration names as hooks or further configuration, each with its setting.

    The configuration is that of all repositories around `source`, or of `source` itself. The paths need not exist.
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
    """Return `path`, or the first part of the way to `path` that is no folder."""
    while not os.path.isdir(os.path.dirname(path)):
        path = os.path.dirname(path)
    return path


def _git_text(path: str) -> str:
    """Return a small file of git up to the first NUL, where git stops too. Never waits for a FIFO that a guest left."""
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
    """Return a relative path in normal form. Raises PolicyError for a path that is absolute, "." or leaves its root."""
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
    """Return the first part of the way from `source` to `relative` that is a symbolic link; None without a link."""
    path = source
    for part in relative.split("/"):
        path = f"{path}/{part}"
        if os.path.islink(path):
            return path
    return None


def _refuse_second_names(source: str, paths: list[Protected], *, key: str) -> None:
    """Refuse a protected file with a second name, which would be read-only by one name and writable by the other.

    A guest may have made the hard link when the file was not yet protected.
    """
    existing = (one.path for one in paths if not one.missing and not _is_environment(one.path))
    files = {inode: path for top in existing for path, inode in _of_several_names(top)}
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
    """Return whether `path` is an environment of Python, where package managers link every file to their cache."""
    return os.path.basename(path) not in (*NAMES, *_GIT_DIRECTORIES) and os.path.exists(f"{path}/pyvenv.cfg")


def _of_several_names(path: str, *, most: int = _LISTED) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the files at or below `path` with hard links, and their inodes.

    Checks at most `most` entries; the end scan checks all.
    """
    queue = [path]
    for current in queue:
        try:
            info = os.lstat(current)
            if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
                yield current, (info.st_dev, info.st_ino)
            if stat.S_ISDIR(info.st_mode) and len(queue) < most:
                queue += [f"{current}/{name}" for name in sorted(os.listdir(current))]
        except OSError:
            continue  # removed meanwhile, or not readable for us
        if len(queue) > most:
            del queue[most:]


def _can_be_held(path: str, *, key: str) -> bool:
    """Return False for a missing path that neither we nor a guest with our rights can make: nothing needs holding."""
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


# ── other files that git's configuration names, and git runs or trusts ────────────────────────────

# Ringfence reads the configuration itself: git would run programs that a repository names (`core.fsmonitor`), although
# no person vouched for that repository.

HOOKS = "core.hooksPath"
INCLUDED = "include.path"
_READ = 1 << 20  # bytes of one file
_FILES = 100  # files read; git itself stops at ten levels
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}


def named_by(configs: Sequence[str], root: str) -> Iterator[tuple[str, str]]:
    """Yield each path that `configs` and the user's own configuration name, with the setting's name.

    The path need not exist. `root`: the working tree. Conditions of `includeIf` are taken to be true.
    """
    queue = [*configs, *_own_configurations()]
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


def _own_configurations() -> list[str]:
    """Return the user's and the machine's configuration files.

    A relative `core.hooksPath` in these files means a folder of every repository.
    """
    own = os.environ.get("GIT_CONFIG_GLOBAL")
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    users = [own] if own else ["~/.gitconfig", f"{folder}/git/config"]
    return [os.path.expanduser(path) for path in (*users, os.environ.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig")]


def _text(path: str) -> str:
    """Return the text of a configuration file, or "" for a file that cannot be read, as git takes such a file."""
    try:
        return read_head(path, _READ).decode("utf-8-sig", "surrogateescape")
    except OSError:
        return ""


def settings(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield section, key and value of each setting. Leaves out settings without a value.

    Section and key are in lower case and without a subsection.
    """
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
    """Do the same as `partition("]")`, but skip a bracket in a quoted name."""
    name, _, quoted = rest.partition('"')
    index = 0
    while index < len(quoted) and quoted[index] != '"':
        index += 2 if quoted[index] == "\\" else 1
    return name, "]", quoted[index + 1 :].partition("]")[2]


def _value(text: str) -> str:
    """Return a value without quotes, escapes and a comment; "" for a value that is no path."""
    value = ""
    quoted = False
    signs = iter(text.strip())
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


# ── a person's own settings for Ringfence, which no guest may write ───────────────────────────────

# A guest that could write to these folders would choose what the next sandbox is or may do (L19). A folder that does
# not exist yet is held too: a guest could make the folder and a named policy in it.

_FOLDER = "ringfence"
_POLICIES = "policies"  # as cli/settings.py finds them
_MOST_POLICIES = 1000  # policies that are checked for links


def check_settings(source: str, home: str, *, key: str) -> None:
    """Raise PolicyError for a writable `source` that is a folder of Ringfence's settings, or lies in one."""
    for path in _settings(home):
        if is_within(source, path):
            raise PolicyError(
                f"{source} is never writable: policies of Ringfence's own are read from {path}",
                key=key,
                fix='mode = "copy"',
            )


def settings_within(source: str, home: str, stored: tuple[str, ...]) -> tuple[str, ...]:
    """Return the settings inside a writable folder `source`, as relative paths to be held read-only.

    For a path that does not exist, return its first missing folder, with a slash at the end. `stored`: more folders to
    hold.
    """
    found = dict.fromkeys(first_missing(path) for path in (*_settings(home), *stored) if is_within(path, source))
    return tuple(os.path.relpath(path, source) + ("" if os.path.lexists(path) else "/") for path in found)


def _settings(home: str) -> Iterator[str]:
    """Yield the paths of the settings, and the paths that links lead to: settings are often kept in another place."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    for above in dict.fromkeys((f"{home}/.config", os.path.normpath(named) if os.path.isabs(named) else "")):
        if above:
            folder = f"{above}/{_FOLDER}"
            yield from _named_and_real(folder)
            yield from _named_and_real(f"{folder}/{_POLICIES}")
            try:
                names = sorted(os.listdir(f"{folder}/{_POLICIES}"))[:_MOST_POLICIES]
            except OSError:
                continue
            for name in names:
                if os.path.islink(f"{folder}/{_POLICIES}/{name}"):
                    yield os.path.realpath(f"{folder}/{_POLICIES}/{name}")


def _named_and_real(path: str) -> Iterator[str]:
    yield path
    real = os.path.realpath(path)
    if real != path:
        yield real
