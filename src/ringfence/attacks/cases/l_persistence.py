"""L: what stays after the end, or reaches the next sandbox."""

from __future__ import annotations

from ringfence.attacks.case import cases

CASES = cases(globals())
