"""The compiled filters in the repository are those that plan/seccomp.py compiles."""

from __future__ import annotations

import base64

from ringfence.plan import seccomp, seccomp_programs


def test_the_stored_programs_are_the_compiled_ones() -> None:
    stored = (base64.b64decode(seccomp_programs.GUEST), base64.b64decode(seccomp_programs.LAST))
    assert stored == (seccomp.guest_filter(), seccomp.last_layer())
