"""Differences between two trees: exact, readable by patch, and never slow however the text was made."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.snapshots.content import ContentStore, Holder, Writer
from ringfence.snapshots.manifest import Manifest, ManifestEntry
from ringfence.snapshots.model import DiffBudget, SnapshotTree, changes, unified
from ringfence.types import Change


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ContentStore]:
    made = ContentStore(str(tmp_path))
    yield made
    if made._fd >= 0:
        os.close(made._fd)  # these tests hold content until the end


def tree(store: ContentStore, *entries: ManifestEntry, **files: bytes) -> SnapshotTree:
    holder = Holder(store)
    made = list(entries)
    for name, data in files.items():
        writer = Writer(store, len(data))
        writer.write(data)
        made.append(ManifestEntry(name, "f", 0o644, 0, len(data), holder.commit(writer)))
    return SnapshotTree(Manifest(made), store)


def test_added_changed_and_removed_with_their_sizes_and_text(store: ContentStore) -> None:
    before = tree(store, same=b"x", gone=b"1\n", text=b"a\nb\nc\n", binary=b"\0a")
    after = tree(store, same=b"x", new=b"2", text=b"a\nB\nc\n", binary=b"\0b")
    assert changes(before, after) == (
        Change("binary", "changed", 2, 2, None),
        Change("gone", "removed", 2, None, "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n"),
        Change("new", "added", None, 1, "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+2\n\\ No newline at end of file\n"),
        Change("text", "changed", 6, 6, "--- a/text\n+++ b/text\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"),
    )


def test_rights_links_and_kinds_are_changes_and_times_are_none(store: ContentStore) -> None:
    old = [
        ManifestEntry("d", "d", 0o755, 1, 0, ""),
        ManifestEntry("l", "l", 0o777, 1, 0, "a"),
        ManifestEntry("k", "d", 0o755, 1, 0, ""),
    ]
    new = [
        ManifestEntry("d", "d", 0o700, 2, 0, ""),
        ManifestEntry("l", "l", 0o777, 2, 0, "b"),
        ManifestEntry("k", "l", 0o777, 1, 0, "x"),
    ]
    found = {change.path: change.diff for change in changes(tree(store, *old), tree(store, *new))}
    assert found == {
        "d": "old mode 040755\nnew mode 040700\n",
        "k": "old mode 040755\nnew mode 120000\n--- a/k\n+++ b/k\n@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n",
        "l": "--- a/l\n+++ b/l\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n",
    }
    later = [one._replace(mtime_ns=99) for one in old]
    assert changes(tree(store, *old), tree(store, *later)) == ()


def test_a_name_cannot_make_lines_of_its_own(store: ContentStore) -> None:
    (change,) = changes(tree(store), tree(store, **{"a\n+++ b": b"x\n"}))
    assert change.diff is not None
    assert change.diff.splitlines() == ["--- /dev/null", "+++ 'b/a\\n+++ b'", "@@ -0,0 +1 @@", "+x"]


lines = st.lists(st.sampled_from(["a", "b", "c", "d", ""]), max_size=25).map("\n".join)


@given(lines, lines)
def test_patch_makes_the_one_of_the_other(old: str, new: str) -> None:
    """GNU patch is the judge; where both are the same there is nothing to say."""
    import tempfile

    from ringfence.snapshots.model import _split

    made = unified(_split(old), _split(new), DiffBudget())
    assert bool(made) == (old != new)
    if not made:
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "f").write_text(old)
        text = "--- f\n+++ f\n" + "".join(made)
        done = subprocess.run(["patch", "-s", "-d", folder, "f"], input=text, capture_output=True, text=True)
        path = Path(folder, "f")
        assert (done.returncode, path.read_text() if path.exists() else "") == (0, new), done.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\n" * 20_000, "b\n" * 20_000),
        ("a\nb\n" * 10_000, "b\nc\n" * 10_000),
        ("".join(f"{n}\n" for n in range(20_000)), "".join(f"{n}\n" for n in reversed(range(20_000)))),
    ],
)
def test_text_made_to_be_slow_is_not(store: ContentStore, old: str, new: str) -> None:
    started = time.process_time()
    (change,) = changes(tree(store, f=old.encode()), tree(store, f=new.encode()))
    assert change.diff is not None
    assert time.process_time() - started < 3


def test_many_texts_made_to_be_slow_are_not(store: ContentStore) -> None:
    """Small texts in which every line differs, and long texts with many hunks: a guest has room for thousands."""
    blank = [b"\n"] * 19_000
    old = {f"s{number}": b"x\n" * 190 + b"%d\n" % number for number in range(300)}
    new = {name: data.replace(b"x", b"y") for name, data in old.items()}
    for number in range(20):
        old[f"l{number}"] = b"%d\n" % number + b"".join(blank)
        new[f"l{number}"] = b"%d\n" % number + b"".join(b"z\n" if at % 100 == 7 else b"\n" for at in range(len(blank)))
    before, after = tree(store, **old), tree(store, **new)
    started = time.process_time()
    found = changes(before, after)
    assert time.process_time() - started < 7
    assert [change.path for change in found if change.diff is None] == []


def test_too_much_text_has_no_diff_and_says_its_sizes(store: ContentStore) -> None:
    assert changes(tree(store, f=b"a\n" * 200_000), tree(store, f=b"b\n")) == (
        Change("f", "changed", 400_000, 2, None),
    )
