"""Sizes: bytes as an int, or a number with K, M or G. Binary, positive, and nothing else."""

from __future__ import annotations

from ringfence.errors import PolicyError

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST = 1 << 60  # far above any machine, far below where kernel counters wrap
_DIGITS = frozenset("0123456789")
_FIX = 'write bytes, or a whole number with K, M or G, such as "512M"'


def parse_size(value: object, key: str = "size") -> int:
    """Bytes of `536870912` or `"512M"`. Raises PolicyError that names `key`."""
    if isinstance(value, str):
        size = _from_text(value, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = int(value)
    else:
        raise PolicyError(f"{key} must be a size, not {type(value).__name__}", key=key, fix=_FIX)
    if not 0 < size <= LARGEST:
        raise PolicyError(f"{key} must be between 1 byte and {LARGEST >> 30}G, not {shorten(value)}", key=key, fix=_FIX)
    return size


def format_size(size: int) -> str:
    """The shortest exact spelling: 536870912 is "512M"."""
    for unit in ("G", "M", "K"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def shorten(value: object) -> str:
    """`value` in a message: quoted, escaped and cut, because it may be long or hostile."""
    if isinstance(value, int) and not -(1 << 64) < value < 1 << 64:
        return "a number of more than 64 bits"
    shown = ascii(value[:60]) if isinstance(value, (str, bytes)) else ascii(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"


def _from_text(text: str, key: str) -> int:
    digits, factor = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not digits or len(digits) > 20 or not _DIGITS.issuperset(digits):
        raise PolicyError(f"{key} is {shorten(text)}, which is not a size", key=key, fix=_FIX)
    return int(digits) * factor
