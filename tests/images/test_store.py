"""The store: one process at a time names things, a crash leaves what the next start removes, what is used stays."""

from __future__ import annotations

import fcntl
import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from images.packing import ROOT, E, docker, tar
from programs import read_program
from ringfence import images
from ringfence.errors import ImageError, PolicyError
from ringfence.images.store import ImageInfo, ImageStore, default_directory, lock

SOURCE = Path(__file__).resolve().parents[2] / "src"


def archive(folder: Path, *more: E, name: str = "a.tar") -> Path:
    path = folder / name
    path.write_bytes(tar([*ROOT, *more]))
    return path


def left(store: ImageStore) -> dict[str, int]:
    return {name: len(os.listdir(f"{store.directory}/{name}")) for name in ("names", "trees", "work")}


def test_the_store_is_in_the_users_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/x/y/")
    assert default_directory() == "/x/y/ringfence/images"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    expected = "/var/lib" if os.geteuid() == 0 else "/home/me/.local/share"
    assert default_directory() == f"{expected}/ringfence/images"


def test_listing_and_looking_up_make_nothing(store: ImageStore) -> None:
    assert images.list_images() == []
    with pytest.raises(ImageError, match="no image named 'x'"):
        images.inspect("x")
    assert not Path(store.directory).exists()


def test_an_unknown_name_is_answered_with_the_nearest(store: ImageStore, tmp_path: Path) -> None:
    images.import_image("analysis", archive(tmp_path))
    for name, fix in [
        ("analisys", "did you mean analysis?"),
        ("data", "build it: ringfence image build data --preset data"),
        ("zzz", "ringfence image list shows all; to add one: ringfence image import NAME SOURCE"),
    ]:
        with pytest.raises(ImageError) as caught:
            images.inspect(name)
        assert (str(caught.value), caught.value.fix) == (f"no image named {name!r}", fix)


def test_a_store_that_others_can_write_to_is_refused(store: ImageStore, tmp_path: Path) -> None:
    os.makedirs(store.directory)
    os.chmod(store.directory, 0o777)
    with pytest.raises(ImageError, match="only this user can write"):
        images.import_image("one", archive(tmp_path))


def test_removing_drops_files_that_no_other_image_has(store: ImageStore, tmp_path: Path) -> None:
    images.import_image("one", archive(tmp_path, E("only", b"1" * 5000)))
    images.import_image("two", archive(tmp_path, E("other", b"2")))
    images.remove("one")
    assert [info.name for info in images.list_images()] == ["two"]
    assert left(store) == {"names": 1, "trees": 1, "work": 0}
    with pytest.raises(ImageError, match="no image named 'one'"):
        images.remove("one")


def test_two_names_of_one_tree_share_it_until_the_last_is_removed(store: ImageStore, tmp_path: Path) -> None:
    path = archive(tmp_path)
    assert images.import_image("one", path).digest == images.import_image("two", path).digest
    images.remove("one")
    assert left(store) == {"names": 1, "trees": 1, "work": 0}
    images.verify("two")
    images.remove("two")
    assert left(store) == {"names": 0, "trees": 0, "work": 0}


def test_an_image_that_is_replaced_keeps_its_old_tree_until_gc(store: ImageStore, tmp_path: Path) -> None:
    old = images.import_image("one", archive(tmp_path)).digest
    new = images.import_image("one", archive(tmp_path, E("new", b"1"))).digest
    assert sorted(os.listdir(f"{store.directory}/trees")) == sorted([old, new])
    assert images.gc().trees == 1
    assert os.listdir(f"{store.directory}/trees") == [new]


def test_an_image_in_use_is_not_removed_and_its_tree_not_collected(store: ImageStore, tmp_path: Path) -> None:
    info = images.import_image("one", archive(tmp_path))
    with store.hold(info.digest):
        with pytest.raises(ImageError, match="in use by a sandbox") as caught:
            images.remove("one")
        assert caught.value.code == "image-in-use"
        images.import_image("one", archive(tmp_path, E("x", b"")))
        assert images.gc().trees == 0
        assert os.path.isdir(store.root(info.digest))
    assert images.gc().trees == 1


