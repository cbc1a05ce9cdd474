"""Does one file operation inside the sandbox, with the guest's rights and no more, in a process of its own.

Paths are resolved by the kernel beneath `/` without magic links (J18), opened without blocking and checked by fstat
(A24), so that a link or a race reaches only what the guest can reach anyway. Raw bytes go by the standard streams, the
outcome as one JSON object by the report.
"""

from __future__ import annotations

import errno
import os
import stat

from . import kernel as k
from . import lean, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .shapes import Work

_CHUNK = 1 << 18
_PAGE = 1000
_RESOLVE = k.RESOLVE_IN_ROOT | k.RESOLVE_NO_MAGICLINKS
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)  # removed, replaced or closed while we list


def work(job: Work, report_fd: int) -> int:
    try:
        answer = _OPERATIONS[str(job["call"])](job["args"])
    except OSError as error:
        answer = {"errno": error.errno or errno.EIO, "path": _shown(error)}
    except RecursionError:
        answer = {"errno": errno.ELOOP, "path": None}
    data = lean.dumps(answer)
    while data:
        data = data[os.write(report_fd, data) :]
    return 0


def _shown(error: OSError) -> str | None:
    name = error.filename
    return name if isinstance(name, str) else None


Args = dict[str, object]


def _root() -> int:
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _open(path: str, flags: int, mode: int = 0) -> int:
    root = _root()
    if not flags & os.O_PATH:  # openat2 refuses the two beside O_PATH
        flags |= os.O_NONBLOCK | os.O_NOCTTY
    try:
        return k.openat2(root, _absolute(path), flags, mode, _RESOLVE)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        os.close(root)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/workspace/{path}"


