"""What a container used, from the cgroup its engine made for it. The engine's own statistics take a second to ask."""

from __future__ import annotations

import os

from ringfence.results import Usage

_MOUNT = "/sys/fs/cgroup"


class Counters:
    """Found by a process of the container's; None everywhere where it has no cgroup of its own that can be read."""

    def __init__(self, pid: int, identity: str) -> None:
        self._at = {name: path for name, path in _directories(pid).items() if identity in path}

    def cpu_file(self) -> str | None:
        """Where the CPU time of the whole container is counted."""
        if "" in self._at:
            return f"{self._at['']}/cpu.stat"
        return f"{self._at['cpuacct']}/cpuacct.usage" if "cpuacct" in self._at else None

    def read(self) -> tuple[Usage, int]:
        """And how often the memory limit killed."""
        if "" in self._at:
            here = self._at[""]
            cpu = _field(f"{here}/cpu.stat", "usage_usec")
            usage = Usage(cpu_s=None if cpu is None else cpu / 1e6, memory_peak_bytes=_number(f"{here}/memory.peak"))
            return usage, _field(f"{here}/memory.events", "oom_kill") or 0
        cpu = _number(f"{self._at.get('cpuacct', '')}/cpuacct.usage")
        memory = self._at.get("memory", "")
        peak = _number(f"{memory}/memory.max_usage_in_bytes")
        usage = Usage(cpu_s=None if cpu is None else cpu / 1e9, memory_peak_bytes=peak)
        return usage, _field(f"{memory}/memory.oom_control", "oom_kill") or 0


def processes(pid: int) -> int:
    """How many there are in the container of this process, threads counted; 0 when that cannot be read."""
    at = _directories(pid)
    return _number(f"{at.get('', at.get('pids', ''))}/pids.current") or 0


def _directories(pid: int) -> dict[str, str]:
    """Controller → directory; the empty name is cgroup v2's."""
    found: dict[str, str] = {}
    unified = os.path.exists(f"{_MOUNT}/cgroup.controllers")
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            rows = [row.rstrip("\n").split(":", 2) for row in file]
    except OSError:
        return found
    for _, names, path in rows:
        if unified and not names:
            return {"": f"{_MOUNT}{path}"}
        for name in names.split(",") if names and not unified else ():
            found[name] = f"{_MOUNT}/{name}{path}"
    return found


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _field(path: str, name: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            for row in file:
                if row.startswith(f"{name} "):
                    return int(row.split()[1])
    except (OSError, ValueError):
        return None
    return None
