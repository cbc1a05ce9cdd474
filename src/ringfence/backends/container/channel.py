"""The channel to guestd in a container: our own Unix socket, shown inside until guestd has connected to it.

The engine carries none of the channel's bytes: Podman cuts a stream that carries megabytes both ways, and Docker copies
each byte twice. The channel also carries descriptors, so that guestd can hand its listeners to the gateway, as on the
process backend. The socket is gone before any guest code exists; an empty folder stays inside.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import shutil
import socket
import struct
import time

from ringfence.host import process_id, state
from ringfence.shared import fast_stdlib, framing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INSIDE = "/.ringfence-door"
_NAME = "door"
_ANSWER_S = 5.0  # for a process that connected to send the key
# OCI runtimes whose containers share the host's kernel, and therefore its sockets; and runtimes whose containers have a
# kernel of their own. Nothing is known of any other runtime.
_SHARING = ("runc", "crun", "youki")
_KERNELS = ("runsc", "gvisor", "kata")


def leads_into(oci_runtime: str) -> bool:
    """Return whether a container of this runtime can reach a socket of the host."""
    import sys

    return sys.platform == "linux" and _plain(oci_runtime).startswith(_SHARING)


def has_own_kernel(oci_runtime: str) -> bool:
    """Return whether containers of this runtime certainly have a kernel of their own.

    `nvidia`, for example, is runc under another name.
    """
    return _plain(oci_runtime).startswith(_KERNELS)


def _plain(oci_runtime: str) -> str:
    """Return the name of a runtime that is given as a name, as a path, or as containerd's io.containerd.NAME.v2."""
    return oci_runtime.rpartition("/")[2].removeprefix("io.containerd.")


def other_end(channel: socket.socket) -> tuple[int, int]:
    """Return the process that connected to the other end, and its user, by the numbers of this host."""
    pid, uid, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Door:
    """The listening socket that a container's guestd connects to. Raises OSError when the socket cannot be made."""

    def __init__(self) -> None:
        self._folder = f"{state.disk_directory('doors')}/{process_id.name()}_{os.urandom(4).hex()}"
        self._key = os.urandom(16).hex()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._listen()
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        os.mkdir(self._folder)
        os.chmod(self._folder, 0o755)
        here = os.open(self._folder, os.O_PATH | os.O_CLOEXEC)
        try:
            self._socket.bind(f"/proc/self/fd/{here}/{_NAME}")  # the path itself may be longer than an address can be
        finally:
            os.close(here)
        os.chmod(f"{self._folder}/{_NAME}", 0o666)  # only we can enter the folders above, and guestd must send the key
        self._socket.listen(1)

    @property
    def env(self) -> dict[str, str]:
        """Variables of guestd's own environment: the socket's path and the key.

        Guests never see them: guestd is not dumpable by then, and the key opens nothing any more.
        """
        return {framing.DOOR: f"{INSIDE}/{_NAME}", framing.KEY: self._key}

    def mounts(self) -> list[Any]:
        """Return the mount that shows the socket inside, in the Engine SDK's words."""
        from docker.types import Mount

        return [Mount(INSIDE, self._folder, type="bind", read_only=True)]

    def wait(self, deadline: float, uid: int | None) -> socket.socket | None:
        """Wait until guestd has connected and sent the key; return the channel, or None at the deadline.

        Returns None after `give_up` too. `uid`: the user that guestd must be, where that is known.
        """
        while (left := deadline - time.monotonic()) > 0:
            if not fast_stdlib.readable(self._socket, left):
                return None
            try:
                peer = self._socket.accept()[0]
            except OSError:
                return None  # given up
            if self._is_guestd(peer, uid):
                peer.settimeout(None)
                fast_stdlib.widen(peer)
                return peer
            peer.close()
        return None

    def _is_guestd(self, peer: socket.socket, uid: int | None) -> bool:
        _, user = other_end(peer)
        if uid is not None and user != uid and _is_mapped(uid):
            return False
        return hmac.compare_digest(_first_bytes(peer, len(self._key)), self._key.encode())

    def give_up(self) -> None:
        """End `wait` from another thread: guestd will not connect."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and remove its folder. Idempotent."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _first_bytes(peer: socket.socket, count: int) -> bytes:
    """Return the first `count` bytes that the peer sends; fewer where they do not come in time.

    Not by MSG_WAITALL: a socket with a time limit does not wait for all of them.
    """
    received = b""
    until = time.monotonic() + _ANSWER_S
    with contextlib.suppress(OSError):
        while len(received) < count and (left := until - time.monotonic()) > 0:
            peer.settimeout(left)
            more = peer.recv(count - len(received))
            if not more:
                break
            received += more
    return received


def _is_mapped(uid: int) -> bool:
    """Return whether this process sees user `uid` by its real number. A user namespace may hide the number."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [[int(field) for field in row.split()] for row in file]
    return any(first <= uid < first + count for first, _, count in rows)


def sweep() -> None:
    """Remove the door folders of library processes that are gone."""
    root = state.disk_directory("doors")
    for name in os.listdir(root):
        if process_id.is_dead(name.partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
