# Generated from ringfence/_async by scripts/unasync: do not edit.
"""Puts into a new sandbox what its gateway needs there, before any guest code."""

from __future__ import annotations

from ringfence._sync.files import Files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence._sync.process import Place


def equip(place: Place) -> None:
    """The trusted roots of a sandbox whose TLS is read. Nothing for all others."""
    outlet = place.box.outlet
    if outlet is None or not outlet.files:
        return
    inside = Files(lambda: place)
    for path, data in outlet.files.items():
        inside.write(path, data, mode=0o444)
