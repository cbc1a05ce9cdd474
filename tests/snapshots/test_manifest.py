"""A manifest comes from inside or from a file of anybody's: what is no tree is refused as a whole, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import Limits, SnapshotError
from ringfence.snapshots.manifest import Manifest, ManifestCaps, ManifestEntry, caps_of, entry

DIGEST = "ab" * 32
OTHER = "cd" * 32


def row(path: object = "f", kind: object = "f", text: object = DIGEST, **more: object) -> list[object]:
    return [path, kind, more.get("mode", 0o644), more.get("mtime", 0), more.get("size", 0), text]


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", ".", "a/./b", "a//b", "a/", "a\0b", "x" * 256),
        *("\ud800", "a/" * 9000 + "a", "é" * 200, "\udcc3\udca9", 5, None, ["a"]),
    ],
)
def test_a_path_that_is_no_plain_relative_one_is_refused(path: object) -> None:
    with pytest.raises(SnapshotError):
        entry(row(path))


def test_names_that_are_strange_but_possible_are_taken() -> None:
    names = ["a\nb", "\x1b[2J", "-rf", "..a", "a..", "...", "\udcff", "é", "x" * 255, "a b/\\"]
    assert [entry(row(name)).path for name in names] == names


@pytest.mark.parametrize(
    "wrong",
    [
        row(kind="c"),
        row(kind="b"),
        row(kind="p"),
        row(kind="fd"),
        row(kind=""),
        row(kind=None),
        row(mode=0o10000),
        row(mode=-1),
        row(mode=True),
        row(mode="644"),
        row(mtime=1 << 63),
        row(mtime=1.5),
        row(size=-1),
        row(size=1 << 63),
        row(kind="d", text="", size=1),
        row(kind="d", text="x"),
        row(kind="l", text=""),
        row(kind="l", text="x" * 4096),
        row(kind="l", text="a\0"),
        row(kind="h", text="../x"),
        row(text=""),
        row(text="zz" * 32),
        row(text="AB" * 32),
        row(text="ab"),
        row(text=None),
        row()[:-1],
        [*row(), 1],
        {"path": "f"},
        None,
    ],
)
def test_a_row_with_a_field_that_nothing_has_is_refused(wrong: object) -> None:
    with pytest.raises(SnapshotError):
        entry(wrong)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row("a"), row("a")], "twice"),
        ([row("a"), row("a/b")], "no directory"),
        ([row("a", "l", "b"), row("a/b")], "no directory"),
        ([row("a/b")], "no directory"),
        ([row("a", "h", "b")], "no file"),
        ([row("a", "h", "a")], "no file"),
        ([row("a"), row("b", "h", "a"), row("c", "h", "b")], "no file"),
        ([row("d", "d", ""), row("b", "h", "d")], "no file"),
        ([row("a", size=1), row("b", size=2)], "another size"),
    ],
)
def test_rows_that_make_no_tree_are_refused(rows: list[list[object]], why: str) -> None:
    with pytest.raises(SnapshotError, match=why):
        Manifest([entry(one) for one in rows])


def test_more_names_or_bytes_than_the_limits_are_refused() -> None:
    three = [entry(row(f"f{n}", size=5)) for n in range(3)]
    assert Manifest(three, ManifestCaps(15, 3)).size_bytes == 15
    with pytest.raises(SnapshotError, match=r"limits.disk_files = 2"):
        Manifest(three, ManifestCaps(15, 2))
    with pytest.raises(SnapshotError, match=r"limits.disk = 14"):
        Manifest(three, ManifestCaps(14, 3))


def test_names_are_counted_together_however_a_tree_came_about() -> None:
    caps = ManifestCaps(0, 10)
    folders = ["/".join(["d" * 250] * depth) for depth in range(1, 6)]
    tree = Manifest(ManifestEntry(path, "d", 0o755, 0, 0, "") for path in folders)
    assert caps.text == (1 << 20) + 2560
    links = {f"l{n}": ManifestEntry(f"l{n}", "l", 0, 0, 0, "t" * 4000) for n in range(300)}
    for made in (tree.patched(links, (), ManifestCaps(0, 1000)), Manifest([*tree.entries, *links.values()])):
        with pytest.raises(SnapshotError, match="names and links"):
            made.check_caps(ManifestCaps(0, 400))
        back = made.patched({}, [*links], ManifestCaps(0, 400))
        assert back.entries == tree.entries


def test_caps_follow_the_limits() -> None:
    assert caps_of(Limits(disk=5000, disk_files=7)) == ManifestCaps(8192, 7)


def test_the_digest_is_of_every_field_and_of_what_it_is_bound_to() -> None:
    base = ManifestEntry("f", "f", 0o644, 1, 2, DIGEST)
    one = Manifest([base]).digest("here")
    changes = [{"path": "g"}, {"mode": 0o600}, {"mtime_ns": 2}, {"size": 3}, {"text": OTHER}]
    others = {Manifest([base._replace(**change)]).digest("here") for change in changes}  # type: ignore[arg-type]  # one field each
    assert len(others | {one, Manifest([base]).digest("there"), Manifest(()).digest("here")}) == len(changes) + 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)
paths = st.lists(st.sampled_from(["a", "b", "..", ".", "", "c\n"]), min_size=1, max_size=3).map("/".join)
rows = st.tuples(
    paths,
    st.sampled_from("fdlhc"),
    st.integers(-1, 0o10000),
    st.integers(),
    st.integers(-1, 9),
    st.one_of(paths, st.sampled_from([DIGEST, OTHER, ""])),
).map(list)


@given(json_values)
def test_any_json_is_a_row_or_refused(value: object) -> None:
    try:
        entry(value)
    except SnapshotError:
        return
    raise AssertionError("no JSON of this shape is a row")


@given(st.lists(rows, max_size=8))
def test_whatever_is_taken_is_a_tree_below_the_workspace(given_rows: list[list[object]]) -> None:
    try:
        tree = Manifest([entry(one) for one in given_rows], ManifestCaps(100, 6))
    except SnapshotError:
        return
    seen = {""}
    for made in tree.entries:
        parent = made.path.rpartition("/")[0]
        assert parent in seen, "a parent comes before what is in it"
        assert not {"", ".", ".."} & set(made.path.split("/"))
        seen |= {made.path} if made.kind == "d" else set()
    assert len(tree.by_path) == len(given_rows)


def _tree(given_rows: list[list[object]]) -> Manifest | None:
    try:
        return Manifest([entry(one) for one in given_rows], ManifestCaps(100, 6))
    except SnapshotError:
        return None


@given(st.lists(rows, max_size=8), st.lists(rows, max_size=3), st.lists(paths, max_size=3))
def test_a_tree_with_changes_is_the_tree_that_all_its_rows_would_make(
    before_rows: list[list[object]], told_rows: list[list[object]], gone: list[str]
) -> None:
    before = _tree(before_rows)
    try:
        told = {made.path: made for made in map(entry, told_rows)}
    except SnapshotError:
        return
    if before is None:
        return
    # So many more that the short way is taken: it is not for a tree of which most is new.
    more = [ManifestEntry(f"more{n}", "d", 0o755, 0, 0, "") for n in range(40)]
    before = Manifest([*before.entries, *more])
    left = [made for made in before.entries if made.path not in told and made.path not in gone]
    caps = ManifestCaps(100, 60)
    try:
        whole = Manifest([*left, *told.values()], caps)
    except SnapshotError:
        with pytest.raises(SnapshotError):
            before.patched(told, set(gone) - told.keys(), caps)
        return
    short = before.patched(told, set(gone) - told.keys(), caps)
    for name in Manifest.__slots__:
        assert name == "_lines" or getattr(short, name) == getattr(whole, name), name
    assert short.digest("here") == whole.digest("here")
