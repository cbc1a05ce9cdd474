"""How a command line is read: what is an option, what belongs to the command, and what is said about a mistake."""

from __future__ import annotations

import json

import pytest
from hypothesis import given as given_that
from hypothesis import strategies as st

from ringfence.cli import main
from ringfence.cli.console import Console, Problem
from ringfence.cli.options import Option, Table, exec_table, run_table
from ringfence.text import distance, nearest


def read(*argv: str) -> tuple[list[tuple[str, str]], list[str]]:
    given = exec_table().parse(list(argv), Console())
    assert given is not None
    return given.options, given.words


@pytest.mark.parametrize(
    ("argv", "options", "words"),
    [
        (["ls"], [], ["ls"]),
        (["--", "ls"], [], ["ls"]),
        (["--", "--json"], [], ["--json"]),
        (["ls", "--json", "--", "-x"], [], ["ls", "--json", "--", "-x"]),
        (["--json", "ls", "-q"], [("--json", "")], ["ls", "-q"]),
        (["--memory", "1G", "ls"], [("--memory", "1G")], ["ls"]),
        (["--memory=1G", "ls"], [("--memory", "1G")], ["ls"]),
        (["-e", "A=b=c", "-eX=1", "ls"], [("--env", "A=b=c"), ("--env", "X=1")], ["ls"]),
        (["-qt", "ls"], [("--quiet", ""), ("--tty", "")], ["ls"]),
        (["-qpdev", "ls"], [("--quiet", ""), ("--policy", "dev")], ["ls"]),
        (["--timeout", "1", "--timeout", "2", "ls"], [("--timeout", "1"), ("--timeout", "2")], ["ls"]),
        (["--ro", "-x", "ls"], [("--ro", "-x")], ["ls"]),
    ],
)
def test_options_end_where_the_command_begins(
    argv: list[str], options: list[tuple[str, str]], words: list[str]
) -> None:
    assert read(*argv) == (options, words)


def test_code_may_look_like_an_option() -> None:
    given = run_table().parse(["-c", "--json", "a", "-c"], Console())
    assert given is not None
    assert (given.options, given.words) == ([("--code", "--json")], ["a", "-c"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--memroy", "1G", "--", "ls"], "exec has no option --memroy"),
        (["-x", "ls"], "exec has no option -x"),
        (["-qx", "ls"], "exec has no option -x"),
        (["-xyz", "ls"], "exec has no option -xyz"),
        (["--memory"], "--memory needs a value: --memory SIZE"),
        (["--memory", "--json", "ls"], "--memory needs a value: --memory SIZE"),
        (["--memory", "--", "ls"], "--memory needs a value: --memory SIZE"),
        (["-C"], "-C needs a value: -C PATH"),
        (["--json=yes", "ls"], "--json takes no value, but was given 'yes'"),
        (["--memory=", "ls"], "--memory was given an empty value"),
        (["--ro", "a\0b", "ls"], "--ro 'a\\x00b' holds a NUL character"),
    ],
)
def test_a_mistake_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(Problem) as caught:
        read(*argv)
    assert str(caught.value) == message
    assert caught.value.fix


def test_json_after_a_mistake_still_decides_how_it_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "--memroy=1G", "--json", "--", "ls"]) == 125
    said = capfd.readouterr()
    assert json.loads(said.out)["error"]["message"] == "exec has no option --memroy"
    assert said.err == ""


def test_json_of_the_command_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "--memroy=1G", "--", "ls", "--json"]) == 125
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("ringfence: exec has no option --memroy\nringfence: did you mean --memory? ")


@given_that(
    st.lists(st.text(max_size=8) | st.sampled_from(["--", "-", "--ro", "-c", "--json", "-q", "-h"]), max_size=8)
)
def test_any_words_are_read_or_refused(argv: list[str]) -> None:
    try:
        given = exec_table().parse(argv, Console())
    except Problem:
        return
    if given is not None:
        assert given.words == argv[len(argv) - len(given.words) :]


def test_a_verb_without_a_command_takes_options_anywhere() -> None:
    given = Table("v", [Option("--json")]).parse(["a", "--json", "b"], Console())
    assert given is not None
    assert (given.options, given.words) == ([("--json", "")], ["a", "b"])


@pytest.mark.parametrize(
    ("word", "meant"),
    [("exce", "exec"), ("dcotor", "doctor"), ("polic", "policy"), ("EXEC", "exec"), ("zzz", None), ("x" * 5000, None)],
)
def test_a_near_name_is_found_and_a_far_one_is_not(word: str, meant: str | None) -> None:
    assert nearest(word, ["run", "exec", "doctor", "policy", "attack"]) == meant


@given_that(st.text(max_size=8), st.text(max_size=8))
def test_distance_is_symmetric_and_zero_for_equals_only(left: str, right: str) -> None:
    assert distance(left, right) == distance(right, left)
    assert (distance(left, right) == 0) == (left == right)
