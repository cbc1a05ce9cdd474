"""A uid is held by a single sandbox at a time, and is free when the sandbox's process is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.process.children import Say, child
from ringfence.errors import SandboxError
from ringfence.host import state, uids


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make an empty lock directory, apart from other sandboxes of this host."""
    monkeypatch.setattr(state, "directory", lambda _: str(tmp_path))
    monkeypatch.setattr(uids, "_given_out", lambda _: [])
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def test_each_hold_has_another_uid_of_the_range(directory: Path) -> None:
    held = [uids.hold(100_000, 100_049) for _ in range(50)]
    assert sorted(one.uid for one in held) == list(range(100_000, 100_050))
    with pytest.raises(SandboxError, match="no uid from 100000 to 100049 is free"):
        uids.hold(100_000, 100_049)
    for one in held:
        one.release()


def test_a_released_uid_can_be_held_again_and_releasing_twice_is_nothing(directory: Path) -> None:
    first = uids.hold(100_000, 100_000)
    first.release()
    first.release()
    second = uids.hold(100_000, 100_000)
    first.release()
    with pytest.raises(SandboxError):
        uids.hold(100_000, 100_000)
    second.release()


def test_another_process_does_not_get_a_held_uid_until_the_holder_is_killed(directory: Path) -> None:
    def take(say: Say) -> None:
        say(uids.hold(100_000, 100_000).uid)
        time.sleep(60)

    with child(take) as other:
        assert other.hear() == 100_000
        with pytest.raises(SandboxError):
            uids.hold(100_000, 100_000)
        other.kill()
        uids.hold(100_000, 100_000).release()


def test_a_fork_of_the_holder_cannot_give_the_uid_back(directory: Path) -> None:
    held = uids.hold(100_000, 100_000)

    def release(say: Say) -> None:
        held.release()
        say("released")

    with child(release) as fork:
        fork.hear()
    with pytest.raises(SandboxError):
        uids.hold(100_000, 100_000)
    held.release()


def test_ranges_given_out_to_users_are_left_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"/etc/subuid": [(100_000, 100_003)], "/etc/subgid": [(100_006, 199_999)]}
    monkeypatch.setattr(uids, "_given_out", ranges.__getitem__)
    held = [uids.hold(100_000, 100_009) for _ in range(2)]
    assert sorted(one.uid for one in held) == [100_004, 100_005]
    with pytest.raises(SandboxError):
        uids.hold(100_000, 100_009)
    for one in held:
        one.release()


def test_the_lock_files_of_the_dead_are_swept_and_those_of_the_living_stay(directory: Path) -> None:
    def take(say: Say) -> None:
        say(uids.hold(100_000, 100_000).uid)
        time.sleep(60)

    mine = uids.hold(100_001, 100_001)
    with child(take) as other:
        other.hear()
        assert uids.sweep() == 0
        other.kill()
    assert uids.sweep() == 1
    assert [path.name for path in directory.iterdir()] == ["100001"]
    mine.release()


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(directory: Path) -> None:
    target = directory / "target"
    (directory / "100000").symlink_to(target)
    with pytest.raises(OSError, match="Too many levels"):
        uids.hold(100_000, 100_000)
    assert not target.exists()
    (directory / "100000").unlink()


@pytest.mark.parametrize(("first", "last"), [(0, 5), (-3, 5), (9, 8)])
def test_a_range_with_root_in_it_or_without_numbers_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="is no range of uids"):
        uids.hold(first, last)


def test_a_thousand_holds_are_fast(directory: Path) -> None:
    started = time.perf_counter()
    held = [uids.hold() for _ in range(500)]
    took = time.perf_counter() - started
    assert len({one.uid for one in held}) == 500
    for one in held:
        one.release()
    assert took < 500 * 0.002  # ten times the 0.2 ms that are meant, for a busy host


def test_processes_that_hold_and_release_at_once_never_share_a_uid(directory: Path) -> None:
    """A child marks a uid with O_EXCL while holding it; a second holder of the same uid finds the mark."""
    marks = directory / "marks"
    marks.mkdir()

    def churn(say: Say) -> None:
        clashes = 0
        for _ in range(200):
            try:
                held = uids.hold(100_000, 100_003)
            except SandboxError:
                continue
            try:
                os.close(os.open(marks / str(held.uid), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                clashes += 1
            else:
                os.unlink(marks / str(held.uid))
            held.release()
        say(clashes)

    with child(churn) as one, child(churn) as two, child(churn) as three:
        assert [one.hear(), two.hear(), three.hear()] == [0, 0, 0]
    marks.rmdir()
