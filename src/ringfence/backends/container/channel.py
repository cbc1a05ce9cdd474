"""The way to guestd in a container: a socket of ours, shown inside until guestd has come by it.

The engine carries none of its bytes: Podman's cuts a stream that carries megabytes both ways, and Docker's copies each
byte twice. Descriptors can be sent by it too, so that a container's listeners can be the gateway's, as on the process
backend. The socket is gone before any guest code exists; what stays inside is an empty folder.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import shutil
import socket
import struct
import time

from ringfence.guest.guestd import engine_pid1
from ringfence.host import process_id, state
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INSIDE = "/.ringfence-door"
_NAME = "door"
_ANSWER_S = 5.0  # for who came to say the key
_SHARING = ("runc", "crun", "youki")  # OCI runtimes whose containers have the host's kernel, and so its sockets
_KERNELS = ("runsc", "gvisor", "kata")  # and those whose have one of their own; of others nothing is known


def leads_into(oci_runtime: str) -> bool:
    """Whether a socket of the host's can be reached in a container of this runtime."""
    import sys

    return sys.platform == "linux" and _plain(oci_runtime).startswith(_SHARING)


def has_own_kernel(oci_runtime: str) -> bool:
    """Whether containers of this runtime certainly have one. Not so `nvidia`, which is runc under another name."""
    return _plain(oci_runtime).startswith(_KERNELS)


def _plain(oci_runtime: str) -> str:
    """The name of a program, of its path, or of containerd's io.containerd.NAME.v2."""
    return oci_runtime.rpartition("/")[2].removeprefix("io.containerd.")


def other_end(channel: socket.socket) -> tuple[int, int]:
    """The process at the other end when it connected, and its user, as this host counts them."""
    pid, uid, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Door:
    """Of one container that is about to be made. Raises OSError when it cannot be made."""

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
        os.chmod(f"{self._folder}/{_NAME}", 0o666)  # the folders above are ours alone, and who comes says the key
        self._socket.listen(1)

    @property
    def env(self) -> dict[str, str]:
        """guestd's own. It is not dumpable when there is a guest, and the key opens nothing any more."""
        return {engine_pid1.DOOR: f"{INSIDE}/{_NAME}", engine_pid1.KEY: self._key}

    def mounts(self) -> list[Any]:
        from docker.types import Mount

        return [Mount(INSIDE, self._folder, type="bind", read_only=True)]

    def wait(self, deadline: float, uid: int | None) -> socket.socket | None:
        """The channel, once guestd has come with its key; `uid`: as whom, where that is known.

        None at the deadline, or after `give_up`.
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
        who = other_end(peer)[1]
        if uid is not None and who != uid and _is_mapped(uid):
            return False
        return hmac.compare_digest(_first_bytes(peer, len(self._key)), self._key.encode())

    def give_up(self) -> None:
        """From another thread: nobody will come."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _first_bytes(peer: socket.socket, count: int) -> bytes:
    """Fewer where no more come in time. Not by MSG_WAITALL: a socket with a time limit does not wait for that."""
    said, until = b"", time.monotonic() + _ANSWER_S
    with contextlib.suppress(OSError):
        while len(said) < count and (left := until - time.monotonic()) > 0:
            peer.settimeout(left)
            more = peer.recv(count - len(said))
            if not more:
                break
            said += more
    return said


def _is_mapped(uid: int) -> bool:
    """Whether this process sees it as it is: in a user namespace of its own it may not."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [[int(field) for field in row.split()] for row in file]
    return any(first <= uid < first + count for first, _, count in rows)


def sweep() -> None:
    """Folders of processes that are gone."""
    root = state.disk_directory("doors")
    for name in os.listdir(root):
        if process_id.is_dead(name.partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
