"""Layers are applied to the tree and to nothing else: links are never followed, whiteouts remove what lay below."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from images.packing import E, device, directory, hardlink, symlink, tar
from ringfence.images.tar_reader import ArchiveCaps, ArchiveEntry, TarError, TarStream
from ringfence.images.tree import ImageTree, scan, tree_digest


def apply(root: Path, *layers: list[E], whiteouts: bool = True, caps: ArchiveCaps | None = None) -> ImageTree:
    root.mkdir()
    with ImageTree(str(root), caps) as tree:
        for layer in layers:
            tree.apply_tar(TarStream(io.BytesIO(tar(layer)).read, caps), whiteouts=whiteouts)
        tree.finish()
    return tree


def entry(name: str, kind: Literal["file", "dir"] = "file") -> ArchiveEntry:
    return ArchiveEntry(name, kind, mode=0o644, size=1, mtime=0, link="", extended=False)


def seen(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = f"-> {os.readlink(path)}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
    return found


def test_a_later_layer_replaces_files_and_keeps_the_rest(tmp_path: Path) -> None:
    apply(tmp_path / "r", [directory("a"), E("a/x", b"1"), E("a/y", b"2")], [E("a/x", b"3"), E("b/c", b"4")])
    assert seen(tmp_path / "r") == {"a": "/", "a/x": "3", "a/y": "2", "b": "/", "b/c": "4"}


def test_a_whiteout_removes_what_lower_layers_had_and_nothing_of_its_own(tmp_path: Path) -> None:
    lower = [E("a/x", b"1"), E("a/y", b"2"), E("d/e/f", b"3")]
    apply(tmp_path / "r", lower, [E("a/.wh.x"), E("d/new", b"4"), E(".wh.d"), E("a/.wh.gone")])
    assert seen(tmp_path / "r") == {"a": "/", "a/y": "2", "d": "/", "d/new": "4"}


def test_an_opaque_directory_shows_only_its_own_layer(tmp_path: Path) -> None:
    lower = [E("a/x", b"1"), E("a/b/c", b"2")]
    apply(tmp_path / "r", lower, [directory("a"), E("a/new", b"3"), E("a/.wh..wh..opq"), E("a/later", b"4")])
    assert seen(tmp_path / "r") == {"a": "/", "a/new": "3", "a/later": "4"}


def test_a_whiteout_in_a_plain_tar_is_a_file_of_that_name(tmp_path: Path) -> None:
    apply(tmp_path / "r", [E("x", b"1"), E(".wh.x", b"2")], whiteouts=False)
    assert seen(tmp_path / "r") == {"x": "1", ".wh.x": "2"}


def test_a_directory_that_was_removed_is_made_anew_for_what_comes_after(tmp_path: Path) -> None:
    lower = [directory("d"), E("d/x", b"1")]
    apply(
        tmp_path / "r",
        lower,
        [E(".wh.d"), E("d/y", b"2")],
        [E("d", b"file"), symlink("d", "/"), directory("d"), E("d/z", b"3")],
    )
    assert seen(tmp_path / "r") == {"d": "/", "d/z": "3"}


@pytest.mark.parametrize("last", ["..", ".", "", "../x", "a\0b", "n" * 256])
def test_a_name_in_the_directory_of_the_one_before_is_looked_at_as_closely(last: str, tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    with ImageTree(str(root)) as tree:
        for name in ("a/b/one", "a/b/two"):
            tree.add(entry(name), lambda: [b"1"])
        if last in (".", ""):
            tree.add(entry(f"a/b/{last}", "dir"), list)
        else:
            with pytest.raises(TarError):
                tree.add(entry(f"a/b/{last}"), lambda: [b"2"])
    assert seen(root) == {"a": "/", "a/b": "/", "a/b/one": "1", "a/b/two": "1"}


def test_what_all_layers_hold_together_is_capped(tmp_path: Path) -> None:
    layers = [[E(f"f{number}", b"x" * 10)] for number in range(4)]
    with pytest.raises(TarError, match="more than 3 files and directories"):
        apply(tmp_path / "many", *layers, caps=ArchiveCaps(entries=3))
    with pytest.raises(TarError, match="larger than 39 bytes"):
        apply(tmp_path / "large", *layers, caps=ArchiveCaps(size=39))


def test_a_file_that_is_replaced_does_not_change_its_hard_links(tmp_path: Path) -> None:
    apply(tmp_path / "r", [E("a", b"old"), hardlink("b", "a")], [E("a", b"new")])
    assert seen(tmp_path / "r") == {"a": "new", "b": "old"}


def test_a_directory_takes_the_place_of_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    apply(tmp_path / "r", [symlink("a", str(outside))], [directory("a"), E("a/x", b"1")])
    assert seen(tmp_path / "r") == {"a": "/", "a/x": "1"}
    assert list(outside.iterdir()) == []


def test_rights_that_would_raise_others_are_dropped_and_counted(tmp_path: Path) -> None:
    tree = apply(tmp_path / "r", [E("su", b"x", mode=0o6755), device("null"), E("p", kind=tarfile.FIFOTYPE)])
    assert stat.S_IMODE((tmp_path / "r" / "su").stat().st_mode) == 0o755
    assert seen(tmp_path / "r") == {"su": "x"}
    assert tree.dropped == {"set-uid and set-gid bits": 1, "device nodes": 1, "pipes": 1}


def test_a_directory_that_nobody_may_enter_can_still_be_removed_by_its_owner(tmp_path: Path) -> None:
    apply(tmp_path / "r", [directory("d", mode=0), E("d/x", b"1", mode=0)])
    assert stat.S_IMODE((tmp_path / "r" / "d").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "r" / "d" / "x").stat().st_mode) == 0o400


def hostile(outside: Path) -> dict[str, tuple[list[E], str]]:
    """Archives that try to write to `outside`, or to read from it (K01, M10)."""
    out, victim = str(outside), str(outside / "victim")
    up = os.path.relpath(victim, "/")
    return {
        "dot dot": ([E("../outside/victim", b"!")], "leads out"),
        "dot dot inside": ([directory("a"), E("a/../../outside/victim", b"!")], "leads out"),
        "absolute": ([E(victim, b"!")], "is absolute"),
        "through a link": ([symlink("l", out), E("l/victim", b"!")], "goes through a link"),
        "through a relative link": ([symlink("l", "../outside"), E("l/victim", b"!")], "goes through a link"),
        "through two links": ([symlink("m", "l"), symlink("l", out), E("m/victim", b"!")], "goes through a link"),
        "hard link to outside": ([hardlink("h", f"../../{up}"), E("h", b"!")], "leads out|no file of the archive"),
        "hard link through a link": ([symlink("l", out), hardlink("h", "l/victim")], "no file of the archive"),
        "absolute hard link": ([hardlink("h", victim)], "no file of the archive"),
        "whiteout of dot dot": ([E(".wh...", b"")], "a whiteout of"),
        "whiteout of itself": ([E("d/.wh.", b"")], "a whiteout of"),
        "whiteout through a link": ([symlink("l", out), E("l/.wh.victim"), E("l/x")], "goes through a link"),
        "directory through a link": ([symlink("l", out), directory("l/made")], "goes through a link"),
        "link through a link": ([symlink("l", out), symlink("l/made", "x")], "goes through a link"),
        "below a file": ([E("f", b"x"), E("f/victim", b"!")], "goes through a file"),
        "the root as a link": ([symlink(".", out)], "the root itself"),
        "link to its own parent": ([E("a/b", b"x"), hardlink("a", "a/b")], "below itself"),
    }


@pytest.mark.parametrize("case", hostile(Path("/x")))
def test_a_hostile_archive_is_refused_and_nothing_outside_changes(case: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("as it was")
    entries, why = hostile(outside)[case]
    with pytest.raises(TarError, match=why):
        apply(tmp_path / "r", entries)
    assert seen(outside) == {"victim": "as it was"}
    assert (outside / "victim").stat().st_nlink == 1


def test_too_many_entries_or_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TarError, match="more than 3"):
        apply(tmp_path / "r", [E(f"d/{i}") for i in range(5)], caps=ArchiveCaps(entries=3))
    with pytest.raises(TarError, match="larger than 10"):
        apply(tmp_path / "s", [E("a", b"x" * 11)], caps=ArchiveCaps(size=10))


def test_names_and_links_of_all_layers_together_are_capped(tmp_path: Path) -> None:
    """400 000 long names, in an archive of 24 MB, took 4 GB of memory."""
    layers = [[E("a" * 40)], [symlink("b" * 20, "c" * 20)]]
    apply(tmp_path / "few", *layers, caps=ArchiveCaps(text=80))
    with pytest.raises(TarError, match="longer than 79 characters together"):
        apply(tmp_path / "many", *layers, caps=ArchiveCaps(text=79))


def test_the_digest_names_content_mode_time_and_kind(tmp_path: Path) -> None:
    whole = [directory("d"), E("d/f", b"1"), symlink("l", "d")]
    one = apply(tmp_path / "a", whole).digest()
    changes = [
        [directory("d"), E("d/f", b"2"), symlink("l", "d")],
        [directory("d"), E("d/f", b"1", mode=0o600), symlink("l", "d")],
        [directory("d"), E("d/f", b"1", mtime=5), symlink("l", "d")],
        [directory("d"), E("d/f", b"1"), symlink("l", "e")],
        [directory("d", mode=0o700), E("d/f", b"1"), symlink("l", "d")],
    ]
    others = {apply(tmp_path / f"b{i}", change).digest() for i, change in enumerate(changes)}
    assert len(others | {one}) == 6
    assert apply(tmp_path / "again", list(reversed(whole))).digest() == one
    assert tree_digest(scan(str(tmp_path / "a"))) == one


# ── any archive at all ───────────────────────────────────────────────────────────────────────────

PARTS = st.sampled_from(["a", "b", "l", ".", "..", "", ".wh.a", ".wh..wh..opq", ".wh..", ".wh.", "é", "x" * 300])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
TARGETS = st.sampled_from(["/", "..", "../outside", "../../outside/victim", "a", "b/a", "OUTSIDE", "OUTSIDE/victim"])
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]),
        NAMES,
        TARGETS,
    ),
    max_size=8,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ENTRIES, min_size=1, max_size=3))
def test_no_layers_reach_out_of_the_tree(tmp_path: Path, layers: list[list[tuple[bytes, str, str]]]) -> None:
    base = tmp_path / os.urandom(6).hex()
    outside = base / "outside"
    outside.mkdir(parents=True)
    (outside / "victim").write_text("as it was")
    made = [
        [
            E(name, b"!" if kind == tarfile.REGTYPE else b"", kind=kind, link=target.replace("OUTSIDE", str(outside)))
            for kind, name, target in layer
            if name
        ]
        for layer in layers
    ]
    root = base / "r"
    root.mkdir()
    with ImageTree(str(root)) as tree:
        try:
            for layer in made:
                tree.apply_tar(TarStream(io.BytesIO(tar(layer)).read), whiteouts=True)
            tree.finish()
        except TarError:
            pass  # refused: there is nothing to compare
        else:
            assert tree_digest(scan(str(root))) == tree.digest()
    assert seen(outside) == {"victim": "as it was"}
    assert (outside / "victim").stat().st_nlink == 1
    assert sorted(path.name for path in base.iterdir()) == ["outside", "r"]
