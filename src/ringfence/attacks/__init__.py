"""Our own escape attempts, each with an arm in which its control is missing and a witness outside the sandbox.

`ringfence attack` runs them on a user's host; the project's tests run them and the control mutation. How a case is
written is in `case.py`, what it may use in `arena.py`.
"""

from __future__ import annotations

from ringfence.attacks.case import Attack
from ringfence.attacks.harness import catalogue, run
from ringfence.attacks.report import Matrix, Row

__all__ = ["Attack", "Matrix", "Row", "catalogue", "run"]
