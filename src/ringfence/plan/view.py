"""What a guest of the host image sees: the root's layout, a curated /etc, /dev, the interpreter, the policy's mounts.

Pure but for stat, readlink and listdir of host paths. Makes operations (docs/design/process-backend.md); applies none.
/proc, /tmp, /workspace, /dev/shm, /dev/pts and the masks are made by guest/box.py.
"""

from __future__ import annotations

import os

from ringfence.plan.interpreter import within
from ringfence.plan.mounts import Surroundings, place
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.interpreter import Interpreter
    from ringfence.plan.protected import Protected
    from ringfence.policy.model import Policy

    Op = list[object]

GUEST_HOME = "/workspace"  # the guest's HOME, also in its /etc/passwd
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_DIRECTORIES = (
    *("usr", "proc", "dev", "dev/shm", "dev/pts", "tmp", "workspace", "etc", "home", "root", "run"),
    *("var", "var/lib", "var/cache", "var/log", "opt", "srv", "mnt"),
)
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = (
    ("/proc/self/fd", "dev/fd"),
    ("/proc/self/fd/0", "dev/stdin"),
    ("/proc/self/fd/1", "dev/stdout"),
    ("/proc/self/fd/2", "dev/stderr"),
    ("pts/ptmx", "dev/ptmx"),
    ("/proc/self/mounts", "etc/mtab"),
    ("/tmp", "var/tmp"),  # the guest's own
    ("/run", "var/run"),
)

# Written by us: no user, host or network name of the host is among them (B13).
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
    ("etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"),
    ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"),
    ("etc/timezone", "Etc/UTC\n"),
    ("etc/shells", "/bin/sh\n/bin/bash\n"),
)

# Of the host's /etc, what programs under /usr need to work and what names nobody. Keys, accounts, tokens
# (npmrc, pip.conf, gitconfig) and host names are left out; private key folders lie beside these, never below.
# Each is a mount that every sandbox's mount namespace copies, so the list is short.
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
    """Operations and what they come to. `template` ones are shared by sandboxes, `box` ones need one sandbox's uid,
    disk or private file systems, and come after those are mounted."""

    template: tuple[Op, ...]
    box: tuple[Op, ...]
    shown: tuple[str, ...]  # for --explain
    path: str  # the guest's PATH
    protected: tuple[Protected, ...] = ()  # for backends/process/protect.py, before the operations are applied


def view(policy: Policy, interpreter: Interpreter, *, uid: int, home: str, state: tuple[str, ...] = ()) -> View:
    """The guest's view under `policy`. `uid` and `home` are the caller's; uid 0 means that real root makes the mounts.

    `state`: directories of ours, never shown. Raises PolicyError for a mount or command that cannot be shown.
    Reads host metadata, changes nothing. About 1 ms.
    """
    system, lines, path = _programs(policy, interpreter)
    etc = _etc()
    around = Surroundings(
        interpreter=interpreter,
        system=tuple((f"/{op[2]}", str(op[1])) for op in (*system, *etc) if op[0] == "bind"),
        links=_guest_links(system),
        uid=uid,
        home=home,
        state=state,
    )
    placed = place(tuple(policy.mounts), around)
    ops: list[Op] = [["dir", name, 0o755] for name in _DIRECTORIES]
    ops += system
    ops += etc
    ops += _git_excludes(placed.protected)
    ops += [["dev", name] for name in _DEVICES]
    ops += [["symlink", text, target] for text, target in _LINKS]
    return View(
        template=(*ops, *placed.template),
        box=placed.box,
        shown=(*lines, *placed.shown),
        path=path,
        protected=placed.protected,
    )


def _programs(policy: Policy, interpreter: Interpreter) -> tuple[list[Op], list[str], str]:
    """/usr as a whole, or only what the named commands need."""
    return _system(), ["/usr: read-only, all of the host's programs"], ":".join((*interpreter.programs, SYSTEM_PATH))


def _guest_links(system: list[Op]) -> tuple[tuple[str, str], ...]:
    """Links in the guest's root that a mount's target may go through, with what they stand for."""
    links = [(f"/{op[2]}", os.path.normpath(f"/{op[1]}")) for op in system if op[0] == "symlink"]
    return (*links, ("/var/tmp", "/tmp"), ("/var/run", "/run"))


def _git_excludes(protected: tuple[Protected, ...]) -> list[Op]:
    """Placeholders are ours, not the guest's work: its `git status` and `git add --all` leave them out."""
    names = sorted({os.path.basename(one.path) for one in protected if one.missing})
    if not names:
        return []
    config = "[core]\n\texcludesFile = /etc/gitexclude\n"
    text = "".join(f"/{name}\n" for name in names)
    return [["file", "etc/gitconfig", config, 0o644], ["file", "etc/gitexclude", text, 0o644]]


def _bind(source: str, target: str) -> Op:
    return ["bind", source, target, {"rw": False, "idmap": False, "exec": True}]


def _system() -> list[Op]:
    """/usr, and the names beside it as this host has them: links into /usr, or directories of their own."""
    ops: list[Op] = [_bind("/usr", "usr")]
    ops += [["hide", path[1:]] for path in _TOKENS if _has_entries(path)]
    for name in _MERGED:
        path = f"/{name}"
        if os.path.islink(path):
            ops.append(["symlink", os.readlink(path), name])
        elif os.path.isdir(path):
            ops.append(_bind(path, name))
    return ops


def _etc() -> list[Op]:
    ops: list[Op] = [["file", target, text, 0o644] for target, text in _FILES]
    if os.path.exists("/usr/share/zoneinfo/UTC"):
        ops.append(["symlink", "/usr/share/zoneinfo/UTC", "etc/localtime"])
    for name in (*_ETC, *(name for name in _listed("/etc") if name.startswith(_ETC_FAMILIES))):
        source = os.path.realpath(f"/etc/{name}")
        if not os.path.exists(source):
            continue
        if within(source, "/usr"):
            ops.append(["symlink", source, f"etc/{name}"])
        elif within(source, "/etc"):
            ops.append(_bind(source, f"etc/{name}"))
    return ops


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _has_entries(path: str) -> bool:
    return bool(_listed(path))
