"""One container, as its engine holds it: how it is asked, stopped and removed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

from ringfence.backends.container.channel import other_end
from ringfence.backends.engine.mount_identity import gofer_of
from ringfence.errors import SandboxLostError, StartTimeoutError
from ringfence.results import Usage
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ringfence.backends.container.api import Engine
    from ringfence.backends.container.channel import Door


# MERGED: A container's attached stream: what guestd writes to its error stream, and the channel where there is no door.
#
# It ends when the container does, and when its engine does.


_HEADER = struct.Struct(">BxxxI")  # stream, length
_STDOUT = 1
_READ = 1 << 17
_SAID = 1 << 14
_LAST_WORDS_S = 1.0
ERRORS = {"stderr": 1, "stream": 1}  # what to attach to
ALL = {"stdin": 1, "stdout": 1, **ERRORS}


class Stream:
    """The engine's framing is taken off by a thread. `over` is called when it has ended."""

    def __init__(self, attached: Any, over: Callable[[], None]) -> None:
        self._engine: socket.socket = getattr(attached, "_sock", attached)
        # What owns the connection: were the file alone closed, the rest would complain when it is collected. Not the
        # response around it, whose close gives the connection back for another request.
        response = getattr(attached, "_response", None)
        self._whole = attached if response is None else response.raw
        self._engine.settimeout(None)
        self._said = bytearray()
        self._over = over
        self._taking = threading.Thread(target=self._take_all, name="ringfence-container", daemon=True)

    def begin(self) -> None:
        self._taking.start()

    @property
    def lasts(self) -> bool:
        return self._taking.is_alive()

    @property
    def said(self) -> str:
        """What it wrote to its error stream. For after its end: waits a moment for the last of it."""
        self._taking.join(_LAST_WORDS_S)
        return self._said.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """From any thread. Idempotent."""
        _shut(self._engine)

    def forget(self) -> None:
        """In a forked child of the library, which has no thread of ours: close this copy."""
        _drop(self._engine)

    def _take_all(self) -> None:
        fast_stdlib.hold_pipe_signal()
        held = bytearray()
        try:
            while data := self._engine.recv(_READ):
                held += data
                self._take(held)
        except OSError:
            return  # one side is gone
        finally:
            self._end()
            self._over()

    def _end(self) -> None:
        self._whole.close()
        self._engine.close()

    def _take(self, held: bytearray) -> None:
        start = 0
        while len(held) - start >= _HEADER.size:
            kind, length = _HEADER.unpack_from(held, start)
            end = start + _HEADER.size + length
            if len(held) < end:
                break
            data = bytes(held[start + _HEADER.size : end])
            if kind == _STDOUT:
                self._output(data)
            elif len(self._said) < _SAID:
                self._said += data[:_SAID]
            start = end
        del held[:start]

    def _output(self, data: bytes) -> None:
        """Of guestd, whose standard output is nothing when it came by a door."""


class ChannelStream(Stream):
    """`ours` speaks with guestd: what is sent there goes to its standard input, its output comes back."""

    def __init__(self, attached: Any, over: Callable[[], None]) -> None:
        super().__init__(attached, over)
        self.ours, self._theirs = socket.socketpair()
        # A thread each way: neither waits for the other, as guestd never lets its input wait for its output.
        self._giving = threading.Thread(target=self._pass_in, name="ringfence-container", daemon=True)

    def begin(self) -> None:
        self._giving.start()
        super().begin()

    def close(self) -> None:
        """guestd sees the end of its input, and ends."""
        _shut(self._theirs)
        super().close()

    def forget(self) -> None:
        _drop(self._theirs)
        super().forget()

    def _pass_in(self) -> None:
        fast_stdlib.hold_pipe_signal()
        try:
            while data := self._theirs.recv(_READ):
                self._engine.sendall(data)
        except OSError:
            return  # one side is gone
        finally:
            self.close()

    def _output(self, data: bytes) -> None:
        self._theirs.sendall(data)

    def _end(self) -> None:
        self.close()
        self._giving.join()
        self._theirs.close()
        super()._end()


def _drop(sock: socket.socket) -> None:
    """Its `close` alone would wait for a file object around it."""
    fd = sock.detach()
    if fd >= 0:
        os.close(fd)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is gone


# MERGED: What a container used, from the cgroup its engine made for it. The engine's own statistics take a second
# to ask.


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


_STEP_S = 1.0
_END_S = 0.5  # for guestd to end by itself


