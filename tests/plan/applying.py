"""Apply a view's operations in new namespaces and run a command there. A program: reads a JSON object from stdin.

Written apart from guest/launch/mounts.py, and as short as it can be: the planner's promises must hold for any applier.
As root the guest is an unmapped uid of its own; as another user, that user in a user namespace.
"""

import ctypes
import json
import os
import stat
import struct
import sys

from ringfence.host.placeholders import Placeholders
from ringfence.plan.model import rows
from ringfence.plan.rootfs.host_view import view
from ringfence.plan.rootfs.interpreter import interpreter
from ringfence.policy.model import Mount, Policy

GUEST = 2_090_909
NEWNS, NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE = 1, 4096, 16384, 1 << 18
RDONLY, NOSUID, NODEV, IDMAP = 1, 2, 4, 0x100000
RECURSIVE, EMPTY_PATH = 0x8000, 0x1000
libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *args: object) -> int:
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"call {number}: {os.strerror(ctypes.get_errno())} {args}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    call(165, *texts, flags, options.encode() if options else None)


def attributes(fd: int, path: str, flags: int, add: int, userns: int = 0) -> None:
    packed = struct.pack("QQQQ", add, 0, 0, userns)
    call(442, fd, path.encode(), flags, packed, len(packed))


def owner_as_guest(uid: int, gid: int) -> int:
    """A user namespace that maps the owner of files to the guest, for an idmapped mount."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        call(272, NEWUSER)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    for name, owner in (("uid_map", uid), ("gid_map", gid)):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"{owner} {GUEST} 1")
    fd = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    return fd


def point(source: str, target: str) -> None:
    if os.path.lexists(target):
        return
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "x").close()


def bind(source: str, target: str, options: dict[str, bool]) -> None:
    point(source, target)
    add = NOSUID | NODEV | (0 if options["rw"] else RDONLY)
    tree = call(428, -100, source.encode(), 1 | RECURSIVE)
    status = os.stat(source)
    userns = owner_as_guest(status.st_uid, status.st_gid) if options["idmap"] else 0
    attributes(tree, "", EMPTY_PATH | RECURSIVE, add | (IDMAP if userns else 0), userns)
    call(429, tree, b"", -100, target.encode(), 4)


def apply(op: list[object]) -> None:
    match op:
        case ["dir", str(target), int(mode)]:
            os.makedirs(target, exist_ok=True)
            os.chmod(target, mode)
        case ["file", str(target), str(text), int(mode)]:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "x") as file:
                file.write(text)
            os.chmod(target, mode)
        case ["symlink", str(text), str(target)]:
            os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
            os.symlink(text, target)
        case ["bind", str(source), str(target), dict(options)]:
            bind(source, target, options)
        case ["dev", str(name)]:
            point("/dev/null", f"dev/{name}")
            mount(f"/dev/{name}", f"dev/{name}", None, MS_BIND)
        case ["hide", str(target)]:
            empty = "/mnt/empty-dir" if os.path.isdir(target) else "/mnt/empty-file"
            mount(empty, target, None, MS_BIND)
            attributes(-100, target, 0, RDONLY)
        case ["pin", str(target)]:
            mount(target, target, None, MS_BIND | MS_REC)
        case ["protect", str(target)]:
            mount(target, target, None, MS_BIND | MS_REC)
            attributes(-100, target, RECURSIVE, RDONLY)
        case _:
            raise ValueError(op)


def main() -> None:
    request = json.load(sys.stdin)
    uid = os.getuid()
    policy = Policy(mounts=[Mount(**one) for one in request["mounts"]], commands=request.get("commands", "any"))
    python = interpreter()
    shown = view(policy, python, uid=uid, home=os.environ["HOME"])
    placeholders = Placeholders(shown.protected)
    placeholders.make()
    child = os.fork()
    if child == 0:
        try:
            inside(uid, shown, [python.command, *request["argv"]])
        finally:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    placeholders.release()
    sys.exit(code)


def inside(uid: int, shown: object, argv: list[str]) -> None:
    gid = os.getgid()
    call(272, NEWNS if uid == 0 else NEWNS | NEWUSER)
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/mnt", "tmpfs", 0, "mode=755")
    os.mkdir("/mnt/empty-dir")
    open("/mnt/empty-file", "x").close()
    os.mkdir("/mnt/root")
    os.chdir("/mnt/root")
    for op in rows(shown.template):  # type: ignore[attr-defined]  # a View; importing the name only for this is noise
        apply(op)
    for private in ("tmp", "workspace"):
        mount("tmpfs", private, "tmpfs", 0, f"mode=755,uid={GUEST}" if uid == 0 else "mode=755")
    for op in rows(shown.box):  # type: ignore[attr-defined]  # as above
        apply(op)
    mount("/proc", "proc", None, MS_BIND | MS_REC)
    os.chroot(".")
    os.chdir("/")
    if uid == 0:
        os.setgroups([])
        os.setresgid(GUEST, GUEST, GUEST)
        os.setresuid(GUEST, GUEST, GUEST)
    os.execve(argv[0], argv, {"PATH": shown.path, "HOME": "/workspace"})  # type: ignore[attr-defined]  # as above


if __name__ == "__main__":
    main()
