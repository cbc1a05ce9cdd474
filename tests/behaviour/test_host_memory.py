"""Nothing that a guest controls decides the size of an allocation on the host (O21, O22).

How it works: a process of its own calls every verb of the public surface while a guest floods it, under a limit of
256 MiB on the memory that it may have to write to; its peak is read from outside.
How it could be passed by: a verb that nobody floods, or one that ends with a MemoryError that somebody caught.
Why this would notice: the verbs are collected from the classes, and every end is told with its type.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import ringfence
from accounts import OrdinaryUser
from behaviour import floods
from ringfence.types import Address, Environment, Files, Gateway, Output, Process, Pty, Session, Watch

SOURCE = Path(ringfence.__file__).parents[1]
PROGRAM = Path(floods.__file__)
PLAYS = list(dict.fromkeys(play.__name__ for play in floods.VERBS.values()))
# What a user without rights has otherwise: no cgroup, another monitor, other owners of files.
AS_USER = ("_cells", "_reading", "_arriving", "_forks", "_exposed")
# The asynchronous half is where the other is generated from; what is not, `floods` calls of both.
HELD = (
    *(ringfence.Sandbox, ringfence.SandboxManager, ringfence.Snapshot, ringfence.Result),
    *(Session, Process, Pty, Files, Watch, Gateway, Address, Environment, Output),
)


class Row(NamedTuple):
    """How a flood ended, and the peak memory of the process."""

    ended: str
    typed: bool
    peak: int


def verbs() -> set[str]:
    """Return every method and property of the surface's classes, and every function."""
    found = {name for name in ringfence.__all__ if inspect.isfunction(getattr(ringfence, name))}
    for kind in HELD:
        fields = set(getattr(kind, "__fields__", ()))
        for name, value in inspect.getmembers(kind):
            is_verb = callable(value) or isinstance(value, property)
            if is_verb and name not in fields and (name[0] != "_" or name in ("__iter__", "__next__")):
                found.add(f"{kind.__name__}.{name}")
    return found


def rows(process: subprocess.Popen[str]) -> dict[str, Row]:
    """Return a row for each line of the process. A line is answered after the peak was read and the count reset."""
    found: dict[str, Row] = {}
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(int(row.split()[1]) << 10 for row in status.splitlines() if row.startswith("VmHWM:"))
        found[said["play"]] = Row(said["ended"], said["typed"], peak)
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait(20) == 0
    return found


@pytest.fixture(scope="module")
def flooded() -> dict[str, Row]:
    """Run all floods once, in one process."""
    return _run([sys.executable, str(PROGRAM)], {**os.environ, "PYTHONPATH": str(SOURCE)})


def _run(command: list[str], environment: dict[str, str], **options: object) -> dict[str, Row]:
    process = subprocess.Popen(  # type: ignore[call-overload]  # the options are its own
        command,
        env={**environment, "MALLOC_ARENA_MAX": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        return rows(process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_every_verb_is_flooded() -> None:
    assert verbs() == set(floods.VERBS)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("play", PLAYS)
def test_a_flood_ends_with_a_result_or_a_typed_error_and_little_memory(flooded: dict[str, Row], play: str) -> None:
    row = flooded.get(play)
    assert row is not None, f"not reached: it ended after {list(flooded)[-1:]}"
    assert (row.typed, row.peak < floods.MOST) == (True, True), row


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above already run as an ordinary user")
def test_floods_end_so_for_an_ordinary_user(ordinary_user: OrdinaryUser) -> None:
    user = ordinary_user
    command = [user.python, "-c", PROGRAM.read_text(), *AS_USER]
    found = _run(command, user.environment(), user=user.uid, group=user.gid, extra_groups=[], cwd=user.home)
    assert sorted(found) == sorted(AS_USER)
    assert {name: row for name, row in found.items() if not row.typed or row.peak >= floods.MOST} == {}