class ContainerWall:
    """Made before its container is started."""

    def __init__(self, engine: Engine, identity: str, door: Door | None, *, targets: Sequence[str] = ()) -> None:
        """`targets`: of all that it was asked to mount."""
        self.targets = targets
        self._undo = contextlib.ExitStack()
        self._engine = engine
        self._id = identity
        self._door = door
        self._pid = 0
        self._paused = False
        self._closing = False
        self._counters: Counters | None = None
        self._ended = threading.Lock()
        self._removing = threading.Event()
        kinds = (ALL, ChannelStream) if door is None else (ERRORS, Stream)
        self._stream = kinds[1](engine.api.attach_socket(identity, params=kinds[0]), self._stream_over)
        self._channel: socket.socket | None = getattr(self._stream, "ours", None)
        self._stream.begin()

    @property
    def channel(self) -> socket.socket:
        assert self._channel is not None
        return self._channel

    @property
    def takes_descriptors(self) -> bool:
        """Its channel does."""
        return self._door is not None

    def keep(self, undo: contextlib.ExitStack) -> None:
        """What removes the container, and all that was made for it."""
        self._undo = undo

    def wait_for_guestd(self, deadline: float, uid: int | None) -> None:
        """After the start. Raises SandboxLostError when it ended, StartTimeoutError."""
        if self._door is None:
            return
        while self._channel is None and self._stream.lasts and time.monotonic() < deadline:
            # In steps: the stream may end in a way that says nothing of the container.
            self._channel = self._door.wait(min(deadline, time.monotonic() + _STEP_S), uid)
        self._door.close()
        if self._channel is not None:
            return
        if time.monotonic() >= deadline:
            raise StartTimeoutError("the container sandbox did not start in time", fix="try again")
        why = self.said() or self.how_it_ended()
        raise SandboxLostError(f"the container sandbox ended while it was built: {why}", fix="ringfence doctor")

    def _stream_over(self) -> None:
        """The container has ended, or its engine, which then holds nothing of it any more: so nobody is to go on."""
        if self._closing or (self._door is not None and self._runs()):
            return
        self.hang_up()

    def hang_up(self) -> None:
        """guestd sees the end of its channel, and ends. Idempotent."""
        self._closing = True
        self._stream.close()
        if self._door is not None:
            self._door.give_up()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)

    def _runs(self) -> bool:
        try:
            return bool(self._state().get("Running"))
        except Exception:  # noqa: BLE001  # as in `freeze`
            return False

    @property
    def pid(self) -> int:
        """guestd's, as this host counts. Asked for once, when it is needed: it costs a request."""
        if not self._pid:
            self._pid = int(self._state().get("Pid") or 0)
        return self._pid

    @property
    def shows_files(self) -> int:
        """The process, as this host counts, whose mounts are what guests see; 0 when it is not to be seen."""
        return other_end(self.channel)[0] if self._door is not None else gofer_of(self._id)

    def cpu_counter(self) -> int:
        """A descriptor from which guestd can read what the whole container used; -1 where there is none."""
        try:
            path = Counters(other_end(self.channel)[0], self._id).cpu_file()
            return -1 if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._engine.api.inspect_container(self._id)["State"]
        return found

    def said(self) -> str:
        return self._stream.said.rpartition("\n")[2][:300]

    def how_it_ended(self) -> str:
        """Asked for when the channel is gone."""
        try:
            state = self._state()
        except Exception:  # noqa: BLE001  # as in `freeze`
            return f"{self._engine.name} does not answer any more, or has forgotten the container"
        if state.get("OOMKilled"):
            return f"{self._engine.name} says that its memory limit ended it"
        if state.get("Running"):
            return f"its channel ended, and {self._engine.name} says that it runs on"
        return f"{self._engine.name} says that it ended with status {int(state.get('ExitCode') or 0)}"

    def usage(self) -> tuple[Usage, int]:
        if self._counters is None:
            try:
                self._counters = Counters(self.pid, self._id)
            except Exception:  # noqa: BLE001  # as in `freeze`
                return Usage(), 0
        return self._counters.read()

    can_freeze = True

    def freeze(self) -> bool:
        try:
            self._engine.api.pause(self._id)
        except Exception as error:  # noqa: BLE001  # the SDK's errors are many; each means the same here
            self._paused = "already paused" in str(error).lower()
            return self._paused
        self._paused = True
        return True

    def thaw(self) -> None:
        self._paused = False
        quietly(self._engine.api.unpause, self._id)

    def kill(self) -> None:
        """guestd ends with its channel, and everything with guestd; the engine's kill is for one that does not."""
        self.hang_up()
        if self._paused:
            self.thaw()  # Podman kills none that stands still
        threading.Thread(target=self._kill, name="ringfence-kill", daemon=True).start()

    def _kill(self) -> None:
        """In a thread, and not where it is removed anyway: Podman without root takes 20 s to answer."""
        if not self._removing.wait(_END_S):
            quietly(self._engine.api.kill, self._id)

    def forget(self) -> None:
        self._closing = True
        self._stream.forget()

    def remove(self) -> None:
        self._removing.set()
        with self._ended:
            self._undo.close()


def quietly(call: Any, *args: object, **kwargs: object) -> None:
    """For what may be gone already, or an engine that is: the sweep of the next start sees to the rest."""
    try:
        call(*args, **kwargs)
    except Exception:  # noqa: BLE001  # as above
        return
