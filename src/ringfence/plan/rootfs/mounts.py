"""Places a policy's mounts and the interpreter's directories in the guest's root; refuses what would break isolation.

Each source is resolved once, here, and no link that a guest could have made is followed (A11, L16); the process that
binds the source compares its inode with the inode seen here. Only host metadata is read.
"""

from __future__ import annotations

import os
import stat

from ringfence.errors import PolicyError
from ringfence.plan.model import Bind, File, Folder, Hide, Overlay
from ringfence.plan.rootfs.interpreter import HELPERS
from ringfence.plan.rootfs.protected import (
    Protected,
    beneath,
    check_settings,
    first_link,
    is_protected_source,
    protection,
    settings_within,
    startup_files,
)
from ringfence.policy.host_paths import LinkError, resolve
from ringfence.shared import proc
from ringfence.shared.paths import is_below, is_within
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.plan.model import Op
    from ringfence.plan.rootfs.interpreter import Interpreter
    from ringfence.policy.model import Mount
    from ringfence.values import MountMode


# ── what `hide` takes away below the source of one mount ──────────────────────────────────────────

# In read-only mounts and copies a layer has whiteouts for the names. A writable mount has no layer, because a layer
# would not write through: there the file itself is covered, and the guest must not be able to move or replace anything
# on the way to the file, or the next sandbox would show the file (L01).


def absent(source: str, names: tuple[str, ...], *, key: str) -> tuple[str, ...]:
    """Return the relative paths that a layer has whiteouts for."""
    found = {way for name in names for way in _ways(source, beneath(name, key=key))}
    return _outermost(found)


def covered(source: str, target: str, names: tuple[str, ...], *, writable: bool, key: str) -> tuple[Protected, ...]:
    """Return the existing paths that have to be covered in a mount at `target`.

    Raises PolicyError for a link that the guest could replace: the next sandbox would hide what the new link leads to,
    and show what the old link hid.
    """
    found = set()
    for name in names:
        relative = beneath(name, key=key)
        path = os.path.realpath(f"{source}/{relative}")
        if not is_below(path, source) or not os.path.exists(path):
            continue
        link = first_link(source, relative) if writable else None
        if link is not None:
            raise PolicyError(
                f"{relative!r} cannot be hidden in a writable mount: {link} is a symbolic link, which the guest could "
                "replace",
                key=key,
                fix=f'hide what it leads to ({os.path.relpath(path, source)!r}), or use mode "copy"',
            )
        found.add(os.path.relpath(path, source))
    return tuple(
        Protected(
            root=source,
            path=f"{source}/{name}",
            target=f"{target.rstrip('/')}/{name}",
            directory=os.path.isdir(f"{source}/{name}"),
            hidden=True,
        )
        for name in _outermost(found)
    )


def _ways(source: str, relative: str) -> Iterator[str]:
    """Yield the path of `relative` itself, which may be a link, and the path that the link leads to.

    Paths outside of the source are left out: the mount does not show them.
    """
    folder, base = os.path.split(f"{source}/{relative}")
    for path in (f"{os.path.realpath(folder)}/{base}", os.path.realpath(f"{folder}/{base}")):
        if is_below(path, source):
            whited = _first_missing(source, os.path.relpath(path, source))
            if whited is not None:
                yield whited


def _first_missing(source: str, relative: str) -> str | None:
    """Return `relative` up to the first part that does not exist; all of `relative` where every part exists.

    A missing part is hidden too, because another process may make it: a layer cannot hide a name in a folder that does
    not exist. Return None where a file is in the way.
    """
    way = ""
    parts = relative.split("/")
    for number, part in enumerate(parts, 1):
        way = f"{way}/{part}" if way else part
        if not os.path.lexists(f"{source}/{way}"):
            return way
        if number < len(parts) and not os.path.isdir(f"{source}/{way}"):
            return None
    return way


def _outermost(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if not any(is_within(name, other) for other in names - {name})))


