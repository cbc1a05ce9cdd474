"""One container, as its engine holds it: how it is asked, stopped and removed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from ringfence.backends.container import stream as streams
from ringfence.backends.container.counters import Counters
from ringfence.backends.container.door import other_end
from ringfence.backends.walled.places import gofer_of
from ringfence.errors import SandboxLostError, StartTimeoutError
from ringfence.results import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ringfence.backends.container.door import Door
    from ringfence.backends.container.engine import Engine

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
        kinds = (streams.ALL, streams.ChannelStream) if door is None else (streams.ERRORS, streams.Stream)
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
