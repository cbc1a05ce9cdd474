"""Which platform runsc is started with is found by trying, with a deadline, and never by its name alone."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from ringfence import Policy, UnsupportedError
from ringfence.backends import Gvisor
from ringfence.backends.auto import find_image
from ringfence.backends.gvisor import runsc
from ringfence.host import programs

FAKE = """#!/bin/sh
case "$*" in
  *--version*) echo "runsc version fake-1"; exit 0 ;;
  *--platform=systrap*) echo "unknown platform: systrap" >&2; exit 128 ;;
  *--platform=kvm*) sleep 600 ;;
  *--platform=ptrace*) {last} ;;
esac
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a program that answers as runsc does, and a file of notes on its platforms."""
    program = tmp_path / "runsc"
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path), *programs.SYSTEM_FOLDERS))
    # This folder may have the inode number of one that an earlier test mounted writable and removed.
    monkeypatch.setattr(programs, "_writable", set())
    monkeypatch.setattr(runsc, "_found", {})
    monkeypatch.setattr(runsc, "_PROBE_S", 0.5)
    monkeypatch.setattr(runsc, "_note", lambda: str(tmp_path / "platforms.json"))
    return program


def _write(program: Path, last: str) -> None:
    program.write_text(FAKE.format(last=last))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_one_that_hangs_is_given_up_after_its_deadline_and_the_next_is_taken(found: Path) -> None:
    _write(found, "exit 0")
    assert programs.look_up("runsc").passed_over == ()
    assert runsc.find() == runsc.Runsc(str(found), "fake-1", "ptrace")


def test_facts_and_a_plan_start_no_program(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(found, "exit 0")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    gvisor = Gvisor()
    plan = gvisor.plan(Policy(), find_image("host"), gvisor.facts())
    assert plan.enforcement.syscalls.mechanism == "gVisor: a kernel of its own in user space"


def test_where_none_answers_the_error_says_what_each_said(found: Path) -> None:
    _write(found, "echo no ptrace here >&2; exit 1")
    with pytest.raises(UnsupportedError) as raised:
        runsc.find()
    tried = "systrap: unknown platform: systrap; kvm: no answer within 0.5 s; ptrace: no ptrace here"
    assert (raised.value.code, str(raised.value)) == ("gvisor-platform", f"runsc runs nothing here ({tried})")


def test_what_was_found_is_not_tried_again_in_the_same_boot(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(found, "exit 0")
    first = runsc.find()
    monkeypatch.setattr(runsc, "_found", {})
    monkeypatch.setattr(runsc, "_probe", lambda *_: pytest.fail("it was tried again"))
    assert runsc.find() == first


def test_two_threads_that_write_the_note_at_once_do_not_take_each_others(
    found: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(found, "exit 0")
    rename, seen = os.rename, list[str]()

    def other_first(old: str, new: str) -> None:
        seen.append(old)
        if len(seen) == 1:
            runsc._remember(str(found), "fake-1", {"ptrace": None})
        rename(old, new)

    monkeypatch.setattr(os, "rename", other_first)
    runsc._remember(str(found), "fake-1", {"ptrace": None})
    assert len(set(seen)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's runsc changes owners")
def test_a_probe_of_the_real_runsc_leaves_the_hosts_null_device_as_it_is() -> None:
    """runsc gives its standard streams to the user inside."""
    before = os.stat(os.devnull)
    path = runsc.installed()
    assert runsc._probe(path, "ptrace") is None
    after = os.stat(os.devnull)
    assert (after.st_uid, after.st_gid, after.st_ctime_ns) == (before.st_uid, before.st_gid, before.st_ctime_ns)
