"""The compiled filters in the repository are those that plan/seccomp.py compiles."""

from __future__ import annotations

from ringfence.plan.seccomp import compiled, compiler


def test_the_stored_programs_are_the_compiled_ones() -> None:
    stored = (bytes.fromhex(compiled.GUEST), bytes.fromhex(compiled.LAST))
    assert stored == (compiler.guest_filter(), compiler.last_layer())
