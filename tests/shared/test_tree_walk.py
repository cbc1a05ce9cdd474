"""A walk through a guest's tree needs memory for the names, not for the depth times the number of names."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.shared import tree_pack, tree_unpack, tree_walk
from ringfence.shared.tar import Refused

DEPTH, WIDE = 600, 1500
_OPEN = os.O_RDONLY | os.O_DIRECTORY


def deep_and_wide(top: Path) -> int:
    """A folder at the end of a long way that holds many folders. Returns the top one, open."""
    fd = first = os.open(top, _OPEN)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", _OPEN, dir_fd=fd)
        if fd != first:
            os.close(fd)
        fd = below
    for number in range(WIDE):
        os.mkdir(f"{number:05}", dir_fd=fd)
    os.close(fd)
    return first


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_walk_holds_each_folder_by_its_name(tmp_path: Path) -> None:
    top = deep_and_wide(tmp_path)
    assert peak(lambda: [found.name for found in tree_pack.walk(top)]) < 2 << 20  # as paths: 7 MiB
    names = [found.path for found in tree_pack.walk(top)]
    assert (len(names), names[:2], names[-1]) == (DEPTH + WIDE, [b"d", b"d/d"], b"d/" * DEPTH + b"%05d" % (WIDE - 1))
    os.close(top)
    tree_walk.remove_tree(os.open(tmp_path.parent, _OPEN), tmp_path.name)


def test_what_is_merged_is_held_by_its_name(tmp_path: Path) -> None:
    for name in ("stage", "target"):
        (tmp_path / name).mkdir()
        os.close(deep_and_wide(tmp_path / name))
    stage, target = (os.open(tmp_path / name, _OPEN) for name in ("stage", "target"))
    assert peak(lambda: tree_unpack.merge(stage, target)) < 2 << 20
    for fd in (stage, target):
        os.close(fd)
    tree_walk.remove_tree(os.open(tmp_path.parent, _OPEN), tmp_path.name)


def test_more_names_in_a_folder_than_anybody_keeps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_pack, "_MOST_IN_FOLDER", 10 * (tree_pack._BESIDE + 5))
    top = os.open(tmp_path, _OPEN)
    for number in range(10):
        (tmp_path / f"{number:05}").touch()
    assert len(list(tree_pack.walk(top))) == 10
    (tmp_path / "more").touch()
    with pytest.raises(Refused) as caught:
        list(tree_pack.walk(top))
    assert caught.value.why == "files"
    os.close(top)


def test_a_tree_of_many_names_is_removed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_walk, "_NAMES", 7)
    top = tmp_path / "top"
    top.mkdir()
    for number in range(40):
        (top / f"file-{number}").touch()
        (top / f"folder-{number}").mkdir()
        (top / f"folder-{number}" / "inner").touch()
    fd = os.open(tmp_path, _OPEN)
    tree_walk.remove_tree(fd, "top")
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_no_directory_on_a_way_where_the_kernel_lacks_openat2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There O_NOFOLLOW follows a link of /proc, so the link is read and refused before (J18)."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.setattr("ringfence.shared.syscalls.has_openat2", lambda: False)
    top = os.open(tmp_path, os.O_PATH)
    try:
        os.close(tree_walk.enter(top, [b"folder"], 0))
        with pytest.raises(OSError, match="symbolic links") as caught:
            tree_walk.enter(top, [b"link"], 0)
    finally:
        os.close(top)
    assert caught.value.errno == errno.ELOOP
