"""Does one file operation inside the sandbox, with the guest's rights and no more, in a separate process.

Paths are resolved by the kernel beneath `/` without magic links (J18), opened without blocking and checked by fstat
(A24), so that a link or a race reaches only what the guest can reach anyway. Raw bytes go by the standard streams, the
outcome as one JSON object by the report.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.shared import fast_stdlib, syscalls, tree_walk
from ringfence.shared.openat import (
    GONE,
    Args,
    absolute,
    flush,
    info_at,
    make_directories,
    open_parent,
    open_path,
    regular,
    remove_made,
    write_all,
)
from ringfence.shared.tar import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.guest.guestd.protocols import ProcessWork

_CHUNK = 1 << 18
_PAGE = 1000
_SPLICE = 1 << 20
_SHOWN = 500  # bytes of a name that an error shows


class _Stopped(BaseException):
    """The host gave up: undo the work and end."""


def _on_stop(number: int, _: object) -> None:
    fast_stdlib.ignore_signals(number)
    raise _Stopped


def work(job: ProcessWork, report_fd: int) -> int:
    try:
        fast_stdlib.handle_signal(fast_stdlib.SIGTERM, _on_stop)
        answer = _OPERATIONS[str(job["call"])](job["args"])
    except OSError as error:
        answer = {"errno": error.errno or errno.EIO, "path": _shown(error)}
    except Refused as refused:
        answer = {"errno": errno.EINVAL, "refused": refused.why, "path": os.fsdecode(refused.name[:_SHOWN])}
    except _Stopped:
        return 1
    except RecursionError:
        answer = {"errno": errno.ELOOP, "path": None}
    data = fast_stdlib.dumps(answer)
    while data:
        data = data[os.write(report_fd, data) :]
    return 0


def _shown(error: OSError) -> str | None:
    name = error.filename
    return name if isinstance(name, str) else None


def _read(args: Args) -> dict[str, object]:
    path, offset, size, most = str(args["path"]), args["offset"], args["size"], args["most"]
    assert isinstance(offset, int)
    fd = open_path(path, os.O_RDONLY)
    there = max(0, regular(fd, path).st_size - offset)
    if isinstance(most, int) and min(there, size if isinstance(size, int) else there) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)  # refused by its size, before a byte is read (A26)
    left = size if isinstance(size, int) else None
    if offset:
        os.lseek(fd, offset, os.SEEK_SET)
    while left is None or left > 0:
        chunk = os.read(fd, _CHUNK if left is None else min(_CHUNK, left))
        if not chunk:
            break
        write_all(1, chunk)
        if left is not None:
            left -= len(chunk)
    return {}


def _copy_in(fd: int) -> None:
    """Copy all of standard input: by the kernel, from pipe to file, where the file system can. Obeys a stop."""
    fast_stdlib.hold_stops(hold=False)
    try:
        while os.splice(0, fd, _SPLICE):
            pass
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Also after a splice of no bytes: gVisor's moves none if the pipe is empty at that moment.
    while chunk := os.read(0, _CHUNK):
        write_all(fd, chunk)
    fast_stdlib.hold_stops()


def _write(args: Args) -> dict[str, object]:
    path = str(args["path"])
    if args["into"] is not None and _is_directory(path):
        path = os.path.join(path, str(args["into"]))
    parent = os.path.dirname(absolute(path).rstrip("/"))
    fast_stdlib.hold_stops()  # as in `streams.unpack`
    made = make_directories(parent)
    try:
        return _write_below(path, args)
    except OSError as error:
        remove_made(parent, made)
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None  # and not a name of ours beside it
    except BaseException:
        remove_made(parent, made)
        raise


def _is_directory(path: str) -> bool:
    try:
        fd = open_path(path, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return False
    os.close(fd)
    return True


def _write_below(path: str, args: Args) -> dict[str, object]:
    mode = args["mode"]
    directory, name = open_parent(path, make=False)
    try:
        if args["append"]:
            fd = open_path(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            regular(fd, path)
            _copy_in(fd)
            if isinstance(mode, int):
                os.fchmod(fd, mode)
        else:
            _replace(directory, name, args, mode if isinstance(mode, int) else None)
        return {"info": info_at(directory, name, path)}
    finally:
        os.close(directory)


def _replace(directory: int, name: str, args: Args, mode: int | None) -> None:
    """Replace a file as a whole or not at all: a new file beside it, then a rename. A link's target is replaced."""
    path, temporary = str(args["path"]), str(args["stage"])
    directory, name = _follow(directory, name, path)
    old = _mode_of(directory, name, path)
    fd, named = syscalls.open_unnamed_yet(directory, temporary)
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


def _follow(directory: int, name: str, path: str) -> tuple[int, str]:
    """Follow the guest's symbolic links, at most 40, each resolved beneath the root again."""
    current = path
    for _ in range(40):
        try:
            target = os.readlink(name, dir_fd=directory)
        except OSError:
            return directory, name
        current = target if target.startswith("/") else os.path.join(os.path.dirname(absolute(current)), target)
        _refuse_magic(current, path)
        directory, name = open_parent(current, make=False)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _refuse_magic(current: str, path: str) -> None:
    """Refuse a magic link into /proc, which would be followed by name here: openat2 refuses to open such a link."""
    try:
        os.close(open_path(current, os.O_PATH))
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


