"""Images that hold no Python of their own: busybox, node alone, musl. The same on every backend."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends_declared import DECLARED, missing
from ringfence import ImageError, Sandbox, images

GREETER = r"""
#include <stdio.h>
#include <unistd.h>
#include <pwd.h>
int main(void) {
    struct passwd *who = getpwuid(getuid());
    printf("%s %s\n", who ? who->pw_name : "nobody", access("/usr", W_OK) ? "closed" : "open");
    return 0;
}
"""
_LOADER = "/lib/ld-musl-x86_64.so.1"


@pytest.fixture(scope="module", params=["process", "container", "podman", "gvisor"])
def make(request: pytest.FixtureRequest, busybox: str, musl: str, node: str) -> Callable[..., Sandbox]:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    made = DECLARED[request.param].make()
    for image in (busybox, musl, node):
        with made(image=image):  # what a first use keeps is there before a test counts what is left
            pass
    return made


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a store for this module, and a folder for the trees to import."""
    folder = tmp_path_factory.mktemp("bare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        yield folder
        for info in images.list_images():
            images.remove(info.name)


def needed(*paths: str) -> None:
    for path in paths:
        if shutil.which(path) is None and not os.path.exists(path):
            pytest.skip(f"{path} is not installed: make system")


@pytest.fixture(scope="module")
def busybox(roots: Path) -> str:
    needed("/bin/busybox")
    root = roots / "busybox"
    (root / "bin").mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin" / "busybox")
    for name in ("sh", "cat", "echo", "id", "ls", "touch", "wc"):
        (root / "bin" / name).symlink_to("busybox")
    images.import_image("busybox", root)
    return "busybox"


@pytest.fixture(scope="module")
def musl(roots: Path) -> str:
    needed("musl-gcc", _LOADER)
    root = roots / "musl"
    (root / "bin").mkdir(parents=True)
    (root / "lib").mkdir()
    (roots / "greeter.c").write_text(GREETER)
    subprocess.run(["musl-gcc", "-O1", "-o", root / "bin" / "greeter", roots / "greeter.c"], check=True)
    shutil.copy(os.path.realpath(_LOADER), root / "lib" / "ld-musl-x86_64.so.1")
    images.import_image("musl", root)
    return "musl"


@pytest.fixture(scope="module")
def node(roots: Path) -> str:
    """Make an image of Node with the libraries that Node needs, and nothing else: no shell, no Python."""
    needed("/usr/bin/node", "ldd")
    root = roots / "node"
    said = subprocess.run(["ldd", "/usr/bin/node"], check=True, capture_output=True, text=True).stdout
    words = [word for line in said.splitlines() for word in line.split() if word.startswith("/")]
    for path in ("/usr/bin/node", *words):
        at = root / path.removeprefix("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), at)
    images.import_image("node", root)
    return "node"


def test_a_busybox_root_has_commands_and_files_and_no_python(make: Callable[..., Sandbox], busybox: str) -> None:
    with make(image=busybox) as box:
        box.files.write("in.txt", "one\ntwo\n")
        result = box.exec(["sh", "-c", "cat in.txt | wc -l; id -un; touch /bin/x || echo closed; echo made > out.txt"])
        assert (result.status, result.stdout.split()) == ("ok", ["2", "user", "closed"])
        assert box.files.read_text("out.txt") == "made\n"
        assert sorted(info.path for info in box.files.list()) == ["in.txt", "out.txt"]
        with pytest.raises(ImageError, match="the image has no Python of its own"):
            box.run("6 * 7")


def test_a_program_of_musl_runs_with_its_own_loader(make: Callable[..., Sandbox], musl: str) -> None:
    with make(image=musl) as box:
        result = box.exec(["/bin/greeter"])
        assert (result.status, result.stdout) == ("ok", "user closed\n")
        box.files.write("kept", b"\0" * 4096)
        assert box.files.stat("kept").size == 4096


def test_an_image_with_node_alone_runs_javascript_in_a_session(make: Callable[..., Sandbox], node: str) -> None:
    with make(image=node) as box:
        assert box.exec(["/usr/bin/node", "-p", "6 * 7"]).stdout == "42\n"
        box.run("let kept = [1, 2, 3]", language="javascript")
        assert box.run("kept.length * 14", language="javascript").value == "42"
