"""Streams from a hostile worker: a stream that no honest worker sends is refused, and no part of it is kept."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import SnapshotError
from ringfence.guest.files import snapshot_scan
from ringfence.shared.stamps import AGAIN, DATA, DONE, END, ENTRY, GONE, RECORD, StampsMessage
from ringfence.snapshots.content import ContentStore, Holder, Writer
from ringfence.snapshots.manifest import Manifest, ManifestCaps, ManifestEntry, hasher
from ringfence.snapshots.take import Lineage, Look, Taking, orders

STAMP = "5a" * 16
CAPS = ManifestCaps(1 << 20, 10)


def digest(data: bytes) -> str:
    whole = hasher()
    whole.update(data)
    return whole.hexdigest()


def record(kind: bytes, payload: bytes = b"") -> bytes:
    return RECORD.pack(kind, len(payload)) + payload


def told(path: str, kind: str = "f", size: int = 0, text: str = "", stamp: object = STAMP) -> bytes:
    return record(ENTRY, json.dumps({"row": [path, kind, 0o644, 0, size, text], "stamp": stamp}).encode())


def gone(*names: object) -> bytes:
    return record(GONE, json.dumps({"names": names}).encode())


def ended(**said: object) -> bytes:
    return record(DONE, json.dumps(said or {"top": STAMP}).encode())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ContentStore]:
    made = ContentStore(str(tmp_path))
    yield made
    assert list(tmp_path.iterdir()) == [], "content has no name on the host"
    if made._fd >= 0:
        os.close(made._fd)  # some tests hold content until the end


def taking(store: ContentStore, lineage: Lineage | None = None, *, contents: bool = True) -> Taking:
    return Taking(store, CAPS, lineage or Lineage(Holder(store)), contents=contents)


def lineage(store: ContentStore, data: bytes = b"old") -> Lineage:
    writer = Writer(store, len(data))
    writer.write(data)
    holder = Holder(store)
    made = ManifestEntry("f", "f", 0o644, 0, len(data), holder.commit(writer))
    found = Lineage(holder)
    look = Look(found.manifest, {"f": made}, set(), CAPS)
    look.stamps, look.top = {"f": bytes.fromhex(STAMP)}, bytes.fromhex(STAMP)
    found.follow(look)
    return found


def test_an_honest_stream_becomes_a_tree_with_its_content(store: ContentStore) -> None:
    one = taking(store)
    one.feed(told("d", "d") + told("d/f", size=5) + record(DATA, b"he"))
    one.feed(record(DATA, b"llo") + record(END) + told("d/l", "l", text="../..") + ended())
    look = one.finish()
    assert look.manifest.entries == (
        ManifestEntry("d", "d", 0o644, 0, 0, ""),
        ManifestEntry("d/f", "f", 0o644, 0, 5, digest(b"hello")),
        ManifestEntry("d/l", "l", 0o644, 0, 0, "../.."),
    )
    assert b"".join(store.read(digest(b"hello"), 5)) == b"hello"
    assert look.top == bytes.fromhex(STAMP)
    one.close()
    assert not store.has(digest(b"hello"))


def test_any_cut_of_the_stream_into_pieces_gives_the_same(store: ContentStore) -> None:
    whole = told("f", size=3) + record(DATA, b"abc") + record(END) + ended()
    for cut in range(len(whole)):
        one = taking(store)
        one.feed(whole[:cut])
        one.feed(whole[cut:])
        assert one.finish().manifest.digests == {digest(b"abc"): 3}


def test_a_file_that_changed_while_it_was_read_is_told_again(store: ContentStore) -> None:
    one = taking(store)
    one.feed(told("f", size=4) + record(DATA, b"ab") + record(AGAIN))
    one.feed(told("f", size=2) + record(DATA, b"cd") + record(END) + ended())
    assert one.finish().manifest.digests == {digest(b"cd"): 2}


@pytest.mark.parametrize(
    "stream",
    [
        record(b"X"),
        record(DATA, b"x"),
        record(END),
        RECORD.pack(DATA, 1 << 31),
        RECORD.pack(ENTRY, 1 << 30),
        record(ENTRY, b"not json"),
        record(ENTRY, b"[]"),
        record(ENTRY, b'{"row": [], "stamp": "s"}'),
        told("f", stamp=5),
        told("f", stamp="x" * 32),
        told("f", stamp="5a" * 15),
        told("f", stamp="5a" * 1000),
        record(DONE),
        ended(top="x"),
        ended(problem="none that we know"),
        told("../f", size=1),
        told("/etc/passwd", "l", text="x"),
        told("dev", "c"),
        told("f", size=1) + record(DATA, b"xx"),
        told("f", size=3) + record(DATA, b"x") + record(END),
        told("f", size=1) + told("g"),
        told("f", size=1) + ended(),
        told("f", size=(1 << 20) + 1),
        told("f") + record(END) + told("f") + record(END),
        told("f", text="ab" * 32),
        gone("f"),
        gone(5),
        ended() + ended(),
        b"".join(told(f"d{n}", "d") for n in range(25)),
    ],
)
def test_a_stream_that_no_honest_worker_sends_is_refused(store: ContentStore, stream: bytes) -> None:
    one = taking(store)
    with pytest.raises(SnapshotError):
        one.feed(stream)
    one.close()


def test_content_that_was_not_asked_for_is_refused_before_a_byte_is_kept(tmp_path: Path) -> None:
    one = taking(ContentStore(f"{tmp_path}/none"), contents=False)
    with pytest.raises(SnapshotError, match="not asked for"):
        one.feed(told("f", size=1))
    one.close()


@pytest.mark.parametrize("stream", [b"", told("d", "d"), told("d", "d") + ended()[:-1], told("a/b", "d") + ended()])
def test_a_stream_without_an_end_or_a_tree_is_refused(store: ContentStore, stream: bytes) -> None:
    one = taking(store)
    one.feed(stream)
    with pytest.raises(SnapshotError):
        one.finish()
    one.close()


def test_a_sandbox_cannot_name_content_that_it_never_had(store: ContentStore) -> None:
    """Else a guest that knows the digest of another sandbox's file would get the file out of its own snapshot."""
    theirs = lineage(store, b"secret of another sandbox")
    one = taking(store)
    with pytest.raises(SnapshotError, match="never had"):
        one.feed(told("mine", size=25, text=digest(b"secret of another sandbox")))
    one.close()
    theirs.close()


