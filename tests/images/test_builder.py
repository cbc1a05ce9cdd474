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
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringfence
from accounts import OrdinaryUser
from images.packing import ROOT, E, tar
from ringfence import images
from ringfence.errors import ImageError
from ringfence.host import programs
from ringfence.images import builder, packages
from ringfence.images.builder import Recipe, RecipeFile, _key
from ringfence.images.store import ImageStore
from ringfence.policy.image import Image

pytestmark = [
    pytest.mark.timeout(300),  # the first run on a machine builds the image
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is missing: make system"),
]


def wheel(folder: Path, name: str, code: str, needs: str = "") -> None:
    """A wheel of one module, with a program of the same name."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
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
    """Make the only index that the host's pip finds, with pip itself and a test package. No network."""
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
    ImageStore().set_step(_key("debian", packages.suite_of("debian"), ["python3"]), images.inspect(debian).digest)
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
    suite = packages.suite_of("debian")
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


def test_a_recipe_without_files_is_not_made_twice_and_one_with_files_reads_them_anew(
    cached: str, tmp_path: Path
) -> None:
    first: list[str] = []
    info = images.build("first", Recipe(apt=("python3",)), progress=first.append)
    again: list[str] = []
    assert images.build("again", Recipe(apt=("python3",)), progress=again.append).digest == info.digest
    assert (first[-1], again[-1]) == ("storing", "image: from the cache")
    assert images.inspect("again").to_dict() == {
        **info.to_dict(),
        "name": "again",
        "created_at": images.inspect("again").created_at,
    }
    other = images.build("other", Recipe(apt=("python3",), env={"A": "1"}))
    assert (dict(other.env), other.digest) == ({"A": "1"}, info.digest)
    note = tmp_path / "note"
    found = []
    for text in ("one", "two"):
        note.write_text(text)
        images.build("noted", Recipe(apt=("python3",), files=(RecipeFile(str(note), "/note"),)))
        found.append(Path(ImageStore().root(images.inspect("noted").digest), "note").read_text())
    assert found == ["one", "two"]


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
    assert os.listdir(f"{ImageStore().directory}/work") == []


def test_a_folder_goes_where_a_link_of_the_image_leads_and_a_pipe_or_a_missing_file_is_refused(
    cached: str, tmp_path: Path
) -> None:
    folder, pipe = tmp_path / "tools", tmp_path / "pipe"
    folder.mkdir()
    (folder / "tool").write_text("a tool")
    os.mkfifo(pipe)
    info = images.build("tooled", Recipe(apt=("python3",), files=(RecipeFile(str(folder), "/bin"),)))
    assert Path(ImageStore().root(info.digest), "usr/bin/tool").read_text() == "a tool"
    for source, why in (
        (pipe, "is no regular file"),
        (tmp_path / "gone", "gone, which goes to /opt/it, does not exist"),
    ):
        with pytest.raises(ImageError, match=why) as caught:
            images.build("tooled2", Recipe(apt=("python3",), files=(RecipeFile(str(source), "/opt/it"),)))
        assert caught.value.code == "image-source"


@pytest.mark.parametrize("named", ["{place}", "source @ file://{place}", "needing"])
def test_what_pip_would_build_does_not_run_on_this_host(cached: str, index: Path, tmp_path: Path, named: str) -> None:
    """--only-binary is for what an index has: a path, an address, or a wheel that needs one were built all the same."""
    place, witness = tmp_path / "source", tmp_path / "ran"
    place.mkdir()
    (place / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n')
    (place / "b.py").write_text(f"open({str(witness)!r}, 'w')\n")
    wheel(index, "needing", "", needs=f"Requires-Dist: source @ file://{place}\n")
    with pytest.raises(ImageError, match="pip found what is no wheel") as caught:
        images.build("mine3", Recipe(apt=("python3",), pip=(named.format(place=place),)))
    assert (caught.value.code, witness.exists()) == ("package-source", False)


@pytest.mark.skipif(os.geteuid() != 0, reason="without uids to map an ordinary user cannot build")
def test_a_debian_package_that_does_not_exist_is_said_and_nothing_is_kept(store: ImageStore) -> None:
    with pytest.raises(ImageError, match="no package") as caught:
        images.build("mine", Recipe(apt=("no-such-package-at-all",)))
    assert caught.value.code == "package-unknown"
    assert "no-such-package-at-all" in str(caught.value)
    assert (os.listdir(f"{store.directory}/work"), store.names()) == ([], [])


_BUILD = """
from ringfence import images
from ringfence.images.builder import Recipe
images.build("mine", Recipe(), progress=lambda message: print(message, flush=True))
"""


def builders(store: ImageStore) -> list[str]:
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
def test_a_build_that_is_stopped_ends_with_all_it_started(number: signal.Signals, store: ImageStore) -> None:
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
    assert running.wait(timeout=60) == -number
    running.stdout.close()
    deadline = time.monotonic() + 60
    while builders(store) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert builders(store) == []
    assert (store.sweep(), os.listdir(f"{store.directory}/work")) == (int(number == signal.SIGKILL), [])
    assert store.names() == []


def test_an_image_without_python_takes_no_pip_packages(cached: str, index: Path, tmp_path: Path) -> None:
    root = Path(ImageStore().root(images.inspect(cached).digest))
    bare = tmp_path / "bare"
    (bare / "bin").mkdir(parents=True)
    shutil.copy(root / "usr/bin/true", bare / "bin/true")
    digest = images.import_image("bare", bare).digest
    ImageStore().set_step(_key("debian", packages.suite_of("debian"), []), digest)
    with pytest.raises(ImageError, match="need a Python in the image"):
        images.build("mine3", Recipe(pip=("greeter",)))


_OVERFLOWING = """#!/bin/sh
cat "$0.tar" /dev/zero
"""


def test_a_root_that_is_refused_while_it_comes_is_refused_with_its_own_reason(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mmdebstrap").write_text(_OVERFLOWING)
    (tmp_path / "mmdebstrap").chmod(0o755)
    (tmp_path / "mmdebstrap.tar").write_bytes(tar([*ROOT, E("../out", b"x" * 5000)])[:-1024])
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path), *programs.SYSTEM_FOLDERS))
    for module in (packages, builder):
        monkeypatch.setattr(module, "check_host", lambda: None)
    with pytest.raises(ImageError, match=r"leads out by '\.\.'") as caught:
        images.build("mine", Recipe())
    assert (caught.value.code, os.listdir(f"{store.directory}/work"), store.names()) == ("archive", [], [])


