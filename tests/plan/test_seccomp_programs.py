"""The compiled filters in the repository are those that plan/seccomp.py compiles."""

from __future__ import annotations

from ringfence.plan import seccomp, seccomp_programs


def test_the_stored_programs_are_the_compiled_ones() -> None:
    stored = (bytes.fromhex(seccomp_programs.GUEST), bytes.fromhex(seccomp_programs.LAST))
    assert stored == (seccomp.guest_filter(), seccomp.last_layer())