def test_a_digest_of_its_own_is_taken_but_with_its_size_only(store: ContentStore) -> None:
    line = lineage(store)
    one = taking(store, line)
    one.feed(told("g", size=3, text=digest(b"old")) + gone("f") + ended())
    look = one.finish()
    assert [made.path for made in look.manifest.entries] == ["g"]
    one.follow(look)
    other = taking(store, line)
    with pytest.raises(SnapshotError, match="another size"):
        other.feed(told("g", size=4, text=digest(b"old")))


def test_names_that_are_long_together_are_refused(store: ContentStore) -> None:
    """Each may have 16 KiB, and all of them are held: 10,000 would be hundreds of MiB."""
    long = "/".join(["d" * 200] * 80)
    one = Taking(store, ManifestCaps(1 << 20, 1000), Lineage(Holder(store)), contents=True)
    stream = b"".join(told(f"{number:03}{long}", "d") for number in range(100))
    with pytest.raises(SnapshotError, match="names and links have more than 1,304,576 characters"):
        one.feed(stream)
    one.close()


def test_what_is_not_told_is_as_it_was(store: ContentStore) -> None:
    line = lineage(store)
    one = taking(store, line)
    known = StampsMessage(one.known(stayed=False)[4:])
    assert {path: group.of_all() for path, group in known.memory.groups.items()} == {"": {"f": bytes.fromhex(STAMP)}}
    one.feed(told("new", "d") + ended())
    assert [made.path for made in one.finish().manifest.entries] == ["f", "new"]


