"""Agents' ids, and that none of them is a path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ringfence import PolicyError
from ringfence.manager.state import agent_of, check_agent, folder_of

GOOD = ["a", "agent-7", "team.agent_1", ".", "..", "...", "-", "_", "0", "a" * 64]
BAD: list[Any] = ["", "A", "ä", "a/b", "../x", "a b", "a\n", "a\0", "a" * 65, "~", "a:b", "%2e", "\u202ea"]


@pytest.mark.parametrize("agent", GOOD)
def test_an_id_becomes_the_name_of_one_folder_and_comes_back(agent: str, tmp_path: Path) -> None:
    folder = folder_of(agent)
    assert agent_of(folder) == agent
    os.mkdir(tmp_path / folder)
    assert [path.name for path in tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("agent", BAD)
def test_what_is_no_id_is_refused_with_the_letters_that_are(agent: str) -> None:
    with pytest.raises(PolicyError, match="is no agent's id") as caught:
        check_agent(agent)
    assert (caught.value.code, caught.value.fix) == ("agent-id", "1 to 64 of a-z, 0-9, `.`, `_` and `-`")


@pytest.mark.parametrize("agent", [None, 5, b"a", ["a"]])
def test_another_type_is_a_type_error(agent: object) -> None:
    with pytest.raises(TypeError, match="an agent's id is a str"):
        check_agent(agent)


@pytest.mark.parametrize("name", ["lock", "a", "agent-", "agent-A", "agent-a/b", "agent-" + "a" * 65])
def test_other_names_in_the_folder_are_no_agents(name: str) -> None:
    assert agent_of(name) is None
