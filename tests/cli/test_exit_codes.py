"""The exit code of a result, as in `help exit`, and the notes with the option that helps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.samples import OK, denied, ended
from ringfence.cli.console import Console
from ringfence.cli.launch import CommandJob, exit_code, has_notes
from ringfence.cli.notes import notes
from ringfence.cli.options import exec_table
from ringfence.cli.settings import Settings
from ringfence.results import Control, Denial, Result
from ringfence.values import replace


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "shop"
    (here / "bin").mkdir(parents=True)
    (here / "in.txt").write_text("x")
    program = here / "bin" / "frobnicate"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", f"{here}/bin")
    return here


def noted(result: Result, command: str = "cat", *options: str, stderr: bytes = b"") -> list[str]:
    given = exec_table().parse([*options, "--", *command.split()], Console())
    assert given is not None
    return notes(result, CommandJob(given.words, folder=os.getcwd()), Settings(given, "dev"), stderr)


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (OK, 0),
        (ended("error", "exit", exit_code=7), 7),
        (ended("error", "exception", exit_code=1), 1),
        (ended("error", "exception"), 1),
        (ended("error", "compile"), 1),
        (ended("error", "signal", signal=11), 139),
        (ended("error", "not-found", exit_code=127), 127),
        (ended("error", "not-executable", exit_code=126), 126),
        (ended("timeout", "wall-clock"), 124),
        (ended("limit", "cpu-time"), 124),
        (ended("oom", "memory"), 137),
        (ended("killed", "caller"), 130),
        (ended("killed", "interrupted"), 130),
        (ended("lost", "guest-lost"), 125),
    ],
)
def test_the_exit_code_comes_from_status_and_reason(result: Result, code: int) -> None:
    assert exit_code(result) == code


def test_a_good_end_has_nothing_to_say() -> None:
    assert not has_notes(OK)
    assert noted(OK) == []


def test_a_limit_that_was_hit_names_its_option() -> None:
    assert noted(ended("timeout", "wall-clock"), "sleep", "--timeout", "2.5") == [
        "stopped after 2.5 s, the time limit; for more: --timeout S"
    ]
    assert noted(ended("limit", "cpu-time"), "sh", "--limit", "cpu_time_s=3") == [
        "stopped after 3 s of CPU time, the limit; for more: --limit cpu_time_s=S"
    ]
    assert noted(ended("oom", "memory"), "sh", "--memory", "64M") == [
        "killed: it needed more memory than its limit of 64M; for more: --memory SIZE"
    ]


def test_each_denial_says_what_would_allow_it() -> None:
    denials = (
        denied("r.example.org:443", 'network.allow = ["r.example.org:443"]', count=3),
        denied("10.0.0.1:80", None),
        denied("$(touch x):443", "network.allow"),
        Denial("command", "curl", "exec.not-listed", "curl is not listed", 'commands = ["curl"]'),
    )
    assert noted(replace(OK, denials=denials)) == [
        "denied: r.example.org:443 is not permitted (3 times); to allow it: --allow-net r.example.org:443",
        "denied: 10.0.0.1:80 is not permitted",
        "denied: $(touch x):443 is not permitted; to allow it, in the policy: network.allow",
        'denied: curl is not listed; to allow it, in the policy: commands = ["curl"]',
    ]


def test_many_denials_are_cut() -> None:
    lines = noted(replace(OK, denials=tuple(denied(f"h{n}.example:443", None) for n in range(30))))
    assert (len(lines), lines[-1]) == (21, "10 more kinds of denial: --report FILE has them all")


def test_a_missing_program_is_looked_for_on_this_machine(folder: Path) -> None:
    missing = ended("error", "not-found", exit_code=127)
    assert noted(missing, "frobnicate --all") == [
        f"no program frobnicate inside. This machine has it at {folder}/bin/frobnicate, which is not shown",
        f"to show it: ringfence exec --ro {folder} -- {folder}/bin/frobnicate ...",
    ]
    assert noted(missing, "nothing-of-that-name") == [
        "no program nothing-of-that-name inside, and none on this machine either: check the name, or install it"
    ]
    assert noted(missing, "bin/frobnicate") == ["bin/frobnicate is on this machine but not shown inside: add --ro ."]
    assert noted(missing, "./none") == ["no program ./none inside, and none on this machine either: check the path"]
    assert noted(missing, "bin/frobnicate", "--ro", ".") == [
        (
            "bin/frobnicate is shown inside but cannot start: "
            "its interpreter (in the first line) or its loader is missing"
        )
    ]


def test_a_program_the_policy_leaves_out_is_said_once() -> None:
    denial = Denial("command", "frobnicate", "exec.not-listed", "frobnicate is not listed", 'commands = ["frobnicate"]')
    missing = replace(ended("error", "not-found", exit_code=127), denials=(denial,))
    assert noted(missing, "frobnicate") == [
        'denied: frobnicate is not listed; to allow it, in the policy: commands = ["frobnicate"]'
    ]


def test_a_file_of_this_machine_that_is_not_shown_is_named() -> None:
    failed = ended("error", "exit", exit_code=1)
    assert noted(failed, "cat in.txt") == ["in.txt is on this machine but not shown inside: add --ro in.txt"]
    assert noted(failed, "cat in.txt", "--ro", ".", "--hide", "in.txt") == ["in.txt is hidden by --hide or the policy"]
    assert noted(failed, "cat in.txt", "--ro", "in.txt") == []
    assert noted(failed, "cat other.txt") == []


def test_a_worktree_whose_repository_is_not_shown_is_explained(folder: Path) -> None:
    git = folder.parent / "repo" / ".git"
    (git / "worktrees" / "shop").mkdir(parents=True)
    (folder / ".git").write_text(f"gitdir: {git}/worktrees/shop\n")
    (git / "worktrees" / "shop" / "gitdir").write_text(f"{folder}/.git\n")
    failed = ended("error", "exit", exit_code=128)
    stderr = b"fatal: not a git repository: /x\n"
    words = f"this is a worktree of a git repository that is not shown inside: {git}"
    expected = [f"{words}; on a copy of both: --copy . --copy {git}"]
    assert noted(failed, "git status", "--rw", ".", stderr=stderr) == expected
    assert noted(failed, "git status", "--copy", ".", "--copy", str(git), stderr=stderr) == []


def test_a_folder_that_a_guest_calls_its_repository_is_not_advised_to_be_shown(folder: Path) -> None:
    home = folder.parent / "home"
    (home / "worktrees" / "shop").mkdir(parents=True)
    (folder / ".git").write_text(f"gitdir: {home}/worktrees/shop\n")
    failed = ended("error", "exit", exit_code=128)
    assert noted(failed, "git status", "--rw", ".", stderr=b"fatal: not a git repository: /x\n") == []
    (home / "worktrees" / "shop" / "gitdir").write_text("/etc/passwd\n")
    assert noted(failed, "git status", "--rw", ".", stderr=b"fatal: not a git repository: /x\n") == []


@pytest.mark.timeout(20)
def test_a_pipe_that_a_guest_left_as_dot_git_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / ".git")
    failed = ended("error", "exit", exit_code=128)
    assert noted(failed, "git status", "--rw", ".", stderr=b"fatal: not a git repository: /x\n") == []


def test_what_was_found_afterwards_is_not_called_denied() -> None:
    found = Denial("mount", "n/.git", "mount.protected-name", "n/.git appeared", allow=None)
    assert noted(replace(OK, denials=(found,))) == ["found: n/.git appeared"]


def test_a_program_alone_is_shown_where_its_folder_holds_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert noted(ended("error", "not-found", exit_code=127), "frobnicate")[1] == (
        f"to show it: ringfence exec --ro {folder}/bin/frobnicate -- {folder}/bin/frobnicate ..."
    )


def test_a_module_beside_the_file_is_named() -> None:
    failed = ended("error", "exit", exit_code=1)
    said = b"Traceback ...\nModuleNotFoundError: No module named 'bin.tools'\n"
    here = os.getcwd()
    assert noted(failed, "python3 main.py", stderr=said) == [
        f"bin is beside the file but not shown inside: add --ro {here}"
    ]
    other = b"ModuleNotFoundError: No module named '../../etc/passwd'\n"
    assert noted(failed, "python3 main.py", stderr=other) == []


def test_a_folder_that_is_not_shown_is_named_when_something_was_missed() -> None:
    failed = ended("error", "exit", exit_code=254)
    hint = "this folder is not shown inside: add --ro . (or --rw . to let it write, --copy . for a copy)"
    assert noted(failed, "npm test", stderr=b"npm ERR! code ENOENT\n") == [hint]
    assert noted(failed, "npm test", stderr=b"2 tests failed\n") == []
    assert noted(failed, "npm test", "--rw", ".", stderr=b"npm ERR! code ENOENT\n") == []


def test_a_weaker_limit_is_said_with_its_mechanism() -> None:
    weaker = replace(OK.enforcement, memory=Control("RLIMIT_AS", "weaker", "per process, not for the tree"))
    result = replace(OK, enforcement=weaker)
    assert has_notes(result)
    assert noted(result) == [
        "weaker than the policy's default here: memory: RLIMIT_AS, per process, not for the tree",
        "what would enforce it fully: ringfence doctor; to refuse such a run: --strict",
    ]