def _open_parent(path: str, *, make: bool) -> tuple[int, str]:
    """The directory that holds `path`, and its last name."""
    whole = _absolute(path).rstrip("/")
    parent, name = os.path.split(whole)
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    if make:
        _make_directories(parent)
    try:
        return _open(parent, os.O_PATH | os.O_DIRECTORY), name
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _make_directories(path: str) -> None:
    """Without recursion: a path of 4000 characters has up to 2000 parts."""
    missing: list[str] = []
    directory = -1
    while directory < 0:
        try:
            directory = _open(path or "/", os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            path, name = os.path.split(path.rstrip("/"))
            missing.append(name)
    for name in reversed(missing):
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
        except FileExistsError:
            pass
        below = trees.below(directory, name)
        os.close(directory)
        directory = below
    os.close(directory)


def _regular(fd: int, path: str) -> os.stat_result:
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return info


def _read(args: Args) -> dict[str, object]:
    path, offset, size = str(args["path"]), int(args["offset"]), args["size"]  # type: ignore[call-overload]
    fd = _open(path, os.O_RDONLY)
    _regular(fd, path)
    left = size if isinstance(size, int) else None
    if offset:
        os.lseek(fd, offset, os.SEEK_SET)
    while left is None or left > 0:
        chunk = os.read(fd, _CHUNK if left is None else min(_CHUNK, left))
        if not chunk:
            break
        _write_all(1, chunk)
        if left is not None:
            left -= len(chunk)
    return {}


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _copy_in(fd: int) -> None:
    while chunk := os.read(0, _CHUNK):
        _write_all(fd, chunk)


def _write(args: Args) -> dict[str, object]:
    path, mode = str(args["path"]), args["mode"]
    directory, name = _open_parent(path, make=True)
    try:
        if args["append"]:
            fd = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            _regular(fd, path)
            _copy_in(fd)
            if isinstance(mode, int):
                os.fchmod(fd, mode)
        else:
            _replace(directory, name, path, mode if isinstance(mode, int) else None)
        return {"info": _info_at(directory, name, path)}
    finally:
        os.close(directory)


def _replace(directory: int, name: str, path: str, mode: int | None) -> None:
    """As a whole or not at all: a new file beside it, then a rename. A link's target is what is replaced."""
    directory, name = _follow(directory, name, path)
    old = _mode_of(directory, name, path)
    temporary = f".{os.urandom(8).hex()}.part"
    fd, named = _open_new(directory, temporary)
    try:
        _copy_in(fd)
        os.fchmod(fd, mode if mode is not None else old if old is not None else 0o644)
        if not named:
            os.link(f"/proc/self/fd/{fd}", temporary, dst_dir_fd=directory, follow_symlinks=True)
            named = True
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        if named:
            os.unlink(temporary, dir_fd=directory)
        raise


def _open_new(directory: int, temporary: str) -> tuple[int, bool]:
    """A file without a name yet, so that a kill in the middle leaves nothing; with one where that cannot be had."""
    try:
        return os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(temporary, flags, 0o600, dir_fd=directory), True


def _follow(directory: int, name: str, path: str) -> tuple[int, str]:
    """Through symbolic links of the guest's, at most 40, each resolved beneath the root again."""
    current = path
    for _ in range(40):
        try:
            target = os.readlink(name, dir_fd=directory)
        except OSError:
            return directory, name
        current = target if target.startswith("/") else os.path.join(os.path.dirname(_absolute(current)), target)
        _refuse_magic(current, path)
        directory, name = _open_parent(current, make=False)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _refuse_magic(current: str, path: str) -> None:
    """A link into /proc would be followed by name here; openat2 refuses it where it is a magic one."""
    try:
        os.close(_open(current, os.O_PATH))
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _mode_of(directory: int, name: str, path: str) -> int | None:
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return stat.S_IMODE(info.st_mode) & 0o777


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def _info_at(directory: int, name: str, shown: str) -> dict[str, object]:
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
    target = os.readlink(name, dir_fd=directory) if kind == "symlink" else None
    return {
        "path": shown,
        "kind": kind,
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "modified": info.st_mtime,
        "target": target,
    }


def _stat(args: Args) -> dict[str, object]:
    path = str(args["path"])
    if os.path.basename(_absolute(path).rstrip("/")) in ("", ".", ".."):
        fd = _open(path, os.O_PATH | os.O_DIRECTORY)
        return {"info": _info_at(fd, ".", path)}
    directory, name = _open_parent(path, make=False)
    try:
        return {"info": _info_at(directory, name, path)}
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _list(args: Args) -> dict[str, object]:
    """Entries as JSON lines on standard output, sorted by name, depth first; links are shown, never followed."""
    import fnmatch

    path, recursive, pattern = str(args["path"]), bool(args["recursive"]), args["pattern"]
    top = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    pending = [""]  # names and no descriptors: a directory may hold more of them than a process may open
    lines: list[bytes] = []
    while pending:
        prefix = pending.pop()
        try:
            directory = trees.below(top, prefix)
        except OSError as error:
            if prefix and error.errno in _GONE:
                continue
            raise
        below = []
        for name in sorted(os.listdir(directory)):
            try:
                info = _info_at(directory, name, f"{prefix}{name}")
            except FileNotFoundError:
                continue
            if pattern is None or fnmatch.fnmatchcase(name, str(pattern)):
                lines.append(lean.dumps(info))
            if recursive and info["kind"] == "directory":
                below.append(f"{prefix}{name}/")
            if len(lines) >= _PAGE:
                _flush(lines)
        pending += reversed(below)
        os.close(directory)
    _flush(lines)
    return {}


def _flush(lines: list[bytes]) -> None:
    if lines:
        _write_all(1, b"\n".join(lines) + b"\n")
        lines.clear()


def _mkdir(args: Args) -> dict[str, object]:
    path = str(args["path"])
    directory, name = _open_parent(path, make=bool(args["parents"]))
    try:
        os.mkdir(name, 0o755, dir_fd=directory)
    except FileExistsError:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not args["exist_ok"] or not stat.S_ISDIR(info.st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    return {}


def _rename(args: Args) -> dict[str, object]:
    source, target = str(args["source"]), str(args["target"])
    from_directory, from_name = _open_parent(source, make=False)
    to_directory, to_name = _open_parent(target, make=True)
    try:
        os.rename(from_name, to_name, src_dir_fd=from_directory, dst_dir_fd=to_directory)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), source) from None
    return {}


def _remove(args: Args) -> dict[str, object]:
    path = str(args["path"])
    try:
        directory, name = _open_parent(path, make=False)
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        if args["missing_ok"]:
            return {}
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    try:
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=directory)
        elif args["recursive"]:
            trees.remove_tree(directory, name)
        else:
            os.rmdir(name, dir_fd=directory)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    return {}


def _chmod(args: Args) -> dict[str, object]:
    path = str(args["path"])
    fd = _open(path, os.O_PATH)
    try:
        os.chmod(f"/proc/self/fd/{fd}", int(args["mode"]))  # type: ignore[call-overload]  # what was opened, unreadable or not
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    return {}


def _usage(_: Args) -> dict[str, object]:
    info = os.statvfs("/workspace")
    return {
        "bytes": (info.f_blocks - info.f_bfree) * info.f_frsize,
        "bytes_limit": info.f_blocks * info.f_frsize,
        "files": max(0, info.f_files - info.f_ffree - 1),
        "files_limit": max(0, info.f_files - 1),
    }


_OPERATIONS = {
    "read": _read,
    "write": _write,
    "stat": _stat,
    "list": _list,
    "mkdir": _mkdir,
    "rename": _rename,
    "remove": _remove,
    "chmod": _chmod,
    "usage": _usage,
}
