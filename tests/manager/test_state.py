"""The state directory: one manager's, this user's own, and never in a guest's sight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import Mount, Policy, PolicyError, SandboxError
from ringfence.manager.state import StateDirectory


def test_it_is_made_for_this_user_alone(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "deep" / "state")
    state.open()
    assert (os.stat(state.path).st_mode & 0o777, state.agents()) == (0o700, [])
    state.close()


@pytest.mark.parametrize("name", ["link", "way/new/deeper"])
def test_it_lies_behind_no_link_that_a_guest_could_have_made(tmp_path: Path, name: str) -> None:
    """L15: agents' work would be kept where a guest chose."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "link").symlink_to("outside")
    (tmp_path / "way").symlink_to("outside")
    with pytest.raises(PolicyError, match=r"cannot be a state directory: .* is a link to outside") as caught:
        StateDirectory(tmp_path / name)
    assert (caught.value.key, caught.value.code) == ("state", "link")
    assert os.listdir(tmp_path / "outside") == []


def test_a_second_manager_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path / "s"), StateDirectory(tmp_path / "s")
    first.open()
    with pytest.raises(SandboxError, match="another manager uses the state directory") as caught:
        second.open()
    assert caught.value.code == "state-in-use"
    first.close()
    second.open()
    second.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "s").mkdir()
    os.chmod(tmp_path / "s", mode)
    with pytest.raises(PolicyError, match="other users than this one may write to it"):
        StateDirectory(tmp_path / "s").open()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    with pytest.raises(PolicyError, match="cannot be a state directory"):
        StateDirectory(tmp_path / "s").open()


def test_dots_are_folders_of_their_own_and_removing_one_leaves_the_rest(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    state = StateDirectory(tmp_path / "s")
    for agent in ("..", ".", "a"):
        Path(state.workspace(agent)).write_text(agent)
    assert state.agents() == [".", "..", "a"]
    state.remove("..")
    state.remove("..")
    assert (state.agents(), outside.read_text()) == ([".", "a"], "kept")
    state.close()


def test_a_link_in_place_of_an_agents_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("kept")
    state = StateDirectory(tmp_path / "s")
    state.open()
    os.symlink(tmp_path / "elsewhere", tmp_path / "s" / "agent-a")
    for use in (state.workspace, state.remove):
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            use("a")
    assert (tmp_path / "elsewhere" / "file").read_text() == "kept"
    state.close()


def test_no_mount_may_show_it_from_above_below_or_by_a_link(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "s")
    state.open()
    os.symlink(tmp_path, tmp_path / "link")
    (tmp_path / "beside").mkdir()
    for source in (tmp_path, tmp_path / "s", tmp_path / "s" / "agent-a", tmp_path / "link"):
        with pytest.raises(PolicyError, match="the manager's state directory") as caught:
            state.check_hidden(Policy(mounts=[Mount(source, "/data")]))
        assert caught.value.code == "state-mounted"
    state.check_hidden(Policy(mounts=[Mount(tmp_path / "beside", "/data")]))
    state.close()
