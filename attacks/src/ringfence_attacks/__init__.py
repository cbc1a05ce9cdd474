"""Try to break out of sandboxes: each attempt has an arm without its control and a witness outside the sandbox.

`ringfence attack` finds this package by the entry point group `ringfence.attacks` and runs it on a user's host; the
project's tests run it and the control mutation. How a case is written is in `case.py`, what it may use in `arena.py`.
"""

from __future__ import annotations

from ringfence_attacks.case import Attack
from ringfence_attacks.harness import catalogue, run
from ringfence_attacks.report import Matrix, Row

__all__ = ["Attack", "Matrix", "Row", "catalogue", "run"]
