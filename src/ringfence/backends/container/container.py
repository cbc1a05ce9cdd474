"""A container in the hands of its engine: attached stream, counters, end.

The attached stream carries what guestd writes to its error stream, and the channel where the container has no door. The
stream ends when the container does, and when the engine does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

from ringfence.backends.container.channel import other_end
from ringfence.backends.engine import guestd_bundle
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

_HEADER = struct.Struct(">BxxxI")  # stream, length
_STDOUT = 1
_READ = 1 << 17
_SAID = 1 << 14
_LAST_WORDS_S = 1.0
_STEP_S = 1.0
_END_S = 0.5  # for guestd to end by itself
_ADDRESS_S = 5.0
_CGROUPS = "/sys/fs/cgroup"
ERRORS = {"stderr": 1, "stream": 1}  # what to attach to
ALL = {"stdin": 1, "stdout": 1, **ERRORS}


class Stream:
    """The attached stream of a container with a door: guestd's error stream. A thread removes the engine's framing."""

    def __init__(self, attached: Any, over: Callable[[], None]) -> None:
        """`over` is called, from the thread, when the stream has ended."""
        self._engine: socket.socket = getattr(attached, "_sock", attached)
        # The owner of the connection. Closing the socket alone would make the owner complain when it is collected;
        # closing the response around the owner would give the connection back for another request.
        response = getattr(attached, "_response", None)
        self._whole = attached if response is None else response.raw
        self._engine.settimeout(None)
        self._said = bytearray()
        self._over = over
        self._taking = threading.Thread(target=self._take_all, name="ringfence-container", daemon=True)

    def begin(self) -> None:
        """Start the thread that reads the stream."""
        self._taking.start()

    @property
    def lasts(self) -> bool:
        """Whether the stream has not ended yet."""
        return self._taking.is_alive()

    @property
    def said(self) -> str:
        """What guestd wrote to its error stream. To be read after the end: waits a moment for the last words."""
        self._taking.join(_LAST_WORDS_S)
        return self._said.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """End the stream. Safe from any thread. Idempotent."""
        _shut(self._engine)

    def after_fork(self) -> None:
        """Close this copy of the stream in a forked child of the library, where our threads do not run."""
        _drop(self._engine)

    def _take_all(self) -> None:
        fast_stdlib.hold_pipe_signal()
        buffer = bytearray()
        try:
            while data := self._engine.recv(_READ):
                buffer += data
                self._take(buffer)
        except OSError:
            return  # one side is gone
        finally:
            self._end()
            self._over()

    def _end(self) -> None:
        self._whole.close()
        self._engine.close()

    def _take(self, buffer: bytearray) -> None:
        start = 0
        while len(buffer) - start >= _HEADER.size:
            kind, length = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            data = bytes(buffer[start + _HEADER.size : end])
            if kind == _STDOUT:
                self._output(data)
            elif len(self._said) < _SAID:
                self._said += data[:_SAID]
            start = end
        del buffer[:start]

    def _output(self, data: bytes) -> None:
        """Ignore guestd's standard output: a guestd that came by a door sends nothing there."""


class ChannelStream(Stream):
    """The attached stream of a container without a door: also the channel to guestd, whose host end is `ours`.

    What is sent to `ours` goes to guestd's standard input; guestd's standard output comes back.
    """

    def __init__(self, attached: Any, over: Callable[[], None]) -> None:
        super().__init__(attached, over)
        self.ours, self._theirs = socket.socketpair()
        # A thread for each direction: neither waits for the other, as guestd never lets input wait for output.
        self._giving = threading.Thread(target=self._pass_in, name="ringfence-container", daemon=True)

    def begin(self) -> None:
        self._giving.start()
        super().begin()

    def close(self) -> None:
        """End the stream. guestd reads the end of its input and ends too."""
        _shut(self._theirs)
        super().close()

    def after_fork(self) -> None:
        _drop(self._theirs)
        super().after_fork()

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
    """Close a socket's descriptor at once. The socket's own `close` would wait for a file object around it."""
    fd = sock.detach()
    if fd >= 0:
        os.close(fd)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already


class Counters:
    """The counters of a container: the CPU time and memory that its cgroup counts.

    The engine's own statistics take a second to fetch. Every value is None where the container has no cgroup of its
    own that can be read.
    """

    def __init__(self, pid: int, identity: str) -> None:
        """`pid`: any process of the container; `identity`: the container's id, which the cgroup is named after."""
        self._at = {name: path for name, path in _directories(pid).items() if identity in path}

    def cpu_file(self) -> str | None:
        """Return the path of the file that counts the CPU time of the whole container."""
        if "" in self._at:
            return f"{self._at['']}/cpu.stat"
        return f"{self._at['cpuacct']}/cpuacct.usage" if "cpuacct" in self._at else None

    def read(self) -> tuple[Usage, int]:
        """Return the use so far, and how often the memory limit killed a process."""
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
    """Return the number of processes and threads in the container of process `pid`; 0 when it cannot be read."""
    at = _directories(pid)
    return _number(f"{at.get('', at.get('pids', ''))}/pids.current") or 0


def _directories(pid: int) -> dict[str, str]:
    """Return the cgroup directory of process `pid` by controller; under the empty name the one of cgroup v2."""
    found: dict[str, str] = {}
    unified = os.path.exists(f"{_CGROUPS}/cgroup.controllers")
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            rows = [row.rstrip("\n").split(":", 2) for row in file]
    except OSError:
        return found
    for _, names, path in rows:
        if unified and not names:
            return {"": f"{_CGROUPS}{path}"}
        for name in names.split(",") if names and not unified else ():
            found[name] = f"{_CGROUPS}/{name}{path}"
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


