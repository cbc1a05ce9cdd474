"""Reads /proc: processes, descriptors and mounts. Trusts no name that it reads: guests choose names."""

from __future__ import annotations

import os

_LONGEST = 4096  # bytes of a line about a process
_PIECE = 1 << 16
_ESCAPED = " \t\n#\\"  # what the kernel writes as a backslash and three octal digits; the backslash itself comes last
# What a guest may see of /proc besides its own processes. An allow-list: a new entry of a newer kernel is masked (B15).
PROC_SHOWN = frozenset(
    [
        "self",
        "thread-self",
        "cpuinfo",
        "filesystems",
        "loadavg",
        "meminfo",
        "mounts",
        "net",
        "stat",
        "sys",
        "sysvipc",
        "uptime",
        "version",
    ]
)


class ProcessStat:
    """A process, as /proc/<pid>/stat describes it."""

    __slots__ = ("flags", "parent", "session", "started", "state", "threads")

    def __init__(self, text: bytes) -> None:
        fields = text.rpartition(b")")[2].split()  # the process's name before it may hold blanks and brackets
        self.state = fields[0]
        self.parent = int(fields[1])  # 0: outside this pid namespace
        self.session = int(fields[3])
        self.flags = int(fields[6])
        self.threads = int(fields[17])
        self.started = int(fields[19])  # clock ticks since boot

    @property
    def has_ended(self) -> bool:
        """Return whether the process is a zombie or about to vanish."""
        return self.state in (b"Z", b"X")


def process(pid: int | str) -> ProcessStat:
    """Return what the kernel says of a process. Raises OSError where it is gone or hidden."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return ProcessStat(os.read(fd, _LONGEST))
    finally:
        os.close(fd)


def processes() -> dict[int, ProcessStat]:
    """Return every process that this /proc shows, by its number; zombies too."""
    found: dict[int, ProcessStat] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found[int(name)] = process(name)
            except OSError:
                continue  # the process has ended meanwhile
    return found


def children_of(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`, zombies too."""
    return [child for child, found in processes().items() if found.parent == pid]


def fields(path: str) -> dict[str, str]:
    """Return the lines `name: value` of a file such as /proc/<pid>/status or fdinfo/<number>. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        return {name: value.strip() for name, _, value in (row.partition(":") for row in file)}


class MountPoint:
    """A mount, as a mountinfo describes it."""

    __slots__ = ("device", "kind", "number", "options", "parent", "root", "target")

    def __init__(self, line: str) -> None:
        before, _, after = line.partition(" - ")
        self.number, self.parent, self.device, root, target, options = before.split(" ")[:6]
        self.root = _unescaped(root)  # the mounted part of the file system
        self.target = _unescaped(target)
        self.options = options.split(",")
        self.kind = after.partition(" ")[0]


def mounts(process: int | str = "self") -> list[MountPoint]:
    """Return the mounts that a process sees, in the kernel's order. Raises OSError."""
    return mounts_in(f"/proc/{process}/mountinfo")


def mounts_in(path: str) -> list[MountPoint]:
    """Return the mounts of a mountinfo. Raises OSError."""
    text = b""
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            text += piece
    return [MountPoint(line) for line in text.decode("utf-8", "surrogateescape").split("\n") if line]


def _unescaped(text: str) -> str:
    for sign in _ESCAPED if "\\" in text else "":
        text = text.replace(f"\\{ord(sign):03o}", sign)
    return text
