"""Every control is left out in turn, and an attack must notice. The score is printed; the target is 100 %."""

from __future__ import annotations

import json
import os
import sys

import pytest

from accounts import OrdinaryUser
from ringfence_attacks.controls import PLAN
from ringfence_attacks.mutation import Mutation, mutate, score

# Why a control cannot be seen to work in some place. Anything else that no attack notices fails.
UNSEEN = {
    "seccomp:syslog": "the host restricts its log by itself",
}
UNSEEN_AS_USER = {
    **UNSEEN,
    "pid-namespace": "the kernel refuses an ordinary user a fresh /proc without it, and with that the sandbox",
    "user-namespace": "an ordinary user has nothing without it",
    "landlock-scopes": "signals and abstract sockets end at the namespaces before it",
    "cgroup": "no cgroup can be had",
    "cgroup-namespace": "no cgroup can be had",
}
_noticed: list[Mutation] = []
_AS_USER = """
import json, warnings
warnings.simplefilter("ignore")
from ringfence_attacks.mutation import mutate_all, score
found = mutate_all()
rows = [[m.control, m.noticed_by, m.unseen] for m in found]
print(json.dumps({"score": score(found), "rows": rows}))
"""


@pytest.mark.parametrize("control", PLAN)
def test_an_attack_notices_that_the_control_is_missing(control: str) -> None:
    found = mutate(control)
    _noticed.append(found)
    if found.noticed_by is None:
        allowed = UNSEEN if os.geteuid() == 0 else UNSEEN_AS_USER
        assert (control in allowed and found.unseen is not None, found) == (True, found)


def test_the_score_is_whole() -> None:
    """Runs after the other tests of this module; alone, this test checks nothing."""
    if len(_noticed) == len(PLAN):
        hidden = ", ".join(f"{one.control} ({one.unseen})" for one in _noticed if one.unseen)
        whole = score(tuple(_noticed))
        print(f"control mutation score: {whole}; not to be seen here: {hidden or 'none'}", file=sys.stderr)
        killed, total = map(int, whole.split("/"))
        assert killed == total


@pytest.mark.timeout(150)
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above already run as an ordinary user")
def test_as_an_ordinary_user_every_control_is_noticed_but_those_declared(ordinary_user: OrdinaryUser) -> None:
    done = ordinary_user.run(_AS_USER, timeout_s=140)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    unnoticed = {control: unseen for control, by, unseen in told["rows"] if by is None}
    assert {name: why for name, why in unnoticed.items() if name not in UNSEEN_AS_USER or why is None} == {}
    print(f"control mutation score as an ordinary user: {told['score']}", file=sys.stderr)
