"""Plans what a guest of the host image sees: the root's layout, a curated /etc, /dev, the interpreter, the mounts.

Pure but for stat, readlink and listdir of host paths. Makes operations (docs/design/process-backend.md); applies none.
`guest/launch/mounts.py` makes /proc, /tmp, /workspace, /dev/shm, /dev/pts and the masks.
"""

from __future__ import annotations

import os

from ringfence.plan.model import Bind, Device, File, Folder, Hide, SymbolicLink
from ringfence.plan.rootfs.mounts import PRIVATE, Surroundings, place, rooted
from ringfence.shared.paths import is_within
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import Op
    from ringfence.plan.rootfs.interpreter import Interpreter
    from ringfence.plan.rootfs.protected import Protected
    from ringfence.policy.model import Policy

GUEST_HOME = "/workspace"  # the guest's HOME, also in its /etc/passwd
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_DIRECTORIES = (
    *("usr", "proc", "dev", "dev/shm", "dev/pts", "tmp", "workspace", "etc", "home", "root", "run"),
    *("var", "var/lib", "var/cache", "var/log", "opt", "srv", "mnt"),
)
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    ("/proc/self/fd", "dev/fd"),
    ("/proc/self/fd/0", "dev/stdin"),
    ("/proc/self/fd/1", "dev/stdout"),
    ("/proc/self/fd/2", "dev/stderr"),
    ("pts/ptmx", "dev/ptmx"),
)
_LINKS = (  # where the interpreter itself lies below such a path, the path is a directory instead
    ("/proc/self/mounts", "etc/mtab"),
    ("/tmp", "var/tmp"),  # the guest's own
    ("/run", "var/run"),
)

