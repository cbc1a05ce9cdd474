"""H: information leaks."""

from __future__ import annotations

from ringfence.attacks.case import cases

CASES = cases(globals())