class ContainerWall:
    """A container as `EngineBox` uses it. Made when the container has been created and not started yet."""

    def __init__(self, engine: Engine, identity: str, door: Door | None, *, targets: Sequence[str] = ()) -> None:
        """`targets`: every path inside at which the engine was asked to mount something."""
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
        """The host's end of the channel to guestd. Available after `wait_for_guestd`."""
        assert self._channel is not None
        return self._channel

    @property
    def takes_descriptors(self) -> bool:
        """Whether the channel carries descriptors."""
        return self._door is not None

    def keep(self, undo: contextlib.ExitStack) -> None:
        """Keep the callbacks that remove the container and everything made for it, for `remove`."""
        self._undo = undo

    def wait_for_guestd(self, deadline: float, uid: int | None) -> None:
        """Wait, after the start, until guestd has connected. `uid`: the user it must come as, where that is known.

        Raises SandboxLostError when the container ended, StartTimeoutError at the deadline.
        """
        if self._door is None:
            return
        while self._channel is None and self._stream.lasts and time.monotonic() < deadline:
            # In steps: the stream can end while the container runs on, which the door does not notice.
            self._channel = self._door.wait(min(deadline, time.monotonic() + _STEP_S), uid)
        self._door.close()
        if self._channel is not None:
            return
        if time.monotonic() >= deadline:
            raise StartTimeoutError("the container sandbox did not start in time", fix="try again")
        why = self.said() or self.how_it_ended()
        raise SandboxLostError(f"the container sandbox ended while it was built: {why}", fix="ringfence doctor")

    def _stream_over(self) -> None:
        """End the sandbox when the stream has ended: the container is gone, or the engine that watched it."""
        if self._closing or (self._door is not None and self._runs()):
            return
        self.hang_up()

    def hang_up(self) -> None:
        """Close the channel. guestd sees that and ends. Idempotent."""
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
        """The host's number of guestd's process. Fetched once, when first needed: it costs a request."""
        if not self._pid:
            self._pid = int(self._state().get("Pid") or 0)
        return self._pid

    @property
    def shows_files(self) -> int:
        """The host's number of the process whose mounts are what guests see; 0 when the process is not visible."""
        return other_end(self.channel)[0] if self._door is not None else gofer_of(self._id)

    def cpu_counter(self) -> int:
        """Return a descriptor from which guestd reads the CPU time of the whole container; -1 where there is none."""
        try:
            path = Counters(other_end(self.channel)[0], self._id).cpu_file()
            return -1 if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._engine.api.inspect_container(self._id)["State"]
        return found

    def said(self) -> str:
        """Return the last line that guestd wrote to its error stream."""
        return self._stream.said.rpartition("\n")[2][:300]

    def how_it_ended(self) -> str:
        """Return why the channel is gone, as far as the engine knows."""
        try:
            state = self._state()
        except Exception:  # noqa: BLE001  # as in `freeze`
            return f"{self._engine.name} does not answer any more, or has forgotten the container"
        if state.get("OOMKilled"):
            return f"{self._engine.name} says that the container's memory limit ended it"
        if state.get("Running"):
            return f"its channel ended, and {self._engine.name} says that the container still runs"
        return f"{self._engine.name} says that the container ended with status {int(state.get('ExitCode') or 0)}"

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
        except Exception as error:  # noqa: BLE001  # the SDK raises many kinds of errors; each means the same here
            self._paused = "already paused" in str(error).lower()
            return self._paused
        self._paused = True
        return True

    def thaw(self) -> None:
        self._paused = False
        quietly(self._engine.api.unpause, self._id)

    def kill(self) -> None:
        """Close the channel: guestd ends with it, and everything inside with guestd.

        The engine's own kill follows for a guestd that has not ended after a moment.
        """
        self.hang_up()
        if self._paused:
            self.thaw()  # Podman does not kill a paused container
        threading.Thread(target=self._kill, name="ringfence-kill", daemon=True).start()

    def _kill(self) -> None:
        """Ask the engine to kill the container, unless it is being removed: rootless Podman takes 20 s to answer."""
        if not self._removing.wait(_END_S):
            quietly(self._engine.api.kill, self._id)

    def after_fork(self) -> None:
        self._closing = True
        self._stream.after_fork()

    def remove(self) -> None:
        self._removing.set()
        with self._ended:
            self._undo.close()


def quietly(call: Any, *args: object, **kwargs: object) -> None:
    """Make a call of the engine and ignore its failure: the next start's sweep removes what is left then."""
    try:
        call(*args, **kwargs)
    except Exception:  # noqa: BLE001  # as above
        return


def give_address(pid: int, guestd: str) -> None:
    """Give a container's loopback one more address, from the host: no process inside has the right to.

    Without that address `getaddrinfo` with AI_ADDRCONFIG finds nothing (kernel fact 13). Only root can add it; for
    other callers the proxy does the work. To be called before there is a guest; does nothing where it cannot be done.
    `pid`: the container's first process. An engine may number processes in another way than this host does, so the
    process counts only when it sees our guestd's files.
    """
    if os.geteuid() != 0 or pid <= 0:
        return
    try:
        if not os.path.samestat(os.stat(f"/proc/{pid}/root{guestd_bundle.INSIDE}"), os.stat(guestd)):
            return
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    # In a thread that ends there: a network namespace belongs to a thread.
    thread = threading.Thread(target=_add_address, args=(namespace,), name="ringfence-loopback", daemon=True)
    thread.start()
    thread.join(_ADDRESS_S)


def _add_address(namespace: int) -> None:
    from ringfence.shared import loopback, syscalls  # for sandboxes with a network alone

    try:
        if os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
            return  # the host's own
        syscalls.setns(namespace, syscalls.CLONE_NEWNET)
        loopback.add_address()
    except OSError:
        return  # as for callers that are not root
    finally:
        os.close(namespace)
