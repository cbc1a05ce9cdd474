"""Makes any root file system one that a sandbox can be made of: fixed directories, /etc files of ours, the user `user`.

Works on the tree before it gets its digest, so that every backend finds the same in an image and changes nothing later.
"""

from __future__ import annotations

from ringfence.images.tar_reader import Entry, TarError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.images.tar_reader import Kind
    from ringfence.images.tree import Node, Path, Tree

UID = 1000
HOME = "/workspace"
_EMPTY = ("dev", "proc", "sys", "tmp", "workspace")  # every sandbox mounts its own there
_DIRECTORIES = (*_EMPTY, "run", "var", "etc", "root", "home", "mnt", "opt", "srv", "usr")
_FILES = {
    "hosts": "127.0.0.1 localhost ringfence\n::1 localhost ip6-localhost ip6-loopback\n",
    "hostname": "ringfence\n",
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
}
_ROOT_LINE = "root:x:0:0:root:/root:/bin/sh\n"
_NOBODY_LINE = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_PROGRAMS = ("usr/local/bin", "usr/bin", "bin", "opt/venv/bin", "opt/conda/bin")
_MOST_LINKS = 40


def outfit(tree: Tree, *, user: str = "user") -> list[str]:
    """Add what every image has. Returns what was changed of the image's own, in words. Raises TarError."""
    notes = [f"{count} {what} left out" for what, count in sorted(tree.dropped.items())]
    tree.begin_layer()
    for name in _DIRECTORIES:
        notes += _real_directory(tree, name)
    for name in _EMPTY:
        home = tree.find((name,))
        assert home is not None
        if home.children:
            notes.append(f"/{name}: {len(home.children)} entries left out, a sandbox has its own")
        for child in list(home.children):
            tree.remove((name, child))
    for name, text in _FILES.items():
        _file(tree, f"etc/{name}", text)
    _symlink(tree, "etc/mtab", "/proc/self/mounts")
    _symlink(tree, "var/tmp", "/tmp")
    notes += _accounts(tree, user)
    return notes


def _real_directory(tree: Tree, name: str) -> list[str]:
    node = tree.find((name,))
    if node is not None and node.kind == "dir":
        return []
    if node is not None and name in ("etc", "usr", "var"):
        raise TarError(f"/{name} is a {node.kind}, not a directory")
    mode = 0o1777 if name == "tmp" else 0o700 if name == "root" else 0o755
    tree.add(_entry(name, "dir", mode=mode), list)
    return [] if node is None else [f"/{name} was a {node.kind} and is an empty directory now"]


def _entry(name: str, kind: Kind, *, mode: int = 0o644, size: int = 0, link: str = "") -> Entry:
    return Entry(name, kind, mode=mode, size=size, mtime=0, link=link, extended=False)


def _file(tree: Tree, name: str, text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    tree.add(_entry(name, "file", size=len(data)), lambda: [data])


def _symlink(tree: Tree, name: str, text: str) -> None:
    tree.add(_entry(name, "symlink", link=text), list)


def _accounts(tree: Tree, user: str) -> list[str]:
    """uid 1000 is `user`, whatever else the image calls it: the first line with a name or number counts."""
    names = [user] if user == "user" else [user, "user"]
    notes = []
    for file, line, usual in (
        ("passwd", f"{{}}:x:{UID}:{UID}:{{}}:{HOME}:{_shell(tree)}\n", _ROOT_LINE + _NOBODY_LINE),
        ("group", f"{{}}:x:{UID}:\n", "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n"),
    ):
        data = tree.read(("etc", file))
        there = tree.find(("etc", file))
        if there is not None and data is None:
            notes.append(f"/etc/{file} was a {there.kind} that is not followed, and is one of ours now")
        old = (data or b"").decode("utf-8", "surrogateescape").splitlines(keepends=True) or [usual]
        kept = "".join(one for one in old if one.partition(":")[0] not in names)
        if kept and not kept.endswith("\n"):
            kept += "\n"
        _file(tree, f"etc/{file}", "".join(line.format(name, name) for name in names) + kept)
    return notes


def _shell(tree: Tree) -> str:
    return "/bin/bash" if resolve(tree, ("bin", "bash")) is not None else "/bin/sh"


def find_python(tree: Tree, env: Mapping[str, str]) -> str | None:
    """The image's own Python 3, as a path inside, looked for as its PATH says and then where it usually is."""
    places = [place.strip("/") for place in env.get("PATH", "").split(":") if place.startswith("/")]
    for place in dict.fromkeys([*places, *_PROGRAMS]):
        path = (*(part for part in place.split("/") if part), "python3")
        node = resolve(tree, path)
        if node is not None and node.kind == "file" and node.mode & 0o111:
            return "/" + "/".join(path)
    return None


def resolve(tree: Tree, path: Path) -> Node | None:
    """What is at `path` inside the root, links followed there and never outside. None: nothing, or a loop."""
    found = real_path(tree, path)
    return None if found is None else tree.find(found)


def real_path(tree: Tree, path: Path) -> Path | None:
    """`path` without links, as the root itself resolves them; what does not exist stays as it is. None: a loop."""
    left = list(path)
    at: list[str] = []
    links = 0
    while left:
        part = left.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            at = at[:-1]
            continue
        node = tree.find((*at, part))
        if node is None or node.kind != "symlink":
            at.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        if node.content.startswith("/"):
            at = []
        left = node.content.split("/") + left
    return tuple(at)
