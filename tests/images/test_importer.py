"""Imports: every kind of source comes to the same tree, and a bad one leaves nothing."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import shutil
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest

import engines
from images.packing import ROOT, E, as_json, config, device, directory, docker, hardlink, oci, sha, symlink, tar
from ringfence import images
from ringfence.errors import ImageError, PolicyError
from ringfence.host import programs
from ringfence.images import make
from ringfence.images.store import ImageStore
from ringfence.images.tar_reader import ArchiveCaps
from ringfence.policy.host_paths import LinkError

OUTFIT = {"dev", "proc", "sys", "tmp", "workspace", "run", "var", "home", "root", "mnt", "opt", "srv", "usr"}


def write(folder: Path, data: bytes, name: str = "archive.tar") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def contents(store: ImageStore, name: str) -> dict[str, str]:
    """Return the files of an image, without the files that every image gets."""
    root = Path(store.root(images.inspect(name).digest))
    found = {}
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if inside.parts[0] in OUTFIT or (inside.parts[0] == "etc" and inside.name != "extra"):
            continue
        found[str(inside)] = (
            f"-> {os.readlink(path)}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
        )
    return found


def nothing_kept(store: ImageStore) -> bool:
    """Assert that the store has no image, no tree and no half-made files."""
    places = [Path(store.directory, name) for name in ("names", "trees", "steps", "work")]
    left = [child for place in places if place.is_dir() for child in place.iterdir()]
    return left == [] and [path for path in Path(store.directory, "objects").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_tar_is_imported_however_it_is_compressed(pack: object, store: ImageStore, tmp_path: Path) -> None:
    path = write(tmp_path, pack(tar(ROOT)))  # type: ignore[operator]  # a function
    info = images.import_image("one", path)
    assert (info.source, info.python, info.env) == ("tar", None, {})
    assert contents(store, "one") == {"bin": "/", "bin/tool": "#!/bin/sh\n"}


@pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is missing")
def test_a_tar_in_zstd_is_imported(store: ImageStore, tmp_path: Path) -> None:
    packed = subprocess.run(["zstd", "-qc"], input=tar(ROOT), capture_output=True, check=True).stdout
    images.import_image("one", write(tmp_path, packed))
    assert contents(store, "one") == {"bin": "/", "bin/tool": "#!/bin/sh\n"}


def test_a_folder_and_its_tar_are_the_same_image_and_stored_once(store: ImageStore, tmp_path: Path) -> None:
    folder = tmp_path / "root"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tool").write_text("x" * 5000)
    (folder / "bin" / "same").hardlink_to(folder / "bin" / "tool")
    (folder / "bin" / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "bin" / "pipe")
    subprocess.run(["tar", "-C", str(folder), "-cf", str(tmp_path / "a.tar"), "."], check=True)
    one, two = images.import_image("one", folder), images.import_image("two", tmp_path / "a.tar")
    assert one.digest == two.digest
    assert len(list(Path(store.directory, "trees").iterdir())) == 1
    tool = Path(store.root(one.digest), "bin/tool").stat()
    assert tool.st_ino == Path(store.root(one.digest), "bin/same").stat().st_ino
    assert contents(store, "one")["bin/link"] == "-> /etc/passwd"


def test_nothing_is_imported_or_exported_through_a_link_that_a_guest_could_have_made(
    store: ImageStore, tmp_path: Path
) -> None:
    """L15, L16: a guest of the image would see what the link leads to."""
    folder = tmp_path / "root"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tool").write_text("x")
    images.import_image("one", folder)
    (tmp_path / "real.tar").write_bytes(tar(ROOT))
    (tmp_path / "way").symlink_to(".")
    (tmp_path / "link").symlink_to("root")
    (tmp_path / "link.tar").symlink_to("real.tar")
    for name in ("link", "link.tar", "way/root", "way/real.tar"):
        with pytest.raises(LinkError, match="is a link to"):
            images.import_image("two", tmp_path / name)
    for name in ("link.tar", "way/new.tar"):
        with pytest.raises(LinkError, match="is a link to"):
            images.export("one", tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["data", "link", "link.tar", "real.tar", "root", "way"]
    assert (tmp_path / "real.tar").read_bytes() == tar(ROOT)


def test_a_file_in_two_images_is_stored_once(store: ImageStore, tmp_path: Path) -> None:
    big = E("bin/big", b"y" * 100_000)
    one = images.import_image("one", write(tmp_path, tar([*ROOT, big])))
    two = images.import_image("two", write(tmp_path, tar([*ROOT, big, E("bin/more", b"z")])))
    inodes = {Path(store.root(info.digest), "bin/big").stat().st_ino for info in (one, two)}
    assert one.digest != two.digest
    assert len(inodes) == 1


LOWER = tar([*ROOT, E("etc/extra", b"old"), E("gone", b"1"), directory("opaque"), E("opaque/below", b"1")])
UPPER = tar(
    [
        E("etc/extra", b"new"),
        E(".wh.gone"),
        directory("opaque"),
        E("opaque/.wh..wh..opq"),
        E("opaque/above", b"2"),
        hardlink("bin/again", "bin/tool"),
    ]
)
TOGETHER = {
    "bin": "/",
    "bin/tool": "#!/bin/sh\n",
    "bin/again": "#!/bin/sh\n",
    "etc/extra": "new",
    "opaque": "/",
    "opaque/above": "2",
}
INNER = {
    "Env": ["PATH=/bin", "LANG=C", "HOME=/root", "http_proxy=http://x", "A\0B=x", "no equals"],
    "Entrypoint": ["/bin/tool"],
    "WorkingDir": "/proc/self/fd/7",
    "User": "0:0",
    "OnBuild": ["RUN evil"],
}


@pytest.mark.parametrize("kind", ["docker", "docker packed", "docker in gzip", "oci"])
def test_layers_of_an_archive_are_applied_in_order_and_its_configuration_is_data(
    kind: str, store: ImageStore, tmp_path: Path
) -> None:
    described = config([LOWER, UPPER], **INNER)
    made = {
        "docker": lambda: docker([LOWER, UPPER], described),
        "docker packed": lambda: docker([LOWER, UPPER], described, packed=True),
        "docker in gzip": lambda: gzip.compress(docker([LOWER, UPPER], described)),
        "oci": lambda: oci([LOWER, UPPER], described),
    }[kind]()
    info = images.import_image("one", write(tmp_path, made))
    assert contents(store, "one") == TOGETHER
    assert info.env == {"PATH": "/bin", "LANG": "C"}
    assert info.config == {"entrypoint": ["/bin/tool"], "workdir": "/proc/self/fd/7", "user": "0:0"}
    assert info.source == ("oci-archive" if kind == "oci" else "docker-archive")
    assert "OnBuild of the image is not used" in info.notes


def test_layers_that_are_links_to_others_as_old_archives_have_them(store: ImageStore, tmp_path: Path) -> None:
    layer = tar(ROOT)
    text = json.dumps(config([layer])).encode()
    folder = sha(b"layer")
    manifest = [{"Config": f"{sha(text)}.json", "Layers": [f"{folder}/layer.tar"]}]
    parts = [E(f"{sha(layer)}.tar", layer), directory(folder), symlink(f"{folder}/layer.tar", f"../{sha(layer)}.tar")]
    parts += [E(f"{sha(text)}.json", text), as_json("manifest.json", manifest)]
    images.import_image("one", write(tmp_path, tar(parts)))
    assert contents(store, "one") == {"bin": "/", "bin/tool": "#!/bin/sh\n"}


def test_every_image_has_the_user_and_files_of_ours(store: ImageStore, tmp_path: Path) -> None:
    passwd = b"root:x:0:0::/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/sh\nuser:x:1234:1::/:/bin/false"
    extra = [
        E("etc/passwd", passwd),
        E("etc/resolv.conf", b"nameserver 10.0.0.1\n"),
        E("dev/sda", b"x"),
        device("dev/x"),
        E("workspace/app.py", b"print(1)"),
    ]
    info = images.import_image("one", write(tmp_path, tar([*ROOT, *extra])))
    root = Path(store.root(info.digest))
    assert (root / "etc/passwd").read_text().splitlines() == [
        "user:x:1000:1000:user:/workspace:/bin/sh",
        "root:x:0:0::/root:/bin/bash",
        "node:x:1000:1000::/home/node:/bin/sh",
    ]
    assert (root / "etc/resolv.conf").read_text().startswith("nameserver 127.0.0.1\n")
    assert [*(root / "dev").iterdir(), *(root / "workspace").iterdir()] == []
    own = "1 entries left out, a sandbox has its own"
    assert info.notes == ("1 device nodes left out", f"/dev: {own}", f"/workspace: {own}")


def test_an_etc_passwd_that_is_a_link_to_a_host_file_is_not_followed(store: ImageStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("secret of the host")
    info = images.import_image("one", write(tmp_path, tar([*ROOT, symlink("etc/passwd", str(victim))])))
    text = Path(store.root(info.digest), "etc/passwd").read_text()
    assert text.startswith("user:x:1000:1000:")
    assert "secret" not in text
    assert victim.read_text() == "secret of the host"


def python_at(*entries: E) -> list[E]:
    return [*ROOT, *entries]


@pytest.mark.parametrize(
    ("entries", "env", "expected"),
    [
        ([E("usr/bin/python3.11", b"x", mode=0o755), symlink("usr/bin/python3", "python3.11")], [], "/usr/bin/python3"),
        ([E("opt/py/python3", b"x", mode=0o755)], ["PATH=/opt/py:/bin"], "/opt/py/python3"),
        ([symlink("usr/bin/python3", "/etc/alternatives/p"), symlink("etc/alternatives/p", "/x")], [], None),
        ([symlink("usr/bin/python3", "python3")], [], None),
        ([E("usr/bin/python3", b"x", mode=0o644)], [], None),
    ],
)
def test_the_images_python_is_found_inside_its_root(
    entries: list[E], env: list[str], expected: str | None, store: ImageStore, tmp_path: Path
) -> None:
    layer = tar(python_at(*entries))
    info = images.import_image("one", write(tmp_path, docker([layer], config([layer], Env=env))))
    assert info.python == expected


def hungry_xz(data: bytes) -> bytes:
    """Return a valid xz stream whose header asks for a window of 4 GiB."""
    packed = bytearray(lzma.compress(data))
    size = (packed[12] + 1) * 4
    assert packed[14:16] == b"\x21\x01"  # LZMA2, with one byte of properties: the size of the window
    packed[16] = 40
    packed[12 + size - 4 : 12 + size] = zlib.crc32(packed[12 : 12 + size - 4]).to_bytes(4, "little")
    return bytes(packed)


def bad_archives() -> dict[str, tuple[bytes, str, str]]:
    """name → bytes, code of the error, what it says."""
    whole, layer = tar(ROOT), tar(ROOT)
    wrong = config([layer])
    wrong["rootfs"]["diff_ids"] = [f"sha256:{'0' * 64}"]
    arm = {**config([layer]), "architecture": "s390x"}
    return {
        "empty": (b"", "archive", "cut short"),
        "no tar": (b"hello world" * 200, "archive", "checksum|no number"),
        "cut in a file": (whole[:1300], "archive", "cut short"),
        "cut in gzip": (gzip.compress(tar([*ROOT, E("x", os.urandom(5000))]))[:-2000], "archive", "cut short"),
        "gzip without its checksum": (gzip.compress(whole)[:-8], "archive", "cut short"),
        "damaged gzip": (gzip.compress(whole)[:-30] + b"x" * 30, "archive", "damaged|cut short|no number|checksum"),
        "dot dot": (tar([*ROOT, E("../x", b"1")]), "archive", "leads out"),
        "dot dot in a layer": (docker([tar([*ROOT, E("a/../../x", b"1")])]), "archive", "leads out"),
        "whiteout of dot dot": (docker([tar([*ROOT, E(".wh...")])]), "archive", "whiteout"),
        "wrong diff id": (docker([layer], wrong), "image-digest", "does not have the digest"),
        "wrong layer": (oci([layer], spoil="layer0"), "image-digest", "does not have the digest"),
        "more layers than engines take": (docker([layer] * 128), "archive", "128 layers; the most is 127"),
        "xz that asks for 4 GiB": (hungry_xz(tar(ROOT)), "archive", "xz data is damaged"),
        "wrong packing of a layer": (oci([layer], spoil="packing"), "image-digest", "does not have the digest"),
        "wrong config": (oci([layer], spoil="config"), "image-digest", "does not have the digest"),
        "wrong manifest": (oci([layer], spoil="manifest"), "image-digest", "does not have the digest"),
        "other machine": (docker([layer], arm), "image-machine", "s390x"),
        "two images": (tar([as_json("manifest.json", [{}, {}])]), "archive", "2 images"),
        "no manifest": (tar([as_json("repositories", {})]), "archive", "neither manifest"),
        "layer missing": (
            tar([as_json("manifest.json", [{"Config": "manifest.json", "Layers": ["blobs/x"]}])]),
            "archive",
            "configuration is no object",
        ),
        "deep json": (tar([E("manifest.json", b"[" * 200_000)]), "archive", "no JSON"),
        "a part twice": (tar([E("index.json", b"{}"), E("index.json", b"{}")]), "archive", "twice"),
        "no root": (tar([E("notes.txt", b"hello")]), "image-source", "no root file system"),
        "a name that is too long with the store's before it": (
            tar([*ROOT, E("/".join(["d" * 60] * 60), b"1")]),
            "archive",
            "longer than 3072 bytes",
        ),
        "a link with more bytes than letters": (
            tar([*ROOT, symlink("bin/long", "é" * 4000)], tarfile.GNU_FORMAT),
            "archive",
            "links to",
        ),
        "more variables than a record holds": (
            docker([layer], config([layer], Env=[f"A{n}={'x' * 100_000}" for n in range(10)])),
            "archive",
            "longer than",
        ),
        "etc is a link": (tar([*ROOT[:2], symlink("etc", "/etc")]), "archive", "not a directory"),
    }


@pytest.mark.parametrize("case", bad_archives())
def test_a_bad_archive_is_refused_with_its_reason_and_nothing_is_kept(
    case: str, store: ImageStore, tmp_path: Path
) -> None:
    data, code, why = bad_archives()[case]
    with pytest.raises(ImageError, match=why) as caught:
        images.import_image("one", write(tmp_path, data))
    assert (caught.value.code, bool(caught.value.fix)) == (code, True)
    assert nothing_kept(store)


def test_a_source_that_is_not_there_or_is_no_file_is_refused(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        images.import_image("one", tmp_path / "missing.tar")
    with pytest.raises(ImageError, match="neither a file nor a folder"):
        images.import_image("one", "/dev/null")
    with pytest.raises(ImageError, match="holds the store of images itself"):
        images.import_image("one", tmp_path)
    assert nothing_kept(store)


@pytest.mark.parametrize("name", ["host", "a/b", "", "../x", "-x", "x+y", "x+0123456789ab", "a" * 65])
def test_a_name_that_is_none_is_refused(name: str, store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises((PolicyError, ImageError)):
        images.import_image(name, write(tmp_path, tar(ROOT)))
    assert nothing_kept(store)


def test_an_engine_that_is_not_there_or_a_name_that_is_an_option_is_refused(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImageError, match="is no name of an image"):
        images.import_image("one", "docker:--help")
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ImageError, match="there is no podman that may be used"):
        images.import_image("one", "podman:debian")
    assert nothing_kept(store)


ENGINE = """#!/bin/sh
[ "$1 $4 $5" = "save  " ] && exit 9
case "$*" in
*gone*) echo "Error: No such image: gone" >&2; exit 1;;
*closed*) echo "permission denied while trying to connect to the socket" >&2; exit 1;;
esac
while [ $# -gt 1 ]; do [ "$1" = --output ] && out=$2; shift; done
cp "$DOCKER_ARCHIVE" "$out"
"""


def test_an_image_of_an_engine_is_what_its_save_writes(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's program stands in for a daemon; the archive is what one writes."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "docker"
    program.write_text(ENGINE)
    program.chmod(0o755)
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (f"{tmp_path}/bin", *programs.SYSTEM_FOLDERS))
    monkeypatch.setenv("DOCKER_ARCHIVE", str(write(tmp_path, docker([tar(ROOT)]))))
    assert images.import_image("one", "docker:x:latest").source == "docker-archive"
    with pytest.raises(ImageError, match="docker has no image 'gone'"):
        images.import_image("two", "docker:gone")
    with pytest.raises(ImageError, match="may not use docker") as caught:
        images.import_image("two", "docker:closed")
    assert "can become root" in str(caught.value.fix)


def test_exporting_and_importing_gives_the_same_image(store: ImageStore, tmp_path: Path) -> None:
    layer = tar([*ROOT, E("d/ü\n", b"x", mode=0o600), E("e/" + "n" * 150, b"y"), symlink("l", "/x")])
    one = images.import_image("one", write(tmp_path, docker([layer], config([layer], Env=["A=b"], Cmd=["x"]))))
    images.export("one", tmp_path / "out.tar")
    two = images.import_image("two", tmp_path / "out.tar")
    assert (two.digest, two.env, two.config) == (one.digest, one.env, one.config)


def test_a_tree_that_was_changed_is_found_and_not_exported(store: ImageStore, tmp_path: Path) -> None:
    info = images.import_image("one", write(tmp_path, tar(ROOT)))
    images.verify("one")
    tool = Path(store.root(info.digest), "bin/tool")
    tool.write_text("#!/bin/no\n")
    with pytest.raises(ImageError, match="is damaged"):
        images.verify("one")
    with pytest.raises(ImageError, match="is damaged"):
        images.export("one", tmp_path / "out.tar")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar", "data"]


def test_random_damage_to_an_archive_never_leaves_half_an_image(store: ImageStore, tmp_path: Path) -> None:
    chance = random.Random(5)
    whole = docker([LOWER, UPPER], config([LOWER, UPPER]))
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            images.import_image("one", write(tmp_path, bytes(data)))
        except ImageError:
            assert nothing_kept(store)
        else:
            assert contents(store, "one") == TOGETHER
            images.remove("one")


def test_an_image_of_a_running_engine_comes_out_as_it_went_in(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines.running("docker")
    if isinstance(engine, str) or shutil.which("docker") is None:
        pytest.skip(engine if isinstance(engine, str) else "the docker command is not installed")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    info = images.import_image("one", write(tmp_path, tar([*ROOT, E("bin/more", b"m" * 5000)])))
    images.export("one", tmp_path / "one.tar")
    subprocess.run(["docker", "load", "--input", str(tmp_path / "one.tar")], check=True, capture_output=True)
    try:
        assert images.import_image("two", "docker:ringfence/one:latest").digest == info.digest
        with pytest.raises(ImageError, match="docker has no image 'ringfence/none:latest'") as caught:
            images.import_image("three", "docker:ringfence/none:latest")
        assert caught.value.code == "image-unknown"
    finally:
        subprocess.run(["docker", "rmi", "ringfence/one:latest"], check=True, capture_output=True)


def test_a_folder_with_more_than_an_image_may_hold_is_refused(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No header says beforehand what a folder holds."""
    (tmp_path / "root" / "bin").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (tmp_path / "root" / "bin" / name).write_bytes(b"x" * 1000)
    for caps, why in (
        (ArchiveCaps(entries=3), "more than 3 files"),
        (ArchiveCaps(size=2999), "no space left|larger than 2,999"),
    ):
        monkeypatch.setattr(make, "caps_for", lambda _, caps=caps: caps)
        with pytest.raises(ImageError, match=why):
            images.import_image("one", tmp_path / "root")
        assert nothing_kept(store)
    monkeypatch.setattr(make, "caps_for", lambda _: ArchiveCaps(entries=100, size=9000))
    images.import_image("one", tmp_path / "root")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_file_system_mounted_in_a_folder_is_left_out_and_noted(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root" / "bin").mkdir(parents=True)
    (tmp_path / "root" / "other").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "rf-tests", str(tmp_path / "root" / "other")], check=True)
    try:
        (tmp_path / "root" / "other" / "secret").write_text("of another")
        info = images.import_image("one", tmp_path / "root")
    finally:
        subprocess.run(["umount", str(tmp_path / "root" / "other")], check=True)
    assert "other: another file system is mounted there; left out" in info.notes
    assert not Path(store.root(info.digest), "other").exists()
