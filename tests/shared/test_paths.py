"""A path is within or below a folder by whole parts of its name."""

from __future__ import annotations

import pytest

from ringfence.shared.paths import is_below, is_within


@pytest.mark.parametrize(
    ("path", "folder", "within", "below"),
    [
        ("/a/b", "/a", True, True),
        ("/a", "/a", True, False),
        ("/ab", "/a", False, False),
        ("/a", "/a/b", False, False),
        ("/a", "/", True, True),
        ("/", "/", True, False),
        ("a/b", "a", True, True),
        ("ab", "a", False, False),
        ("/a/", "/a", True, False),
        ("/a", "/a/", True, False),
        ("/a/b/", "/a/", True, True),
    ],
)
def test_a_folder_holds_itself_and_what_is_below(path: str, folder: str, *, within: bool, below: bool) -> None:
    assert (is_within(path, folder), is_below(path, folder)) == (within, below)