def _stat(args: Args) -> dict[str, object]:
    path = str(args["path"])
    if os.path.basename(absolute(path).rstrip("/")) in ("", ".", ".."):
        fd = open_path(path, os.O_PATH | os.O_DIRECTORY)
        return {"info": info_at(fd, ".", path)}
    directory, name = open_parent(path, make=False)
    try:
        return {"info": info_at(directory, name, path)}
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _list(args: Args) -> dict[str, object]:
    """List entries as JSON lines on standard output, sorted by name, depth first; links are shown, not followed."""
    import fnmatch

    path, recursive, pattern = str(args["path"]), bool(args["recursive"]), args["pattern"]
    top = open_path(path, os.O_RDONLY | os.O_DIRECTORY)
    pending = [""]  # names and no descriptors: a directory may hold more folders than a process may open
    chain = tree_walk.Chain(top)
    lines: list[bytes] = []
    while pending:
        prefix = pending.pop()
        try:
            directory = chain.directory(prefix.rstrip("/"))
        except OSError as error:
            if prefix and error.errno in GONE:
                continue
            raise
        inner = []
        for name in sorted(os.listdir(directory)):
            try:
                info = info_at(directory, name, f"{prefix}{name}")
            except OSError as error:
                if error.errno in GONE:
                    continue
                raise
            if pattern is None or fnmatch.fnmatchcase(name, str(pattern)):
                lines.append(fast_stdlib.dumps(info))
            if recursive and info["kind"] == "directory":
                inner.append(f"{prefix}{name}/")
            if len(lines) >= _PAGE:
                flush(lines)
        pending += reversed(inner)
    flush(lines)
    return {}


def _mkdir(args: Args) -> dict[str, object]:
    path = str(args["path"])
    if args["exist_ok"] and _is_directory(path):
        return {}
    directory, name = open_parent(path, make=bool(args["parents"]))
    try:
        os.mkdir(name, 0o755, dir_fd=directory)
    except FileExistsError:
        if not args["exist_ok"] or not _is_directory(path):  # made meanwhile
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    return {}


def _rename(args: Args) -> dict[str, object]:
    source, target = str(args["source"]), str(args["target"])
    from_directory, from_name = open_parent(source, make=False)
    if not os.path.lexists(f"/proc/self/fd/{from_directory}/{from_name}"):  # checked before folders are made for it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    to_directory, to_name = open_parent(target, make=True)
    try:
        os.rename(from_name, to_name, src_dir_fd=from_directory, dst_dir_fd=to_directory)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), source) from None
    return {}


def _remove(args: Args) -> dict[str, object]:
    path = str(args["path"])
    try:
        directory, name = open_parent(path, make=False)
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        if args["missing_ok"]:
            return {}
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    try:
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=directory)
        elif args["recursive"]:
            tree_walk.remove_tree(directory, name)
        else:
            os.rmdir(name, dir_fd=directory)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    return {}


def _chmod(args: Args) -> dict[str, object]:
    path = str(args["path"])
    fd = open_path(path, os.O_PATH)
    try:
        # By that name, as a file without read permission was opened too.
        os.chmod(f"/proc/self/fd/{fd}", int(args["mode"]))  # type: ignore[call-overload]  # our own number
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    return {}


def _usage(args: Args) -> dict[str, object]:
    """Report the disk's usage. `bytes`, `files`: the limits.

    `count`: the limits are not both the file system's own, so every name is counted.
    """
    info = os.statvfs("/workspace")
    bytes_limit, files_limit = int(args["bytes"]), int(args["files"])  # type: ignore[call-overload]  # our own numbers
    if args["count"]:
        used, names = tree_walk.count("/workspace")
        if info.f_blocks * info.f_frsize == bytes_limit:  # deleted files that are still open count too
            used = (info.f_blocks - info.f_bfree) * info.f_frsize
        return {"bytes": used, "bytes_limit": bytes_limit, "files": names, "files_limit": files_limit}
    if info.f_bavail != info.f_bfree:  # on disk: there is more than the sandbox may use, and what is left is exact
        used = bytes_limit - info.f_bavail * info.f_frsize
        names = files_limit - info.f_favail
        return {"bytes": used, "bytes_limit": bytes_limit, "files": names, "files_limit": files_limit}
    return {
        "bytes": (info.f_blocks - info.f_bfree) * info.f_frsize,
        "bytes_limit": info.f_blocks * info.f_frsize,
        "files": max(0, info.f_files - info.f_ffree - 1),
        "files_limit": max(0, info.f_files - 1),
    }


def _search(args: Args) -> dict[str, object]:
    from ringfence.guest.files import search

    return search.search(args)


def _watch(args: Args) -> dict[str, object]:
    from ringfence.guest.files import watch

    return watch.watch(args)


def _stream(name: str) -> Callable[[Args], dict[str, object]]:
    def operation(args: Args) -> dict[str, object]:
        from ringfence.guest.files import streams

        found: Callable[[Args], dict[str, object]] = getattr(streams, name)
        return found(args)

    return operation


def _keep(args: Args) -> dict[str, object]:
    from ringfence.guest.files import snapshot_scan

    return snapshot_scan.keep(args)


def _restore(args: Args) -> dict[str, object]:
    from ringfence.guest.files import snapshot_apply

    return snapshot_apply.restore(args)


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
    "search": _search,
    "watch": _watch,
    "measure": _stream("measure"),
    "pack": _stream("pack"),
    "unpack": _stream("unpack"),
    "keep": _keep,
    "restore": _restore,
}
