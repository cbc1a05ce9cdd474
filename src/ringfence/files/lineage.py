"""What the host remembers of a sandbox's files between two looks, so that the next look costs what changed.

Stamps are guest-made: they are given back to the next worker inside and read by nobody else.
"""

from __future__ import annotations

from ringfence.files.manifest import Manifest
from ringfence.guest import knowing
from ringfence.guest.knowing import UNKNOWN, Memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.files.manifest import Caps, Entry
    from ringfence.files.store import Holder

_SMALL = 1 << 16


class Look:
    """What one look found: the tree, and how it differs from the one it began with."""

    def __init__(self, before: Manifest, told: Mapping[str, Entry], gone: set[str], caps: Caps) -> None:
        """Raises SnapshotError when it is no tree."""
        self.manifest = before.patched(told, gone, caps)
        self.gone = gone
        self.stamps: Mapping[str, bytes] = {}  # of every entry that was told
        self.top = UNKNOWN
        old = [before.by_path[path] for path in (*gone, *told) if path in before.by_path]
        self.added = {made.text for made in told.values() if made.kind == "f" and made.text not in before.digests}
        self.removed = {made.text for made in old if made.kind == "f" and made.text not in self.manifest.digests}

    def content(self, holder: Holder) -> Holder:
        """Content of the tree that it began with, made that of the one that was found."""
        holder.change(self.added, self.removed)
        return holder


class Lineage:
    """One sandbox's files when the host last looked, and the content that this sandbox may name."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.manifest = Manifest(())
        self.exact = False  # whether it may name the content of that tree, and nothing else
        self._memory = Memory()
        self._top = UNKNOWN

    def close(self) -> None:
        self.holder.close()

    def known(self) -> bytes:
        """For a new worker's standard input."""
        return self._packed(self._memory)

    def known_to_one_that_stayed(self) -> bytes:
        return self._packed(Memory())

    def _packed(self, memory: Memory) -> bytes:
        return knowing.pack(memory, self._worth_telling(), links=bool(self.manifest.links), top=self._top)

    def _worth_telling(self) -> list[str]:
        """Digests of content that the worker need not send. When few files changed, small ones are sent anyway."""
        if not self._memory.groups:
            return self.holder.digests()
        return [digest for digest, size in self.manifest.digests.items() if size > _SMALL and digest in self.holder]

    def follow(self, look: Look, holder: Holder | None = None) -> None:
        """Remember what a look found that began with what is remembered now: of two looks one waits for the other.

        `holder`: what the sandbox may name from now on; without, that is the content of what was found.
        """
        self.manifest, self._top = look.manifest, look.top
        kinds = look.manifest.by_path
        self._memory.follow({path: (kinds[path].kind == "d", s) for path, s in look.stamps.items()}, look.gone)
        if holder is not None:
            self.holder.close()
            self.holder, self.exact = holder, False
            # A file whose content the sandbox may not name has to be sent again.
            unnamed = [made.path for made in self.manifest.entries if made.kind == "f" and made.text not in holder]
            self._memory.follow(dict.fromkeys(unnamed, (False, UNKNOWN)), ())
        elif self.exact:
            look.content(self.holder)
        else:
            self.holder.become(self.manifest.digests)
            self.exact = True
