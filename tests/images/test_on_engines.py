"""Stored images behind every wall: one without Python, libc or shell, and with a configuration that means harm."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from backends_declared import DECLARED, missing
from images import packing
from images.packing import E, directory, symlink
from programs import read_program
from ringfence import Mount, Policy, Sandbox, UnsupportedError, images
from ringfence.backends.engine import guestd_bundle
from ringfence.images.store import ImageStore

TOOL = read_program("images/on_engines_tool.c")
PRELOADED = r"""
#include <fcntl.h>
__attribute__((constructor)) static void begin(void) { open("/workspace/preloaded", O_CREAT | O_WRONLY, 0644); }
"""
HOSTILE = {
    "Entrypoint": ["/bin/tool", "/workspace/entered"],
    "Cmd": ["/bin/tool", "/workspace/commanded"],
    "WorkingDir": "/proc/self/fd/7",
    "User": "root",
    "Env": ["GREETING=hello", "PATH=/bin", "LD_PRELOAD=/evil.so", "PYTHONPATH=/evil"],
    "Volumes": {"/": {}, "/.ringfence": {}},
}


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A static program: an image of it needs nothing else."""
    folder = tmp_path_factory.mktemp("tool")
    (folder / "tool.c").write_text(TOOL)
    subprocess.run(["gcc", "-static", "-O1", "-o", folder / "tool", folder / "tool.c"], check=True)
    return (folder / "tool").read_bytes()


@pytest.fixture(scope="session", params=["process", "container", "podman", "gvisor"])
def make(request: pytest.FixtureRequest) -> Callable[..., Sandbox]:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return DECLARED[request.param].make()


def test_an_image_of_one_static_program_runs_and_its_configuration_chooses_nothing(
    make: Callable[..., Sandbox], tool: bytes, store: ImageStore, tmp_path: Path
) -> None:
    del store
    layer = packing.tar(
        [directory("bin"), E("bin/tool", tool, mode=0o755), directory("etc"), directory("usr"), symlink("lib", "usr")]
    )
    archive = tmp_path / "bare.tar"
    archive.write_bytes(packing.docker([layer], packing.config([layer], **HOSTILE)))
    images.import_image("bare", archive)
    with make(image="bare") as box:
        result = box.exec(["/bin/tool"], stdin="echoed\n")
        assert (result.status, result.stdout) == ("ok", "/workspace hello 0\nechoed\n")
        assert [info.path for info in box.files.list()] == ["made"]
        assert box.files.read_text("made") == "by the guest"
        assert box.exec(["/bin/tool", "/bin/new"]).exit_code == 1
        assert box.exec(["/bin/sh"]).reason == "not-found"
        assert result.image == "bare"


def test_one_tree_serves_two_sandboxes_and_is_not_copied(
    make: Callable[..., Sandbox], tool: bytes, store: ImageStore, tmp_path: Path
) -> None:
    del store
    root = tmp_path / "root"
    for name in ("bin", "etc", "usr"):
        (root / name).mkdir(parents=True)
    (root / "bin" / "tool").write_bytes(tool)
    (root / "bin" / "tool").chmod(0o755)
    images.import_image("small", root)
    with make(image="small") as one, make(image="small") as other:
        for box in (one, other):
            box.exec(["/bin/tool"]).check()
    found = [path for path in (tmp_path / "data").rglob("tool") if path.is_file()]
    assert len({path.stat().st_ino for path in found}) == 1


def test_an_images_preload_list_is_loaded_into_nothing_of_ours(
    make: Callable[..., Sandbox], tool: bytes, store: ImageStore, tmp_path: Path
) -> None:
    """guestd is started by a loader, which reads that file before all else; with guestd's rights."""
    del store
    (tmp_path / "preloaded.c").write_text(PRELOADED)
    library = tmp_path / "preloaded.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "preloaded.c"], check=True)
    layer = packing.tar(
        [
            directory("bin"),
            E("bin/tool", tool, mode=0o755),
            E("bin/preloaded.so", library.read_bytes(), mode=0o755),
            directory("etc"),
            E("etc/ld.so.preload", b"/bin/preloaded.so\n"),
        ]
    )
    archive = tmp_path / "preload.tar"
    archive.write_bytes(packing.docker([layer]))
    images.import_image("preload", archive)
    with make(image="preload") as box:
        box.exec(["/bin/tool"]).check()
        assert [info.path for info in box.files.list()] == ["made"]


@pytest.mark.parametrize("program", [b"none", b"/etc/ld.so.preload\0" * 2, b"/etc/ld.so.preload.d\0"])
def test_a_loader_that_cannot_be_kept_from_the_list_is_refused(tmp_path: Path, program: bytes) -> None:
    loader = tmp_path / "ld.so"
    loader.write_bytes(program)
    with pytest.raises(UnsupportedError, match="cannot be kept from an image"):
        guestd_bundle._take_preload_away(str(loader))
    assert loader.read_bytes() == program


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".ringfence", "needs /.ringfence for itself:"),
        (".ringfence-door", "needs /.ringfence-door for itself:"),
        ("caf\udce9", r"cannot show 'caf\\udce9': the name is not UTF-8"),
    ],
    ids=["ours", "our door", "not UTF-8"],
)
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_top_name_that_a_wall_cannot_show_is_refused_in_words(
    request: pytest.FixtureRequest,
    make: Callable[..., Sandbox],
    tool: bytes,
    store: ImageStore,
    tmp_path: Path,
    name: str,
    said: str,
    kind: str,
) -> None:
    del store
    root = tmp_path / "root"
    for folder in ("bin", "etc"):
        (root / folder).mkdir(parents=True)
    (root / "bin" / "tool").write_bytes(tool)
    (root / "bin" / "tool").chmod(0o755)
    if kind == "folder":
        (root / name).mkdir()
    elif kind == "file":
        (root / name).write_text("x")
    else:
        (root / name).symlink_to("bin")
    images.import_image("named", root)
    box = make(image="named")
    if request.node.callspec.params["make"] == "process":
        with box:
            box.exec(["/bin/tool"]).check()
        return
    with pytest.raises(UnsupportedError, match=said):
        box.start()


def test_a_long_link_at_the_top_and_a_long_mount_are_shown_behind_every_wall(
    make: Callable[..., Sandbox], tool: bytes, store: ImageStore, tmp_path: Path
) -> None:
    """The oldest form of tar has 100 bytes for a link and 256 for a name."""
    del store
    far, target = "usr/" + "n" * 150, "/" + "/".join(["d" * 50] * 8)
    shown = tmp_path / "shown"
    shown.mkdir()
    shown.joinpath("file").write_text("hello")
    shown.chmod(0o755)
    archive = tmp_path / "long.tar"
    entries = [directory("bin"), E("bin/tool", tool, mode=0o755), E(far, b"far"), symlink("near", far)]
    archive.write_bytes(packing.tar(entries))
    images.import_image("long", archive)
    with make(image="long", policy=Policy(mounts=[Mount(shown, target=target, mode="ro")])) as box:
        assert (box.files.read_text("/near"), box.files.read_text(f"{target}/file")) == ("far", "hello")
