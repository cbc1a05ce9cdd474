"""The addresses in 127.0.0.0/8 that stand for permitted names in one sandbox: one each, for as long as it lives.

How a name is spelled is `policy.hosts`; this only hands out numbers. Late: nothing is known here before a guest asks.
"""

from __future__ import annotations

MOST_NAMES = 4096  # a pattern such as *.a.com lets a guest mint names without end
_FIRST = 127 << 24 | 77 << 16  # 127.77.0.1 and on: nobody's servers, nobody's resolver
MOST_SKIPPED = (1 << 16) - MOST_NAMES - 2


class Names:
    """Not safe from two threads at once: the gateway's loop owns it."""

    def __init__(self, skipped: int = 0) -> None:
        """`skipped` addresses stand for nothing: those of one sandbox are to mean no other host in another.

        A snapshot of memory may hold them, and whoever connects to one by a rule for tcp says no name.
        """
        self._skipped = skipped
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def address_of(self, name: str) -> str | None:
        """The address of a canonical, permitted name, handed out when it is new; None when there are too many."""
        found = self._addresses.get(name)
        if found is None and len(self._addresses) < MOST_NAMES:
            number = _FIRST + self._skipped + len(self._addresses) + 1
            found = ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))
            self._addresses[name] = found
            self._names[found] = name
        return found

    def name_of(self, address: str) -> str | None:
        """What a guest connected to, by the address it used."""
        return self._names.get(address)

    def copy(self) -> Names:
        """For a live copy, whose memory holds addresses that its original was told."""
        made = Names(self._skipped)
        made._addresses, made._names = dict(self._addresses), dict(self._names)
        return made
