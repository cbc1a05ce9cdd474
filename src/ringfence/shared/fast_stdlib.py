"""JSON, sockets and signals without the modules that wrap them: `json`, `socket` and `signal` load `re` and `enum`.

That is 25 ms on both sides of every cold start, more than a sandbox costs. This module uses the C modules below those,
which have been the same since Python 3.5.
"""

from __future__ import annotations

import _json
import _signal  # type: ignore[import-not-found]  # the C module below `signal` has no stub
import _socket
import select
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket  # for the type checker, the type of _socket.socket
    from typing import Any

SOCK_STREAM: int = _socket.SOCK_STREAM
SOCK_SEQPACKET: int = _socket.SOCK_SEQPACKET
# For sending to a peer that may be gone: a caller may have SIGPIPE at its default, which ends programs.
NO_SIGNAL: int = getattr(_socket, "MSG_NOSIGNAL", 0)
SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGCHLD, SIGCONT, SIGSTOP, SIGXFSZ = 2, 9, 13, 15, 17, 18, 19, 25


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode = _json.make_encoder(None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, False)


def dumps(data: object) -> bytes:
    return "".join(_encode(data, 0)).encode("ascii")


class Context:
    """The attributes that the C scanner reads. Subclassed by the host's strict parser."""

    strict = True
    object_hook = None
    object_pairs_hook: Callable[[list[tuple[str, object]]], object] | None = None
    parse_float: Callable[[str], object] = float
    parse_int: Callable[[str], object] = int
    parse_constant: Callable[[str], object] = float

    def __init__(self) -> None:
        self.memo: dict[str, str] = {}


def scanner(context: Context) -> Callable[[str], object]:
    """Return a parser of whole texts, which raises ValueError for anything but a JSON value with nothing around."""
    scan = _json.make_scanner(context)  # type: ignore[arg-type]  # the stub names the attributes by a class of its own

    def parse(text: str) -> object:
        try:
            value, end = scan(text, 0)
        except (StopIteration, SystemError):
            # The scanner's own error is a class of json.decoder; where that is not loaded it sets none at all (J07).
            raise ValueError("no JSON value") from None
        if end != len(text):
            raise ValueError("something follows the JSON value")
        result: object = value
        return result

    return parse


_parse = scanner(Context())


def loads(data: bytes | str) -> Any:
    """Return the JSON object that our own code wrote; `guest.guestd.protocols` has the shapes. Raises ValueError."""
    value = _parse(data if isinstance(data, str) else data.decode())
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


# ── sockets ──────────────────────────────────────────────────────────────────────────────────────

_RIGHTS = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)


def pair(kind: int) -> tuple[socket, socket]:
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, kind | _socket.SOCK_CLOEXEC)
    return ours, theirs  # type: ignore[return-value]  # the C class has every method that is used here


def widen(*ends: socket, room: int = 1 << 20) -> None:
    """Enlarge a channel's buffers, where the kernel grants that: with more room, much data takes fewer turns."""
    for end in ends:
        end.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, room)


def from_fd(fd: int, kind: int) -> socket:
    return _socket.socket(_socket.AF_UNIX, kind, 0, fd)  # type: ignore[return-value]  # as above


def send_fds(sock: socket, data: bytes, fds: list[int]) -> None:
    """Send a packet with descriptors."""
    sock.sendmsg([data], [(*_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else [], NO_SIGNAL)


def recv_fds(sock: socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a packet with its descriptors, which close on exec."""
    data, ancillary, _, _ = sock.recvmsg(size, _socket.CMSG_SPACE(4 * most), _socket.MSG_CMSG_CLOEXEC)
    return data, _descriptors(ancillary)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == _RIGHTS:
            fds += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
    return fds


class Receiver:
    """Receive as `recv_fds` does, always into the same buffer: a new buffer for each packet costs fresh pages."""

    def __init__(self, sock: socket, size: int, most: int) -> None:
        self._sock = sock
        self._buffer = bytearray(size)
        self._space = _socket.CMSG_SPACE(4 * most)

    def receive(self) -> tuple[bytes, list[int]]:
        size, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], self._space, _socket.MSG_CMSG_CLOEXEC)
        return bytes(memoryview(self._buffer)[:size]), _descriptors(ancillary)


def readable(sock: socket | int, within_s: float | None) -> bool:
    """Wait until `sock` can be read; None: without end. Return False when the time is over."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if within_s is None else within_s * 1000))


def set_host_name(name: str) -> None:
    _socket.sethostname(name)


# ── signals ──────────────────────────────────────────────────────────────────────────────────────


def signal_pidfd(pidfd: int, number: int) -> bool:
    """Send a signal by a pidfd. Return False when the process has ended."""
    try:
        _signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def default_signals(*numbers: int) -> None:
    for number in numbers:
        _signal.signal(number, _signal.SIG_DFL)


def ignore_signals(*numbers: int) -> None:
    for number in numbers:
        _signal.signal(number, _signal.SIG_IGN)


def hold_stops(*, hold: bool = True) -> None:
    """Hold back SIGTERM, or take it again from here on, with a SIGTERM that came meanwhile."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK if hold else _signal.SIG_UNBLOCK, (SIGTERM,))


def hold_pipe_signal() -> None:
    """Block SIGPIPE in our thread on the host: a peer that hangs up, as a guest can, must not end the caller."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (SIGPIPE,))


def handle_signal(number: int, handler: Callable[[int, object], None]) -> None:
    _signal.signal(number, handler)
