"""J: results that lie."""

from __future__ import annotations

from ringfence.attacks.case import cases

CASES = cases(globals())