# Written by us: they hold no user, host or network name of the host (B13).
_FILES = (
    (
        "etc/passwd",
        (
            "root:x:0:0:root:/root:/usr/sbin/nologin\n"
            f"user:x:1000:1000:user:{GUEST_HOME}:/bin/sh\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ),
    ),
    ("etc/group", "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n"),
    ("etc/hosts", "127.0.0.1 localhost ringfence\n::1 localhost ip6-localhost ip6-loopback\n"),
    ("etc/hostname", "ringfence\n"),
    ("etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:2 attempts:2\n"),
    ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"),
    ("etc/timezone", "Etc/UTC\n"),
    ("etc/shells", "/bin/sh\n/bin/bash\n"),
)

# The parts of the host's /etc that programs under /usr need to work and that name no person. Keys, accounts, tokens
# (npmrc, pip.conf, gitconfig) and host names are left out; folders of private keys are beside these paths, never below.
# Each path is a mount that every sandbox's mount namespace copies, so the list is short.
_ETC = (
    "alternatives",
    "crypto-policies",
    "fonts",
    "ghostscript",
    "ld.so.cache",
    "mime.types",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "texmf",
)
_ETC_FAMILIES = ("java-", "ImageMagick-")  # a configuration folder for each version installed
_TOKENS = ("/usr/etc", "/usr/local/etc")  # npm's and pip's global configuration, which may hold a token


@final
class View(Struct):
    """The operations that make a guest's root, and what the root shows."""

    template: tuple[Op, ...]  # shared by sandboxes
    box: tuple[Op, ...]  # need one sandbox's uid, disk or private file systems; applied after these are mounted
    shown: tuple[str, ...]  # for --explain
    path: str  # the guest's PATH
    protected: tuple[Protected, ...] = ()  # for host/mount_guard.py, before the operations are applied


def view(
    policy: Policy,
    interpreter: Interpreter,
    *,
    uid: int,
    home: str,
    state: tuple[str, ...] = (),
    stored: tuple[str, ...] = (),
) -> View:
    """Return the guest's view under `policy`.

    `uid` and `home` are the caller's; uid 0 means that real root makes the mounts. `state`: our directories, which are
    never shown, nor is a folder that holds one; `stored`: directories that are never shown, though a folder that holds
    one may be. Raises PolicyError for a mount or command that cannot be shown. Reads host metadata, changes nothing.
    Takes about 1 ms.
    """
    base = _whole_system() if policy.commands == "any" else _listed_programs(policy.commands, interpreter)
    etc = _etc()
    roots = base.roots or interpreter.roots
    links = [SymbolicLink(*link) for link in _LINKS if not any(is_within(one, f"/{link[1]}") for one in roots)]
    around = Surroundings(
        interpreter=replace(interpreter, roots=roots),
        system=tuple((f"/{op.target}", op.source) for op in (*base.ops, *etc) if isinstance(op, Bind)),
        links=_guest_links((*base.ops, *links)),
        uid=uid,
        home=home,
        state=state,
        stored=stored,
        folders=tuple(f"/{name}" for name in _DIRECTORIES),
    )
    placed = place(tuple(policy.mounts), around)
    ops: list[Op] = [Folder(name) for name in _DIRECTORIES]
    ops += [op for op in base.ops if not _is_private(op)]
    ops += _without_mounted(placed.template, (*etc, *_git_excludes(placed.protected)))
    ops += device_ops()
    ops += links
    return View(
        template=(*ops, *placed.template),
        box=(*(op for op in base.ops if _is_private(op)), *placed.box),
        shown=(*base.lines, *placed.shown),
        path=":".join((*interpreter.programs, SYSTEM_PATH)),
        protected=placed.protected,
    )


@final
class _Base(Struct):
    """The system below the mounts: the whole system, or what the named commands need."""

    ops: tuple[Op, ...]
    lines: tuple[str, ...]
    roots: tuple[str, ...] = ()  # of the interpreter, when not all are shown


def _whole_system() -> _Base:
    """Return /usr, and the names beside /usr as this host has them: links into /usr, or directories."""
    ops: list[Op] = [Bind("/usr", "usr")]
    ops += [Hide(path[1:]) for path in _TOKENS if _listed(path)]
    ops += _beside_usr()
    ops += [Bind(f"/{name}", name) for name in _MERGED if _is_directory(f"/{name}")]
    return _Base(ops=tuple(ops), lines=("/usr: read-only, all of the host's programs",))


def _listed_programs(names: tuple[str, ...], interpreter: Interpreter) -> _Base:
    """Return a system in which folders of programs hold only the programs `names` and what they start.

    Folders of libraries are shown as a whole.
    """
    from ringfence.plan.rootfs.commands import PROGRAM_DIRECTORIES, closure, library_directories, roots_without_programs

    named = closure(names, interpreter)
    roots = roots_without_programs(interpreter, named)
    whole = [*library_directories(), *(f"/{name}" for name in _MERGED if name[0] == "l" and _is_directory(f"/{name}"))]
    whole += [path for path in named.directories if not _in_any(path, (*whole, *roots))]
    ops: list[Op] = [*_beside_usr()]
    ops += [Folder(path[1:]) for path in PROGRAM_DIRECTORIES if not os.path.islink(path)]
    ops += [Bind(path, path[1:]) for path in sorted(whole, key=lambda path: (path.count("/"), path))]
    present = (*whole, *roots, "/etc/alternatives", *(f"/{op.target}" for op in _beside_usr()))
    ops += [Bind(path, path[1:]) for path in named.files if not _in_any(path, present)]
    ops += [SymbolicLink(text, link[1:]) for link, text in named.links if not _in_any(link, present)]
    return _Base(ops=tuple(ops), lines=named.explain_lines(), roots=roots)


def _beside_usr() -> list[SymbolicLink]:
    return [SymbolicLink(os.readlink(f"/{name}"), name) for name in _MERGED if os.path.islink(f"/{name}")]


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _in_any(path: str, directories: tuple[str, ...]) -> bool:
    return any(is_within(path, directory) for directory in directories)


def _without_mounted(mounts: tuple[Op, ...], own: tuple[Op, ...]) -> list[Op]:
    """Return our files and links, without those where the policy mounts something."""
    points = {op.target for op in mounts if isinstance(op, Folder | File)}
    return [op for op in own if isinstance(op, Bind) or op.target not in points]


def _is_private(op: Op) -> bool:
    """Return whether an operation's place is in a file system of one sandbox, mounted over the template's."""
    return _in_any(f"/{op.target}", PRIVATE)


def _guest_links(system: tuple[Op, ...]) -> tuple[tuple[str, str], ...]:
    """Return the links in the guest's root that a mount's target may go through, and where each leads."""
    return tuple((f"/{op.target}", rooted(op.text)) for op in system if isinstance(op, SymbolicLink))


def _git_excludes(protected: tuple[Protected, ...]) -> list[Op]:
    """Return the git configuration by which the guest's `git status` and `git add --all` leave out our placeholders."""
    names = sorted({os.path.basename(one.path) for one in protected if one.missing or _like_a_placeholder(one)})
    if not names:
        return []
    config = "[core]\n\texcludesFile = /etc/gitexclude\n"
    text = "".join(f"/{name}\n" for name in names)
    return [File("etc/gitconfig", config), File("etc/gitexclude", text)]


def _like_a_placeholder(one: Protected) -> bool:
    """Return whether a file may be the placeholder of another sandbox on the same folder.

    A guess is enough: excludes concern untracked files only.
    """
    try:
        return not one.directory and one.content is not None and os.stat(one.path).st_size == len(one.content)
    except OSError:
        return False


def device_ops() -> list[Op]:
    """Return the operations that make the /dev of every sandbox."""
    folders = [Folder("dev/shm"), Folder("dev/pts")]
    devices = [Device(name) for name in _DEVICES]
    return [*folders, *devices, *(SymbolicLink(text, target) for text, target in _DEVICE_LINKS)]


def _etc() -> list[Op]:
    ops: list[Op] = [File(target, text) for target, text in _FILES]
    if os.path.exists("/usr/share/zoneinfo/UTC"):
        ops.append(SymbolicLink("/usr/share/zoneinfo/UTC", "etc/localtime"))
    for name in (*_ETC, *(name for name in _listed("/etc") if name.startswith(_ETC_FAMILIES))):
        source = f"/etc/{name}"
        if os.path.islink(source):
            source = os.path.realpath(source)
        if not os.path.exists(source):
            continue
        if is_within(source, "/usr"):
            ops.append(SymbolicLink(source, f"etc/{name}"))
        elif is_within(source, "/etc"):
            ops.append(Bind(source, f"etc/{name}"))
    return ops


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
