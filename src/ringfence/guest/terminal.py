"""Terminals: the master end is made by the spawner inside and kept by the monitor, the slave is the guest's."""

from __future__ import annotations

import os
import struct

_TIOCSPTLCK, _TIOCGPTN, _TIOCSWINSZ, _TIOCSCTTY = 0x40045431, 0x80045430, 0x5414, 0x540E
_MOST = 0x7FFF


def make(cols: int, rows: int) -> tuple[int, int]:
    """Master and slave of a new terminal of this sandbox's own devpts."""
    from fcntl import ioctl  # where it is needed, as in job

    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("I", ioctl(master, _TIOCGPTN, bytes(4)))[0]
        set_size(master, cols, rows)
        return master, os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        os.close(master)
        raise


def set_size(fd: int, cols: int, rows: int) -> None:
    from fcntl import ioctl

    ioctl(fd, _TIOCSWINSZ, struct.pack("HHHH", min(rows, _MOST), min(cols, _MOST), 0, 0))


def take(slave: int) -> None:
    """Make it the controlling terminal of this process, which leads a session of its own."""
    from fcntl import ioctl

    ioctl(slave, _TIOCSCTTY, 0)
