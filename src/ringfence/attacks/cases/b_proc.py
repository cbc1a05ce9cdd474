"""B: /proc and /sys."""

from __future__ import annotations

from ringfence.attacks.case import cases

CASES = cases(globals())
