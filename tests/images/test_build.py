"""Builds: steps on a real Debian root, packages by the image's own Python in a sandbox, and nothing half-made."""

from __future__ import annotations

import base64
import ensurepip
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import ringfence
from ringfence import images
from ringfence.errors import ImageError
from ringfence.files.imagestore import Store
from ringfence.images import debian as bootstrapping
from ringfence.images.building import _key
from ringfence.images.recipe import Recipe, RecipeFile
from ringfence.policy.image import Image

pytestmark = [
    pytest.mark.timeout(300),  # the first run on a machine builds the image
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is missing: make system"),
]


def wheel(folder: Path, name: str, code: str) -> None:
    """A wheel of one module, with a program of the same name."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that the host's pip finds: pip itself, and a package of ours. No network."""
    folder = tmp_path / "index"
    folder.mkdir()
    for bundled in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
        shutil.copy(bundled, folder)
    wheel(folder, "greeter", "def main():\n    print('hello from inside')\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cached(debian: str) -> str:
    """The first step of a recipe with python3 is in the cache already: the image that was built once."""
    Store().set_step(_key("debian", bootstrapping.suite_of("debian"), ["python3"]), images.inspect(debian).digest)
    return debian


def test_packages_files_env_and_a_user_come_into_the_image(cached: str, index: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("a note")
    recipe = Recipe(
        apt=("python3",),
        pip=("greeter",),
        env={"LEVEL": "9"},
        user="agent",
        files=(RecipeFile(str(tmp_path / "note.txt"), "/bin/note.txt"),),
    )
    steps: list[str] = []
    info = images.build("mine", recipe, progress=steps.append)
    suite = bootstrapping.suite_of("debian")
    assert steps == [
        f"Debian {suite}: from the cache",
        "pip download greeter",
        "pip install greeter",
        "copying /bin/note.txt",
        "storing",
    ]
    code = (
        "import greeter, os, pwd\nprint(os.environ['LEVEL'], pwd.getpwuid(1000).pw_name, pwd.getpwnam('user').pw_uid)"
    )
    assert ringfence.run(code, image="mine").stdout == "9 agent 1000\n"
    with ringfence.Sandbox(image="mine") as box:
        assert box.exec(["greeter"]).stdout == "hello from inside\n"
        assert box.exec(["cat", "/usr/bin/note.txt"]).stdout == "a note"
    again: list[str] = []
    assert images.build("mine", recipe, progress=again.append).digest == info.digest
    assert again[:2] == [f"Debian {suite}: from the cache", "pip packages: from the cache"]


def test_an_image_with_packages_is_built_and_then_runs(cached: str, index: Path) -> None:
    images.build("base", Recipe(apt=("python3",)))
    wanted = Image("base", pip=["greeter"])
    with pytest.raises(ImageError, match="is not built"):
        ringfence.run("import greeter", image=wanted)
    images.build(wanted)
    assert ringfence.run("import greeter\ngreeter.main()", image=wanted).stdout == "hello from inside\n"
    assert ringfence.run("import greeter", image="base").status == "error"
    with pytest.raises(ImageError, match="was imported"):
        images.build(Image(cached, pip=["greeter"]))


def test_a_pip_package_that_does_not_exist_is_said_and_nothing_is_kept(cached: str, index: Path) -> None:
    before = {info.name for info in images.list_images()}
    with pytest.raises(ImageError, match="no package 'no-such-thing-at-all'") as caught:
        images.build("mine2", Recipe(apt=("python3",), pip=("no-such-thing-at-all",)))
    assert (caught.value.code, "correct its name" in str(caught.value.fix)) == ("package-unknown", True)
    assert {info.name for info in images.list_images()} == before
    assert os.listdir(f"{Store().directory}/work") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="without uids to map an ordinary user cannot build")
def test_a_debian_package_that_does_not_exist_is_said_and_nothing_is_kept(store: Store) -> None:
    with pytest.raises(ImageError, match="no package") as caught:
        images.build("mine", Recipe(apt=("no-such-package-at-all",)))
    assert caught.value.code == "package-unknown"
    assert "no-such-package-at-all" in str(caught.value)
    assert (os.listdir(f"{store.directory}/work"), store.names()) == ([], [])


_BUILD = """
from ringfence import images
from ringfence.images.recipe import Recipe
images.build("mine", Recipe(), progress=lambda message: print(message, flush=True))
"""


def builders(store: Store) -> list[str]:
    """Processes that work below the store: their TMPDIR is there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={store.directory}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="without uids to map an ordinary user cannot build")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_stopped_ends_with_all_it_started(number: signal.Signals, store: Store) -> None:
    source = str(Path(__file__).resolve().parents[2] / "src")
    running = subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert running.stdout is not None
    while "apt-get update" not in running.stdout.readline():
        pass
    assert builders(store) != []
    running.send_signal(number)
    assert running.wait(timeout=20) == -number
    running.stdout.close()
    deadline = time.monotonic() + 10
    while builders(store) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert builders(store) == []
    assert (store.sweep(), os.listdir(f"{store.directory}/work")) == (int(number == signal.SIGKILL), [])
    assert store.names() == []


def test_an_image_without_python_takes_no_pip_packages(cached: str, index: Path, tmp_path: Path) -> None:
    root = Path(Store().root(images.inspect(cached).digest))
    bare = tmp_path / "bare"
    (bare / "bin").mkdir(parents=True)
    shutil.copy(root / "usr/bin/true", bare / "bin/true")
    digest = images.import_image("bare", bare).digest
    Store().set_step(_key("debian", bootstrapping.suite_of("debian"), []), digest)
    with pytest.raises(ImageError, match="need a Python in the image"):
        images.build("mine3", Recipe(pip=("greeter",)))
