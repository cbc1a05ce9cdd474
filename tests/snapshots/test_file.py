"""A snapshot in a file: loaded whole or refused, whichever byte was changed; nothing half-made on either side."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import Policy, Snapshot, SnapshotError
from ringfence.policy.host_paths import LinkError
from ringfence.snapshots import model
from ringfence.snapshots.content import ContentStore, Holder, Writer, own_store
from ringfence.snapshots.manifest import Manifest, ManifestEntry, hasher
from ringfence.snapshots.model import make


def snapshot(store: ContentStore | None = None, **files: bytes) -> Snapshot:
    holder = Holder(store or own_store())
    entries = [ManifestEntry("d", "d", 0o755, 7, 0, ""), ManifestEntry("l", "l", 0o777, 0, 0, "../x")]
    for name, data in files.items():
        writer = Writer(holder.store, len(data))
        writer.write(data)
        entries.append(ManifestEntry(f"d/{name}", "f", 0o644, -5, len(data), holder.commit(writer)))
    return make(Manifest(entries), holder, "bound to this", Policy())


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    made = snapshot(a=b"one\n" * 30, b=b"two", c=b"")
    path = tmp_path / "snap"
    made.export(path)
    made.delete()
    return path


def test_what_was_exported_is_loaded_as_it_was(tmp_path: Path) -> None:
    made = snapshot(a=os.urandom(700_000), b=b"two", c=b"")
    made.export(tmp_path / "snap")
    loaded = Snapshot.load(tmp_path / "snap")
    assert (loaded, loaded.diff(made)) == (made, ())
    assert os.stat(tmp_path / "snap").st_mode & 0o777 == 0o600
    for one in (made, loaded):
        one.delete()


def test_a_kill_in_the_middle_of_an_export_leaves_nothing_beside_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager exports after each call: what stayed of those that were killed would fill the disk."""
    made = snapshot(a=os.urandom(2_000_000))
    (tmp_path / "snap").write_text("old")
    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        made.export(tmp_path / "snap")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (os.listdir(tmp_path), (tmp_path / "snap").read_text()) == (["snap"], "old")
    made.delete()


@pytest.mark.parametrize("name", ["link", "way/snap", "way/new"])
def test_no_link_that_a_guest_could_have_made_is_followed_by_either_side(tmp_path: Path, name: str) -> None:
    """L15: a guest exchanged the folder, or left a link where the last export was."""
    made = snapshot(a=b"1")
    (tmp_path / "outside").mkdir()
    made.export(tmp_path / "outside/snap")
    before = (tmp_path / "outside/snap").stat()
    (tmp_path / "way").symlink_to("outside")
    (tmp_path / "link").symlink_to("outside/snap")
    for call in (made.export, Snapshot.load):
        with pytest.raises(LinkError) as caught:
            call(tmp_path / name)
        assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == ["link", "outside", "way"]
    assert (os.listdir(tmp_path / "outside"), (tmp_path / "outside/snap").stat()) == (["snap"], before)
    made.delete()


@pytest.mark.parametrize("name", ["x" * 255, "\U0001f600" * 60], ids=["bytes", "characters"])
def test_a_target_may_have_any_name_that_a_file_has(tmp_path: Path, name: str) -> None:
    made = snapshot(a=b"1")
    made.export(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    made.delete()


def test_a_disk_that_is_full_gets_back_what_a_load_wrote_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = snapshot(a=os.urandom(2_000_000))
    made.export(tmp_path / "snap")
    made.delete()
    store, sizes = ContentStore(str(tmp_path)), []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if offset > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, data[:100_000], offset)
        sizes.append(os.fstat(fd).st_blocks)
        return min(len(data), 100_000)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        model.read_file(str(tmp_path / "snap"), store)
    assert sizes[-1] > 0
    assert (store._fd, store._writing) == (-1, 0), "the file and all of its room are gone"


def test_a_file_that_differs_in_any_byte_is_refused(whole: Path) -> None:
    data = whole.read_bytes()
    for at in range(len(data)):
        whole.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(SnapshotError):
            Snapshot.load(whole)
    assert own_store()._fd == -1, "nothing of it was kept"