_MOST = 100
PRIVATE = ("/tmp", "/workspace")  # file systems of one sandbox: what lies there is mounted after them
_KERNEL = ("/proc", "/sys", "/dev")
_OWN_FOLDERS = ("/.mask", "/.sources", "/.disk")  # our own folders in every root; guest/launch/mounts.py makes them
_FIXED = ("/", "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/tmp", "/run", "/var")
# Never writable, nor is a folder that holds one of these: policy/host_paths.py follows root's links in some of them.
_SYSTEM = ("/usr", "/etc", "/boot", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/var/spool")
_KERNEL_TYPES = frozenset(
    ("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "bpf", "configfs")
)


@final
class ShownPath(Struct):
    """A host path to be shown. `index` is the mount's place in the policy; None for a path of the interpreter."""

    source: str
    target: str
    mode: MountMode
    directory: bool
    idmap: bool
    index: int | None
    hide: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    inode: tuple[int, int] | None = None  # device and number of what was checked, whatever is at `source` later


@final
class Placed(Struct):
    """The operations for all entries, in the order in which they are applied."""

    template: tuple[Op, ...]
    box: tuple[Op, ...]
    protected: tuple[Protected, ...]
    shown: tuple[str, ...]


@final
class Surroundings(Struct):
    """The root that the mounts are placed into, and the caller's paths that the mounts must respect."""

    interpreter: Interpreter
    system: tuple[tuple[str, str], ...]  # target and source of each bind that the root has already
    links: tuple[tuple[str, str], ...]  # link and where it leads: bin → usr/bin
    uid: int
    home: str
    state: tuple[str, ...]  # our directories, which no guest may see
    stored: tuple[str, ...] = ()  # never shown either, but a folder around one may be: there they are held read-only
    shows_python: bool = True  # False: the guest's Python is the image's; the caller's Python is protected all the same
    folders: tuple[str, ...] = PRIVATE  # folders of every sandbox, where no file can be mounted


def place(mounts: tuple[Mount, ...], around: Surroundings) -> Placed:
    """Return the operations that place all mounts.

    Raises PolicyError, with the key and a fix, for a mount that is impossible or forbidden.
    """
    if len(mounts) > _MOST:
        raise PolicyError(
            f"the policy has {len(mounts)} mounts; the most is {_MOST}",
            key="mounts",
            fix="mount a folder that holds them, with `hide` for the rest",
        )
    entries: list[ShownPath] = []
    for index, mount in enumerate(mounts):
        entry = _entry(index, mount, around)
        for other in entries:
            if other.target == entry.target:
                raise PolicyError(
                    f"mounts {other.index} and {index} have the same target {entry.target}",
                    key=f"mounts[{index}].target",
                    fix="give one of them another target",
                )
        entries.append(entry)
    entries = _with_interpreter(entries, around)
    entries.sort(key=lambda entry: (entry.target.count("/"), entry.target))
    return _operations(entries, around)


# ── one mount ────────────────────────────────────────────────────────────────────────────────────


def _entry(index: int, mount: Mount, around: Surroundings) -> ShownPath:
    named = os.path.abspath(os.fspath(mount.source))
    source, info = _source(named, index)
    _check_type(info.st_mode, named, index, mount)
    _check_source(index, mount, source, around)
    target = _target(index, mount, named, around)
    directory = stat.S_ISDIR(info.st_mode)
    if not directory:
        _check_file(index, mount, source)
        if any(is_within(folder, target) for folder in around.folders):
            raise PolicyError(
                f"{source} is a file, and {target} is a folder of every sandbox",
                key=f"mounts[{index}].target",
                fix=f'"{target}/{os.path.basename(source)}"',
            )
    return ShownPath(
        source=source,
        target=target,
        mode=mount.mode,
        directory=directory,
        idmap=around.uid == 0 and (mount.mode != "ro" or closed_to_others(source)),
        index=index,
        hide=tuple(mount.hide),
        protect=(
            *mount.protect,
            *(settings_within(source, around.home, around.stored) if directory and mount.mode == "rw" else ()),
        ),
        inode=(info.st_dev, info.st_ino),
    )


def _source(named: str, index: int) -> tuple[str, os.stat_result]:
    """Return the path of a mount's source without links, and the status of the file there."""
    try:
        return resolve(named)
    except LinkError as error:
        raise PolicyError(
            f"mount source {named} cannot be used: {error.strerror}",
            key=f"mounts[{index}].source",
            code="link",
            fix=error.fix,
        ) from None
    except OSError as error:
        raise PolicyError(
            f"mount source {named} cannot be used: {error.strerror}",
            key=f"mounts[{index}].source",
            fix="make it first, or correct the path",
        ) from None


def _check_type(mode: int, named: str, index: int, mount: Mount) -> None:
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        raise PolicyError(
            f"mount source {named} is a device or a pipe; only files and folders can be shown",
            key=f"mounts[{index}].source",
        )
    if stat.S_ISSOCK(mode) and not mount.credentials:
        raise PolicyError(
            f"mount source {named} is a socket: a guest that connects to it acts as the program behind it",
            key=f"mounts[{index}].source",
            fix=f"leave it out, or accept it with credentials = true on mounts[{index}]",
        )


def _check_source(index: int, mount: Mount, source: str, around: Surroundings) -> None:
    key = f"mounts[{index}].source"
    if source == "/" or any(is_within(source, path) for path in _KERNEL):
        raise PolicyError(f"{source} of the host is never shown", key=key, fix="mount the folder that is needed")
    for path in (*around.state, *around.stored):
        if is_within(source, path) or (path in around.state and is_within(path, source)):
            raise PolicyError(
                f"{source} holds Ringfence's own state ({path})", key=key, fix="mount a folder that does not contain it"
            )
    below = _kernel_mount_below(source)
    if below is not None:
        raise PolicyError(
            f"{source} has a kernel file system mounted below it ({below})",
            key=key,
            fix="unmount it, or mount a folder that does not contain it",
        )
    if mount.mode == "rw":
        _check_writable(index, source, around.interpreter)
        check_settings(source, around.home, key=f"mounts[{index}].mode")
    if not mount.credentials:
        _check_credentials(index, mount, source, around.home)


def _check_writable(index: int, source: str, python: Interpreter) -> None:
    key = f"mounts[{index}].mode"
    if any(is_within(source, path) or is_within(path, source) for path in _SYSTEM):
        raise PolicyError(f"{source} is part of the host's system and is never writable", key=key, fix='mode = "copy"')
    # In a larger mount these folders are made read-only. A mount of such a folder itself would leave nothing writable,
    # and we import from there (L12).
    library = () if any(is_within(source, os.path.realpath(path)) for path in python.site_packages) else python.stdlib
    if any(is_within(source, os.path.realpath(path)) for path in (_own_package(), *library)):
        raise PolicyError(
            f"{source} is a part of Ringfence or of Python's own library, and is never writable",
            key=key,
            fix='mode = "copy"',
        )
    if _is_run_at_next_start(source, python):
        raise PolicyError(
            f"{source} belongs to the Python that runs Ringfence, which takes programs or modules from there at its "
            "next start, and is never writable",
            key=key,
            fix='mode = "copy"',
        )
    name = is_protected_source(source)
    if name is not None:
        raise PolicyError(
            f"{source} is never writable: programs on the host run or trust what is in {name}",
            key=key,
            fix='mode = "copy"',
        )


def _is_run_at_next_start(source: str, python: Interpreter) -> bool:
    """Return whether this Python takes programs or modules from `source` at its next start (L18).

    It does from a folder of its programs, `ringfence` among them; from its packages as a whole, where it runs `.pth`
    files; and from the packages that Ringfence imports. Any other installed package may be mounted writable.
    """
    if any(is_within(source, os.path.realpath(path)) for path in python.programs):
        return True
    for path in map(os.path.realpath, python.site_packages):
        if is_within(source, path):
            return source == path or os.path.relpath(source, path).split("/")[0].partition(".")[0] in HELPERS
    return False


def _check_credentials(index: int, mount: Mount, source: str, home: str) -> None:
    from ringfence.plan.rootfs.credentials import contains_home, holdings, holds_credentials

    hidden = [f"{source}/{name.strip('/')}" for name in mount.hide]
    found = [one for one in holdings(source, home) if not any(is_within(one.path, path) for path in hidden)]
    owner = contains_home(source, home)
    if not found and (owner is None or hidden):
        return
    if found:
        reason = holds_credentials(source, home) or ""
        names = [os.path.relpath(one.path, source) for one in found if is_below(one.path, source)]
    else:
        reason, names = f"contains the home directory {owner}", []
    hiding = f"hide them ({' '.join(f'--hide {source}/{name}' for name in names[:4])}), or " if names else ""
    raise PolicyError(
        f"mount source {source} {reason}",
        key=f"mounts[{index}].source",
        fix=f"mount only the folder that is needed, or {hiding}accept it with credentials = true on mounts[{index}]",
    )


def _check_file(index: int, mount: Mount, source: str) -> None:
    if mount.mode == "copy":
        raise PolicyError(
            f'{source} is a file; mode "copy" is for folders',
            key=f"mounts[{index}].mode",
            fix='mode = "ro", or mount its folder',
        )
    for field in ("hide", "protect"):
        if getattr(mount, field):
            raise PolicyError(f"{source} is a file: nothing lies below it", key=f"mounts[{index}].{field}")


def _target(index: int, mount: Mount, named: str, around: Surroundings) -> str:
    key = f"mounts[{index}].target"
    text = named if mount.target is None else str(mount.target)
    if not text.startswith("/") or ".." in text.split("/") or "\0" in text:
        raise PolicyError(f"target {text!r} is not an absolute path without '..'", key=key, fix='such as "/data"')
    spelled = target = rooted(text)
    for link, meaning in around.links:
        if is_within(target, link):
            target = meaning + target[len(link) :]
    if spelled in _FIXED or target in _FIXED or any(is_within(target, path) for path in (*_KERNEL, *_OWN_FOLDERS)):
        raise PolicyError(
            f"nothing can be mounted at {spelled}: it is part of every sandbox",
            key=key,
            fix='choose another target, such as "/workspace" or "/data"',
        )
    if not target.isprintable():
        raise PolicyError(f"target {target!r} has characters that cannot be printed", key=key)
    return target


def rooted(path: str) -> str:
    """Return `path` as an absolute, normal path in the guest's root. normpath alone keeps two slashes at the start."""
    return "/" + os.path.normpath(f"/{path}").lstrip("/")


def closed_to_others(path: str, *, entries: int = 64) -> bool:
    """Return whether an unrelated uid cannot read `path` or one of the first `entries` files below (kernel fact 4)."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    if _is_closed(mode):
        return True
    folders = [path] if stat.S_ISDIR(mode) else []
    left = entries - 1
    for folder in folders:
        if left <= 0:
            return False
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            names = sorted(os.listdir(fd))[:left]
            modes = [_mode(name, fd) for name in names]
        finally:
            os.close(fd)
        if any(map(_is_closed, modes)):
            return True
        folders += [f"{folder}/{name}" for name, mode in zip(names, modes, strict=True) if stat.S_ISDIR(mode)]
        left -= len(names)
    return False


def _mode(name: str, folder: int) -> int:
    """Return the mode of a file, or 0 for a file that is gone."""
    try:
        return os.lstat(name, dir_fd=folder).st_mode
    except OSError:
        return 0


def _is_closed(mode: int) -> bool:
    needed = 0o005 if stat.S_ISDIR(mode) else 0o004
    return mode & needed != needed and mode != 0 and not stat.S_ISLNK(mode)


def _kernel_mount_below(source: str) -> str | None:
    """Return a kernel file system that is mounted below `source`: a bind is recursive and would show it too."""
    return next((where for where, kind in mounts_of_host() if kind in _KERNEL_TYPES and is_within(where, source)), None)


def _mounts_below(source: str) -> list[str]:
    return [where for where, _ in mounts_of_host() if is_below(where, source)]


def mounts_of_host() -> list[tuple[str, str]]:
    """Return target and type of every mount of this host; [] where /proc cannot be read."""
    try:
        return [(mount.target, mount.kind) for mount in proc.mounts()]
    except OSError:
        return []


# ── together with the interpreter ────────────────────────────────────────────────────────────────


def _with_interpreter(entries: list[ShownPath], around: Surroundings) -> list[ShownPath]:
    """Return `entries` with the interpreter's directories added.

    Inside a writable mount these directories are made read-only: the caller's own Python would run what a guest writes
    there.
    """
    held: dict[int, list[str]] = {}
    added: list[ShownPath] = []
    for root in around.interpreter.roots if around.shows_python else ():
        cover = _cover(root, entries)
        if cover is None:
            added.append(_interpreter_entry(root, around))
        elif not _same_file(_behind(cover, root), root):
            raise PolicyError(
                f"target {cover.target} covers the Python that runs the guest ({root})",
                key=f"mounts[{cover.index}].target",
                fix="choose another target",
            )
    for path in (*around.interpreter.roots, around.interpreter.prefix, _own_package(), *startup_files()):
        for position, entry in enumerate(entries):
            inside = os.path.realpath(path)
            if entry.mode == "rw" and entry.directory and is_below(inside, entry.source):
                held.setdefault(position, []).append(os.path.relpath(inside, entry.source))
    for position, names in held.items():
        entry = entries[position]
        entries[position] = replace(entry, protect=(*entry.protect, *names))
    return entries + added


def _interpreter_entry(root: str, around: Surroundings) -> ShownPath:
    source = os.path.realpath(root)
    idmap = around.uid == 0 and closed_to_others(source)
    return ShownPath(source=source, target=root, mode="ro", directory=os.path.isdir(source), idmap=idmap, index=None)


def _own_package() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _cover(path: str, entries: list[ShownPath]) -> ShownPath | None:
    around = [entry for entry in entries if is_within(path, entry.target)]
    return max(around, key=lambda entry: len(entry.target), default=None)


def _behind(entry: ShownPath, path: str) -> str:
    """Return the host path that `entry` shows at `path` inside."""
    return entry.source + path[len(entry.target) :]


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


# ── operations ───────────────────────────────────────────────────────────────────────────────────


def _operations(entries: list[ShownPath], around: Surroundings) -> Placed:
    template: list[Op] = []
    box: list[Op] = []
    protected: list[Protected] = []
    shown: list[str] = []
    in_box: list[ShownPath] = []
    for entry in entries:
        above = _cover(entry.target, [other for other in entries if other.target != entry.target])
        private = any(is_within(entry.target, path) for path in PRIVATE)
        boxed = entry.idmap or entry.mode == "copy" or private or above in in_box
        if boxed:
            in_box.append(entry)
        _check_mount_point(entry, above, around)
        if above is None and not _bound_already(entry.target, around):
            point: Op = Folder(entry.target[1:]) if entry.directory else File(entry.target[1:])
            if entry.target not in PRIVATE:
                (box if private else template).append(point)
        without = _absent(entry)
        ops, held = _inside(entry, covers=without is None)
        (box if boxed else template).extend([_mount(entry, without or ()), *ops])
        protected += held
        shown += _lines(entry, held, without or ())
    return Placed(template=tuple(template), box=tuple(box), protected=tuple(protected), shown=tuple(shown))


def _mount(entry: ShownPath, without: tuple[str, ...]) -> Op:
    target = entry.target[1:]
    if entry.mode == "copy" or without:
        read_only = entry.mode != "copy"
        return Overlay(entry.source, target, entry.idmap, read_only=read_only, absent=without, inode=entry.inode)
    return Bind(entry.source, target, entry.mode == "rw", entry.idmap, inode=entry.inode)


def _inside(entry: ShownPath, *, covers: bool) -> tuple[list[Op], list[Protected]]:
    writable = entry.mode == "rw" and entry.directory
    hidden = (
        covered(entry.source, entry.target, entry.hide, writable=writable, key=_key(entry, "hide")) if covers else ()
    )
    ops: list[Op] = []
    held: list[Protected] = []
    if writable:
        whole = protection(entry.source, entry.target, entry.protect, hidden, key=_key(entry, "protect"))
        ops += whole.ops
        held += whole.paths
    ops += [Hide(path.target[1:]) for path in hidden]
    return ops, [*held, *hidden]


def _absent(entry: ShownPath) -> tuple[str, ...] | None:
    """Return the names below the source that a layer takes away; None where `hide` has to cover the files instead.

    A layer would not write through. Of a mount below the source, a layer would show the folder that the mount covers.
    """
    below = _mounts_below(entry.source) if entry.mode == "copy" or entry.hide else []
    if entry.mode == "rw" or (entry.mode == "ro" and below):
        return None
    names = absent(entry.source, entry.hide, key=_key(entry, "hide"))
    shown = [where for where in below if not any(is_within(where, f"{entry.source}/{name}") for name in names)]
    if shown:
        raise PolicyError(
            f"{entry.source} cannot be shown as a copy: something is mounted below it, at {shown[0]}",
            key=_key(entry, "mode"),
            fix=f'hide = ["{os.path.relpath(shown[0], entry.source)}"], unmount it, or use mode "ro"',
        )
    return names


def _key(entry: ShownPath, field: str) -> str:
    return f"mounts[{entry.index}].{field}"


def _bound_already(target: str, around: Surroundings) -> str | None:
    """Return the host path behind a `target` that lies in a bind of the root; None for any other target."""
    for shown, source in around.system:
        if is_within(target, shown):
            return source + target[len(shown) :]
    return None


def _check_mount_point(entry: ShownPath, above: ShownPath | None, around: Surroundings) -> None:
    """Refuse a target inside another mount unless a file or folder of the same kind exists there, and no link.

    To make the target would change the host, and a link leads elsewhere.
    """
    behind = _behind(above, entry.target) if above is not None else _bound_already(entry.target, around)
    if behind is None:
        return
    if os.path.realpath(behind) == behind and os.path.exists(behind) and os.path.isdir(behind) == entry.directory:
        return
    if above is not None and above.mode == "copy" and not os.path.lexists(behind):
        return
    raise PolicyError(
        f"target {entry.target} lies inside another mount, where there is no such {_kind(entry)} ({behind})",
        key=f"mounts[{entry.index}].target" if entry.index is not None else "mounts",
        fix=f"make {behind} on the host, or choose a target outside",
    )


def _kind(entry: ShownPath) -> str:
    return "folder" if entry.directory else "file"


def _lines(entry: ShownPath, held: list[Protected], without: tuple[str, ...]) -> list[str]:
    words = {"ro": "read-only", "rw": "writable", "copy": "a copy; the host's files stay as they are"}
    owner = "" if entry.index is not None else ", for Python"
    place = entry.target if entry.target == entry.source else f"{entry.target} (the host's {entry.source})"
    lines = [f"{place}: {words[entry.mode]}{owner}"]
    lines += [f"{path.target}: {_protection_in_words(path)}" for path in held]
    return lines + [f"{entry.target}/{name}: absent" for name in without]


def _protection_in_words(path: Protected) -> str:
    if not path.hidden:
        return "read-only, protected"
    return f"hidden: an empty, read-only {'folder' if path.directory else 'file'} is in its place"
