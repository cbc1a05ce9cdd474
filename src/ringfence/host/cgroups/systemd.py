"""Asks a user's systemd for a scope around a running process, by a D-Bus call on the manager's own socket.

`systemd-run --scope` makes the same call for a program that it then executes. That costs three more execs, and a zygote
that was begun early would have to be started again.
"""

from __future__ import annotations

import _socket
import os
import struct

_WITHIN_S = 2.0
_MOST = 1 << 16
_MOST_READS = 1000
_CALL, _RETURN, _ERROR = 1, 2, 3  # kinds of messages
_HEAD = struct.Struct("<BBBBII")  # "l" for little-endian, kind, flags, version, length of the body, serial
_LENGTHS = struct.Struct("<I4xI")  # of the body and, after the serial, of the fields
_LEAST = 16
_MANAGER = "org.freedesktop.systemd1"
_FIELDS = (  # number, type and value of the header fields of a call
    (1, "o", "/org/freedesktop/systemd1"),
    (2, "s", f"{_MANAGER}.Manager"),
    (3, "s", "StartTransientUnit"),
    (6, "s", _MANAGER),
    (8, "g", "ssa(sv)a(sa(sv))"),
)


def ask(runtime: str, unit: str, pid: int) -> bool:
    """Ask the manager below `runtime` to move `pid` to a new scope, a moment later. Return whether it accepts."""
    manager = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        manager.settimeout(_WITHIN_S)
        manager.connect(f"{runtime}/systemd/private")
        manager.sendall(b"\0AUTH EXTERNAL %s\r\n" % str(os.geteuid()).encode().hex().encode())
        if not manager.recv(_MOST).startswith(b"OK "):
            return False
        manager.sendall(b"BEGIN\r\n" + order(unit, pid))
        return _kind(manager) == _RETURN
    except OSError:
        return False
    finally:
        manager.close()


def order(unit: str, pid: int) -> bytes:
    """Return the call for a scope named `unit` around `pid`: delegated to us, and removed with its last process."""
    body = _Written()
    body.text(unit)
    body.text("fail")
    with_pid = _Written()
    delegated = _Written()
    collected = _Written()
    with_pid.numbers(4, pid)
    delegated.numbers(1)
    collected.text("inactive-or-failed")
    properties = (("PIDs", "au", with_pid), ("Delegate", "b", delegated), ("CollectMode", "s", collected))
    listed = _Written()
    for name, kind, value in properties:
        listed.align(8)
        listed.text(name)
        listed.signature(kind)
        listed.align(4)  # all three values begin with a number of four bytes
        listed.data += value.data
    body.align(4)
    body.numbers(len(listed.data))
    body.align(8)
    body.data += listed.data
    body.align(4)
    body.numbers(0)  # no further units
    body.align(8)
    return _head(len(body.data)) + bytes(body.data)


def _head(size: int) -> bytes:
    fields = _Written()
    for number, kind, value in _FIELDS:
        fields.align(8)
        fields.data.append(number)
        fields.signature(kind)
        if kind == "g":
            fields.signature(value)
        else:
            fields.align(4)
            fields.text(value)
    whole = _Written()
    whole.data += _HEAD.pack(ord("l"), _CALL, 0, 1, size, 1)
    whole.numbers(len(fields.data))
    whole.data += fields.data
    whole.align(8)
    return bytes(whole.data)


class _Written:
    """Values in the form of D-Bus, each aligned to its own size."""

    def __init__(self) -> None:
        self.data = bytearray()

    def align(self, size: int) -> None:
        self.data += bytes(-len(self.data) % size)

    def numbers(self, *values: int) -> None:
        self.data += struct.pack(f"<{len(values)}I", *values)

    def text(self, value: str) -> None:
        self.align(4)
        encoded = value.encode()
        self.numbers(len(encoded))
        self.data += encoded + b"\0"

    def signature(self, value: str) -> None:
        encoded = value.encode()
        self.data += bytes([len(encoded)]) + encoded + b"\0"


def _kind(manager: _socket.socket) -> int:
    """Return the kind of the manager's answer, or 0. Skips the signals that every connection gets before it."""
    data = b""
    for _ in range(_MOST_READS):
        more = manager.recv(_MOST)
        if not more:
            break
        data += more
        while len(data) >= _LEAST:
            kind, body, fields = data[1], *_LENGTHS.unpack_from(data, 4)
            if kind in (_RETURN, _ERROR):
                return kind
            size = _LEAST + (fields + 7) // 8 * 8 + body
            if len(data) < size:
                break
            data = data[size:]
    return 0