def test_a_file_cut_short_or_made_longer_is_refused(whole: Path) -> None:
    data = whole.read_bytes()
    for size in range(0, len(data), 3):
        whole.write_bytes(data[:size])
        with pytest.raises(SnapshotError):
            Snapshot.load(whole)
    whole.write_bytes(data + b"x")
    with pytest.raises(SnapshotError):
        Snapshot.load(whole)


@given(at=st.integers(0, 10_000), new=st.binary(min_size=1, max_size=12))
def test_a_file_altered_by_somebody_who_makes_its_digest_right_again_is_still_checked(at: int, new: bytes) -> None:
    """The digest has no key: an attacker can alter the file and write a new digest. Every part is still checked."""
    import tempfile

    from ringfence.snapshots.manifest import hasher

    made = snapshot(a=b"one\n" * 30, b=b"two")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snap")
        made.export(path)
        body = bytearray(path.read_bytes()[:-32])
        at %= len(body)
        body[at : at + len(new)] = new
        trailer = hasher()
        trailer.update(body)
        path.write_bytes(bytes(body) + trailer.digest())
        try:
            loaded = Snapshot.load(path)
        except SnapshotError:
            return
        finally:
            made.delete()
        assert loaded.digest == made.digest, "only what its digest leaves out may differ: id and time"
        loaded.delete()


def test_no_file_a_directory_and_a_pipe_are_told_apart_and_block_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "none")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises((SnapshotError, IsADirectoryError)):
            Snapshot.load(path)


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    store = own_store()
    made = snapshot(store, a=b"one")
    (tmp_path / "snap").write_text("before")
    os.pwrite(store._fd, b"X", store._pieces[next(iter(made._tree().manifest.digests))][0])
    with pytest.raises(SnapshotError, match="changed on the host's disk"):
        made.export(tmp_path / "snap")
    assert ((tmp_path / "snap").read_text(), len(list(tmp_path.iterdir()))) == ("before", 1)
    made.delete()


def test_a_deleted_snapshot_says_so(tmp_path: Path) -> None:
    made = snapshot(a=b"one")
    made.delete()
    made.delete()
    with pytest.raises(SnapshotError, match="deleted"):
        made.export(tmp_path / "snap")
    with pytest.raises(SnapshotError, match="deleted"):
        made.diff(made)


def test_content_that_two_snapshots_share_stays_with_the_other(tmp_path: Path) -> None:
    store = ContentStore(str(tmp_path))
    one, other = snapshot(store, a=b"shared", b=b"mine"), snapshot(store, a=b"shared")
    one.delete()
    assert other.diff(other) == ()
    assert len(store._pieces) == 1
    other.delete()
    assert (store._pieces, store._fd) == ({}, -1)


def test_a_store_whose_descriptor_the_caller_closed_never_writes_to_another_file(tmp_path: Path) -> None:
    store = ContentStore(str(tmp_path))
    made = snapshot(store, a=b"one")
    victim = os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT)
    os.dup2(victim, store._fd)
    try:
        with pytest.raises(SnapshotError):
            made.export(tmp_path / "snap")
        with pytest.raises(SnapshotError):
            snapshot(store, b=b"two")
        with pytest.raises(SnapshotError):
            made.delete()
        assert (tmp_path / "victim").read_bytes() == b""
    finally:
        os.close(store._fd)
        os.close(victim)


@pytest.mark.parametrize("field", ["bound", "policy_digest"])
def test_half_a_character_in_the_header_is_refused_in_our_words(whole: Path, field: str) -> None:
    data = whole.read_bytes()[: -len(hasher().digest())]
    start = len(model.MAGIC) + 8
    size = int.from_bytes(data[start - 8 : start], "big")
    header = json.dumps({**json.loads(data[start : start + size]), field: "\ud800"}).encode()
    altered = model.MAGIC + len(header).to_bytes(8, "big") + header + data[start + size :]
    digest = hasher()
    digest.update(altered)
    whole.write_bytes(altered + digest.digest())
    with pytest.raises(SnapshotError, match="its header has a text that is not Unicode"):
        Snapshot.load(whole)