def test_a_damaged_image_that_is_imported_again_is_whole_again(store: ImageStore, tmp_path: Path) -> None:
    path = archive(tmp_path, E("bin/big", b"y" * 5000))
    info = images.import_image("one", path)
    Path(store.root(info.digest), "bin/big").write_bytes(b"n" * 5000)
    with store.hold(info.digest), pytest.raises(ImageError, match="damaged, and in use by a sandbox"):
        images.import_image("one", path)
    images.import_image("one", path)
    images.verify("one")
    assert left(store) == {"names": 1, "trees": 1, "work": 0}


def test_a_damaged_file_does_not_come_into_another_image(store: ImageStore, tmp_path: Path) -> None:
    big = E("bin/big", b"y" * 5000)
    path = Path(store.root(images.import_image("one", archive(tmp_path, big)).digest), "bin/big")
    before = path.stat()
    path.write_bytes(b"n" * 5000)
    os.utime(path, (before.st_mtime, before.st_mtime))
    images.import_image("two", archive(tmp_path, big, E("bin/more", b"z")))
    images.verify("two")
    with pytest.raises(ImageError, match="damaged"):
        images.verify("one")


@pytest.mark.parametrize("change", [lambda path: path.chmod(0o777), lambda path: os.utime(path, (1, 1))])
def test_a_file_with_another_mode_or_time_does_not_come_into_another_image(
    change: Callable[[Path], None], store: ImageStore, tmp_path: Path
) -> None:
    big = E("bin/big", b"y" * 5000)
    change(Path(store.root(images.import_image("one", archive(tmp_path, big)).digest), "bin/big"))
    images.import_image("two", archive(tmp_path, big, E("bin/more", b"z")))
    images.verify("two")


def test_a_list_of_files_that_lies_is_not_believed(store: ImageStore, tmp_path: Path) -> None:
    big = E("bin/big", b"y" * 5000)
    info = images.import_image("one", archive(tmp_path, big))
    listing = Path(store.directory, "trees", info.digest, "files")
    honest = listing.read_text()
    assert "bin/big" in honest
    secret = tmp_path / "secret"
    secret.write_bytes(b"n" * 5000)
    for name in ("bin/tool", "gone", "../../../../../secret", "bin", "/".join(["d" * 60] * 70)):
        listing.write_text(honest.replace("bin/big", name))
        images.import_image("two", archive(tmp_path, big, E("bin/more", name.encode())))
        images.verify("two")
        images.remove("two")  # else its list, which is honest, serves the next


def test_a_damaged_record_is_said_and_can_be_removed(store: ImageStore, tmp_path: Path) -> None:
    images.import_image("one", archive(tmp_path))
    Path(store.directory, "names", "one.json").write_text("{")
    assert images.list_images() == []
    with pytest.raises(ImageError, match="record of image one is damaged"):
        images.inspect("one")
    images.remove("one")
    assert store.names() == []


@pytest.mark.parametrize("field", ["digest", "name"])
def test_a_record_cannot_point_out_of_the_store(field: str, store: ImageStore, tmp_path: Path) -> None:
    info = images.import_image("one", archive(tmp_path))
    store.write("names/one.json", {"version": 1, **info.to_dict(), field: "../../../../etc"})
    with pytest.raises(ImageError, match="damaged"):
        images.inspect("one")
    for name in ("../names/one", "a/b", "."):
        with pytest.raises((PolicyError, ImageError)):
            images.inspect(name)


def test_many_imports_at_once_come_to_one_tree_for_the_same_content(store: ImageStore, tmp_path: Path) -> None:
    paths = [archive(tmp_path, E("x", bytes([i % 2]) * 3000), name=f"{i}.tar") for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: images.import_image(f"i{i}", paths[i]), range(8)))
    assert len({info.digest for info in found}) == 2
    assert left(store) == {"names": 8, "trees": 2, "work": 0}
    for info in found:
        images.verify(info.name)


_SLOW = read_program("images/store_slow.py")


