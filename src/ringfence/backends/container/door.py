"""The way by which guestd hands its listeners to the gateway, before there is a guest: a socket of ours, shown inside.

A container has the host's kernel, so its sockets can be the host's: nothing is relayed then, as on the process backend.
The socket is gone before any guest code exists; what stays inside is an empty folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct

from ringfence.backends.process import owners, state
from ringfence.guest import lean

INSIDE = "/.ringfence-gateway"
_NAME = "door"
PATH = f"{INSIDE}/{_NAME}"  # for guestd
_MOST = 253  # descriptors in one packet


class Door:
    """Raises OSError when it cannot be made."""

    def __init__(self) -> None:
        self.folder = f"{state.disk_directory('doors')}/{owners.name()}_{os.urandom(4).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            os.mkdir(self.folder)
            os.chmod(self.folder, 0o755)
            self._socket.bind(f"{self.folder}/{_NAME}")
            os.chmod(f"{self.folder}/{_NAME}", 0o666)  # who came is asked of the kernel; the folders above are ours
            self._socket.listen(1)
        except BaseException:
            self.close()
            raise

    def take(self, pid: int, count: int) -> list[int]:
        """The listeners, if the container's first process brought them; it did so before it said that it is ready."""
        try:
            peer = self._socket.accept()[0]
        except OSError:
            return []  # it could not: they are relayed
        with peer:
            peer.setblocking(False)
            who = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            fds: list[int] = []
            with contextlib.suppress(OSError):
                fds = lean.recv_fds(peer, 64, _MOST)[1] if who == pid else []
        if len(fds) != count:
            for fd in fds:
                os.close(fd)
            return []
        return fds

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep() -> None:
    """Folders of processes that are gone."""
    root = state.disk_directory("doors")
    for name in os.listdir(root):
        if owners.is_dead(name.partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