def test_a_name_is_not_there_and_gone(store: ContentStore) -> None:
    one = taking(store, lineage(store))
    one.feed(told("f", "d") + gone("f") + ended())
    with pytest.raises(SnapshotError, match="there and gone"):
        one.finish()


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_wait_for_more(data: bytes) -> None:
    one = taking(ContentStore("/nonexistent"), contents=False)
    try:
        one.feed(data)
        one.finish()
    except SnapshotError:
        return
    assert RECORD.pack(DONE, 0)[:1] in data


# ── the way back ─────────────────────────────────────────────────────────────────────────────────


def steps(now: list[ManifestEntry], wanted: list[ManifestEntry]) -> list[tuple[str, str]]:
    """Return the ordered steps, without content."""
    store = ContentStore()
    line = lineage(store, b"")
    data = b"".join(orders(Manifest(now), Manifest(wanted), store))
    line.close()
    found, at = [], 0
    while at < len(data):
        kind, size = RECORD.unpack_from(data, at)
        at += RECORD.size
        if kind == b"O":
            order = json.loads(data[at : at + size])
            found.append((order["do"], order["path"]))
        at += size
    return found


def f(path: str, mode: int = 0o644) -> ManifestEntry:
    return ManifestEntry(path, "f", mode, 0, 0, digest(b""))


def d(path: str, mode: int = 0o755) -> ManifestEntry:
    return ManifestEntry(path, "d", mode, 0, 0, "")


def test_what_is_the_same_is_not_touched() -> None:
    tree = [d("d"), f("d/a"), ManifestEntry("l", "l", 0o777, 0, 0, "d"), ManifestEntry("h", "h", 0o644, 0, 0, "d/a")]
    assert steps(tree, tree) == []


def test_only_rights_are_set_when_only_they_differ() -> None:
    assert steps([d("d"), f("d/a", 0o600)], [d("d"), f("d/a")]) == [("facts", "d/a")]


def test_a_directory_goes_at_once_with_all_that_is_in_it() -> None:
    assert steps([d("d"), f("d/a"), d("d/e"), f("e")], [f("e")]) == [("remove", "d")]


def test_a_shut_directory_is_opened_first_and_shut_last() -> None:
    now, wanted = [d("s", 0), d("s/t", 0), f("s/t/a")], [d("s", 0), d("s/t", 0)]
    assert steps(now, wanted) == [("open", "s"), ("open", "s/t"), ("remove", "s/t/a"), ("facts", "s/t"), ("facts", "s")]


def test_every_name_of_a_file_is_made_again_with_it() -> None:
    other = ManifestEntry("a", "f", 0o644, 0, 1, digest(b"x"))
    link = ManifestEntry("0", "h", 0o644, 0, 0, "a")
    made = [step for step in steps([other, link], [f("a"), link]) if step[0] != "facts"]
    assert made == [("remove", "0"), ("remove", "a"), ("file", "a"), ("link", "0")]


def test_a_file_that_is_replaced_while_it_is_read_is_one_state_and_a_written_one_is_not(tmp_path: Path) -> None:
    """C07. The kernel sets the change time in both cases."""
    path = tmp_path / "whole"
    path.write_bytes(b"old")
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        time.sleep(0.02)  # some ticks: the next change has another time
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").replace(path)
        assert os.fstat(file.fileno()).st_ctime_ns != before.st_ctime_ns
        assert snapshot_scan._is_same(before, os.fstat(file.fileno()))
    with path.open("r+b") as file:
        before = os.fstat(file.fileno())
        time.sleep(0.02)
        file.write(b"neu")
        file.flush()
        assert not snapshot_scan._is_same(before, os.fstat(file.fileno()))
        path.unlink()
        assert not snapshot_scan._is_same(before, os.fstat(file.fileno()))