def test_an_import_that_is_killed_leaves_only_what_the_next_one_removes(store: ImageStore, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    path = archive(tmp_path)
    running = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "wrote\n"
    assert left(store)["work"] == 2  # what is being made, and its lock
    assert store.sweep() == 0  # its maker lives
    running.kill()
    running.wait()
    running.stdout.close()
    assert left(store) == {"names": 0, "trees": 0, "work": 2}
    images.import_image("two", path)
    assert left(store) == {"names": 1, "trees": 1, "work": 0}


def test_a_tree_that_was_removed_and_stored_again_while_it_was_looked_for_is_held(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock that was waited for is then of the tree that is gone, and the new one would be removed in use."""
    source = archive(tmp_path)
    digest = images.import_image("a", source).digest
    flock = fcntl.flock
    others: list[Callable[[], object]] = [lambda: images.remove("a"), lambda: images.import_image("a", source)]

    def late(fd: int, how: int) -> None:
        while how == fcntl.LOCK_SH and others:
            others.pop(0)()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with store.hold(digest) as held:
        assert others == []
        with pytest.raises(ImageError, match="image a is in use by a sandbox"):
            images.remove("a")
        assert os.path.isdir(held.root)
    images.remove("a")


def test_a_record_whose_writer_was_killed_is_removed_by_the_next_start(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = images.import_image("a", archive(tmp_path))

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        with pytest.raises(Killed):
            store.name(info)
        with pytest.raises(Killed):
            store.set_step("k", info.digest)
    assert (left(store)["work"], store.sweep(), left(store)["work"]) == (2, 2, 0)
    assert store.find("a") == info


def test_a_lock_is_on_the_file_that_has_the_name(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    first = lock(path, fcntl.LOCK_EX)
    assert first is not None
    assert lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB) is None
    os.unlink(path)
    second = lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert second is not None
    os.close(first)
    os.close(second)


_ON_A_SMALL_DISK = read_program("images/store_on_a_small_disk.sh")


def _on_a_disk(script: str, folder: Path, archived: Path) -> tuple[str, str]:
    """Run `script` in a new mount namespace, with a folder to mount a disk on, and return its output."""
    disk = folder / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(disk), sys.executable, str(archived)],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    return done.stdout, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_in_the_middle_of_an_import_is_said_and_nothing_stays(tmp_path: Path) -> None:
    path = archive(tmp_path, *(E(f"f{i}", os.urandom(100_000)) for i in range(30)))
    assert _on_a_disk(_ON_A_SMALL_DISK, tmp_path, path) == ("disk-full True True\n[] []\n", "")


def test_a_bomb_is_refused_before_it_fills_the_disk(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.images.make.free_space", lambda _: (256 << 20) + 100_000)
    with pytest.raises(ImageError, match="no space left") as caught:
        images.import_image("one", archive(tmp_path, E("zeros", bytes(200_000))))
    assert caught.value.code == "disk-full"
    assert left(store) == {"names": 0, "trees": 0, "work": 0}


_ON_A_LARGER_DISK = read_program("images/store_on_a_larger_disk.sh")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("bomb", ["many files of one byte", "layers that are unpacked twice"])
def test_an_archive_leaves_some_of_the_disk_free_however_it_fills_it(tmp_path: Path, bomb: str) -> None:
    """Bytes alone are no measure: a file takes a block, and a packed archive of layers is unpacked beside the tree."""
    path = tmp_path / "bomb.tar.gz"
    if bomb == "many files of one byte":
        data = tar([*ROOT, *(E(f"bin/{number}", b"x") for number in range(20_000))])
    else:
        data = docker([tar([*ROOT, E("bin/zeros", bytes(25 << 20))])])
    path.write_bytes(gzip.compress(data, 1))
    assert _on_a_disk(_ON_A_LARGER_DISK, tmp_path, path) == ("disk-full True\n", "")


def test_info_goes_to_json_and_back(store: ImageStore, tmp_path: Path) -> None:
    info = images.import_image("one", archive(tmp_path))
    assert ImageInfo(**info.to_dict()) == info == images.inspect("one")  # type: ignore[arg-type]  # its own fields