_MMDEBSTRAP = """#!/bin/sh
case "$*" in *--simulate*) exit 0;; esac
echo "I: busy..." >&2
mkdir -p "$TMPDIR/made/bin" && cp /bin/true "$TMPDIR/made/bin/" && chown -R 42:42 "$TMPDIR/made" || exit 1
awk '{print $1, $3}' /proc/self/uid_map > "$TMPDIR/made/bin/map"
[ ! -e "$(dirname "$0")/stall" ] || { echo "I: stalled..." >&2; sleep 1000; }
tar -C "$TMPDIR/made" -cf - .
rm -rf "$TMPDIR/made"
"""
_BUILD_AS_USER = """
import os, sys
os.environ.update(XDG_DATA_HOME=sys.argv[1] + "/data")
from ringfence import images
from ringfence.host import programs as host_programs
host_programs.SYSTEM_FOLDERS = (sys.argv[1], *host_programs.SYSTEM_FOLDERS)
from ringfence.images.store import ImageStore
from ringfence.images.builder import Recipe
print(ImageStore().sweep() if "sweep" in sys.argv else "", flush=True)
info = images.build("mine", Recipe(apt=("true",)), progress=lambda message: print(message, flush=True))
print(open(ImageStore().root(info.digest) + "/bin/map").read().split(), os.listdir(ImageStore().directory + "/work"))
"""


@pytest.fixture
def users_folder(ordinary_user: OrdinaryUser) -> Iterator[Path]:
    """A folder that only an ordinary user can enter, with a program in the place of mmdebstrap that does as it does."""
    if os.geteuid() != 0:
        pytest.skip("this test makes folders for another user, as root")
    if shutil.which("newuidmap") is None or ordinary_user.name not in Path("/etc/subuid").read_text():
        pytest.skip("newuidmap or uids to map are missing: make system")
    with tempfile.TemporaryDirectory(prefix="rf-tests-", dir=ordinary_user.source.parent) as name:
        program = Path(name, "mmdebstrap")
        program.write_text(_MMDEBSTRAP)
        program.chmod(0o755)
        Path(name, "data").mkdir()
        for path in (name, f"{name}/data"):
            os.chown(path, ordinary_user.uid, ordinary_user.gid)
            os.chmod(path, 0o700)
        yield Path(name)


def test_an_ordinary_user_builds_as_root_over_mapped_uids_in_a_folder_that_no_other_uid_enters(
    users_folder: Path, ordinary_user: OrdinaryUser
) -> None:
    done = ordinary_user.run(_BUILD_AS_USER, str(users_folder), timeout_s=100)
    assert done.stdout.splitlines()[-2:] == ["storing", "['0', '1', '1', '65535'] []"], done.stderr
    owners = {path.lstat().st_uid for path in (users_folder / "data").rglob("*")}
    assert owners == {ordinary_user.uid}


def test_what_a_killed_build_of_an_ordinary_user_left_is_removed_though_it_belongs_to_mapped_uids(
    users_folder: Path, ordinary_user: OrdinaryUser
) -> None:
    (users_folder / "stall").touch()
    running = subprocess.Popen(
        [ordinary_user.python, "-c", _BUILD_AS_USER, str(users_folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ordinary_user.home,
        env=ordinary_user.environment(),
        user=ordinary_user.uid,
        group=ordinary_user.gid,
        extra_groups=[],
    )
    assert running.stdout is not None
    while "stalled" not in running.stdout.readline():
        assert running.poll() is None
    running.kill()
    running.wait()
    running.stdout.close()
    left = {path.lstat().st_uid for path in (users_folder / "data").rglob("*")}
    assert len(left) == 2
    (users_folder / "stall").unlink()
    done = ordinary_user.run(_BUILD_AS_USER, str(users_folder), "sweep", timeout_s=100)
    assert (done.stdout.splitlines()[0], done.stdout.splitlines()[-1]) == ("1", "['0', '1', '1', '65535'] []")
