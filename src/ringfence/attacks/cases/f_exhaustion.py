"""F: exhaustion of the host's resources."""

from __future__ import annotations

from ringfence.attacks.case import cases

CASES = cases(globals())
