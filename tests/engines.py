"""Container engines of the tests' own: started when first asked for, in folders of their own, ended with the tests."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

# Another runtime, that only containers which ask for it have. Without its network, as no container of ours has one: the
# runsc of 2022 takes every network namespace of a new kernel for the host's own.
_SETTINGS = {
    "runtimes": {
        "runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--network=none"]},
        "renamed": {"path": shutil.which("runc", path="/usr/sbin:/usr/bin:/sbin:/bin") or "runc"},
    }
}
_ANSWER_S = 30.0
_END_S = 15.0


_prctl = ctypes.CDLL(None).prctl


def _end_with_us() -> None:
    """Ask the kernel for SIGTERM when the tests die: an engine must not outlive the tests that started it."""
    _prctl(1, signal.SIGTERM)


class Started:
    """An engine. `socket` is the path at which it answers."""

    def __init__(self, name: str, folder: Path, command: list[str], at: Path) -> None:
        self.name = name
        self.socket = str(at)
        self._folder = folder
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str | None:
        """Start the engine. Returns None when the engine answers; else the last line of its log."""
        log = self._folder / "log"
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_end_with_us,  # noqa: PLW1509  # one call of libc's, bound before the fork
                env={**os.environ, "PATH": _path(), "TMPDIR": str(self._folder)},  # Podman leaves files there
                cwd=self._folder,  # and here an "oom" for each container that met its limit
            )
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._answers():
                return None
            time.sleep(0.05)
        self.kill()
        return log.read_text(errors="replace").strip().rpartition("\n")[2][:300] or "no answer"

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5)
            try:
                probe.connect(self.socket)
                probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
                return b" 200 " in probe.recv(64)
            except OSError:
                return False

    def kill(self, *, hard: bool = False) -> None:
        """End the engine's process and the processes started by it. Docker's containers end with the engine."""
        if self._process is None:
            return
        if self._process.poll() is None and not hard:
            self._process.terminate()
        elif self._process.poll() is None:
            self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        if hard:
            for pid in _using(str(self._folder), "containerd"):
                os.kill(pid, 9)
            # Who is not reaped yet passes for alive.
            (self._folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def end(self) -> None:
        self.kill()
        for pid in _using(str(self._folder)):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
        for point in reversed(_mounts_below(str(self._folder))):
            subprocess.run(["umount", "-l", point], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _using(folder: str, name: str = "") -> list[int]:
    """Return the processes that were started with a path in this folder, such as shims and containerd."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            program = words.partition("\0")[0].rpartition("/")[2]
            if f"{folder}/" in words and name in ("", program):
                found.append(int(entry.name))
    return found


def _mounts_below(folder: str) -> list[str]:
    rows = [row.split()[4] for row in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in rows if point.startswith(f"{folder}/")]


def _folder(name: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix=f"rf-tests-{name}-", dir="/var/tmp"))
    made.chmod(0o755)
    return made


def missing(name: str) -> str | None:
    """Return why this host cannot start that engine; None when it may try."""
    program = {"docker": "dockerd", "podman": "podman"}[name]
    if shutil.which(program, path=_path()) is None:
        return f"{program} is not installed"
    return None if os.geteuid() == 0 else f"only root can start {program} with folders of its own"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def make(name: str) -> Started:
    """Return another engine, which is not started. The caller ends it."""
    folder = _folder(name)
    at = folder / "engine.sock"
    if name == "docker":
        places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        options = [f"--{option}={folder}/{place}" for option, place in places.items()]
        (folder / "daemon.json").write_text(json.dumps(_SETTINGS))
        options.append(f"--config-file={folder}/daemon.json")
        quiet = ["--bridge=none", "--iptables=false", "--ip-masq=false", "--log-level=error"]
        return Started(name, folder, ["dockerd", *options, *quiet, f"--host=unix://{at}"], at)
    places = {"root": "data", "runroot": "run", "tmpdir": "tmp"}
    options = [f"--{option}={folder}/{place}" for option, place in places.items()]
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()  # crun runs nothing where both versions are mounted
    quiet = ["--cgroup-manager=cgroupfs", "--events-backend=none", f"--runtime={'crun' if unified else 'runc'}"]
    return Started(name, folder, ["podman", *options, *quiet, "system", "service", "--time=0", f"unix://{at}"], at)


@cache
def running(name: str) -> Started | str:
    """Return the engine that all tests share, or in words why there is none."""
    reason = missing(name)
    if reason is not None:
        return reason
    engine = make(name)
    atexit.register(engine.end)
    failure = engine.start()
    if failure is not None:
        return f"{name} does not start: {failure}"
    _started.add(name)
    return engine


def started() -> frozenset[str]:
    """Return the names of the engines that some test asked for."""
    return frozenset(_started)


_started: set[str] = set()
