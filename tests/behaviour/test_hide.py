"""`hide`: absent in read-only mounts and copies, empty and read-only where the mount writes through."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accounts import OrdinaryUser
from programs import read_program
from ringfence import Mount, Policy, Sandbox

if TYPE_CHECKING:
    from ringfence.values import MountMode

LOOK = read_program("behaviour/hide_look.py")
HIDE = [".env", "secrets", "deep/er/key", "secrets/one", "later", "nowhere/at/all"]
SHOWN = ["deep", "deep/er", "deep/er/plain", "link", "readme"]
GONE = {".env": "ENOENT", "deep/er/key": "ENOENT", "secrets/one": "ENOENT", "link": "ENOENT", "later": "ENOENT"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    fill(top)
    return top


def fill(top: Path) -> None:
    for name in (".env", "readme", "secrets/one", "deep/er/key", "deep/er/plain"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f"canary of {name}")
    (top / "link").symlink_to(".env")
    (top / "deep").chmod(0o775)  # not what a new folder has, and open to all: see `private`


@pytest.mark.parametrize("private", [False, True])  # closed to other users: as root it is shown by an idmapped mount
@pytest.mark.parametrize(("mode", "writing"), [("ro", "EROFS"), ("copy", "ok")])
def test_a_hidden_path_is_absent_and_stays_so(project: Path, mode: MountMode, writing: str, private: bool) -> None:
    project.chmod(0o700 if private else 0o755)
    (project / "readme").chmod(0o600 if private else 0o644)
    before = {path: path.lstat().st_ctime_ns for path in project.rglob("*")}
    policy = Policy(mounts=[Mount(str(project), "/data", mode, hide=HIDE)])
    with Sandbox(policy=policy) as box:
        seen = json.loads(box.run(LOOK).check().stdout)
        assert seen == {
            "tree": SHOWN,
            "read": GONE,
            "plain": "canary of deep/er/plain",
            "write": writing,
            "mode": "0o775",
        }
        (project / "later").write_text("made while it runs")
        (project / "other").write_text("replaced while it runs")
        os.replace(project / "other", project / ".env")
        assert json.loads(box.run(LOOK).check().stdout)["read"] == GONE
    (project / "later").unlink()
    changed = {path for path in project.rglob("*") if path.lstat().st_ctime_ns != before[path]}
    assert changed <= {project / ".env"}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("further", [(), ("ro",), ("copy",), ("rw",)])
@pytest.mark.parametrize("mode", ["ro", "copy"])
def test_what_holds_the_layer_is_not_in_the_guests_view(
    project: Path, tmp_path: Path, mode: MountMode, further: tuple[MountMode, ...], private: bool
) -> None:
    """A folder that all users may read is mounted once for all sandboxes of a view, others for each sandbox; both
    kinds together, too."""
    project.chmod(0o700 if private else 0o755)
    other = tmp_path / "other"
    fill(other)
    mounts = [Mount(str(project), "/data", mode, hide=HIDE), *(Mount(str(other), "/more", how) for how in further)]
    code = "import os\nprint([sorted(os.listdir(p)) for p in ('/.disk', '/.sources') if os.path.exists(p)])"
    with Sandbox(policy=Policy(mounts=mounts)) as box:
        assert box.run(code).check().stdout in ("[[]]\n", "[[], []]\n")


def test_in_a_writable_mount_a_hidden_path_is_empty_and_read_only(project: Path) -> None:
    policy = Policy(mounts=[Mount(str(project), "/data", "rw", hide=[".env", "secrets"])])
    code = """
import errno, os
print(repr(open("/data/.env").read()), os.listdir("/data/secrets"))
for path in ("/data/.env", "/data/secrets/x"):
    try: open(path, "w")
    except OSError as error: print(errno.errorcode[error.errno])
"""
    with Sandbox(policy=policy) as box:
        assert box.run(code).check().stdout == "'' []\nEROFS\nEROFS\n"
    assert (project / ".env").read_text() == "canary of .env"


@pytest.mark.parametrize("second", [False, True])  # another, read-only, mount of the same folder
def test_a_guest_cannot_move_a_hidden_file_out_of_its_place(project: Path, second: bool) -> None:
    """The file is neither moved for this sandbox, nor for the next sandbox with the same policy."""
    shown = [Mount(str(project), "/more", "ro", hide=["deep/er/key"])] if second else []
    policy = Policy(mounts=[Mount(str(project), "/data", "rw", hide=["deep/er/key"]), *shown])
    code = """
import errno, os
for name in ("deep", "deep/er", "deep/er/key"):
    try: os.rename(f"/data/{name}", f"/data/{name}2")
    except OSError as error: print(errno.errorcode[error.errno])
print(sorted({name for top in ("/data", "/more") for _, _, files in os.walk(top) for name in files if "key" in name}))
"""
    for _ in range(2):
        with Sandbox(policy=policy) as box:
            assert box.run(code).check().stdout == "EBUSY\nEBUSY\nEBUSY\n['key']\n"
    assert (project / "deep" / "er" / "key").read_text() == "canary of deep/er/key"


@pytest.mark.parametrize("mode", ["ro", "copy"])
def test_what_is_hidden_is_absent_however_it_comes_to_be_there(project: Path, mode: MountMode) -> None:
    """A link that is replaced by a file, and a file in a folder that did not exist either."""
    hide = ["link", "no/folder/yet"]
    with Sandbox(policy=Policy(mounts=[Mount(str(project), "/data", mode, hide=hide)])) as box:
        (project / "link").unlink()
        for name in hide:
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text("a secret")
        code = f"import os\nprint([name for name in {hide!r} if os.path.lexists('/data/' + name)])"
        assert box.run(code).check().stdout == "[]\n"


def test_the_plan_says_which_of_the_two_a_hidden_path_is(project: Path) -> None:
    def lines(mode: MountMode) -> list[str]:
        policy = Policy(mounts=[Mount(str(project), "/data", mode, hide=[".env"])])
        return [line.strip() for line in Sandbox(policy=policy).plan().explain().splitlines() if "/data/.env:" in line]

    assert lines("ro") == lines("copy") == ["/data/.env: absent"]
    assert lines("rw") == ["/data/.env: hidden: an empty, read-only file is in its place"]


_AS_USER = read_program("behaviour/hide_as_user.py")


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above already run as an ordinary user")
def test_a_hidden_path_is_absent_for_an_ordinary_user_too(ordinary_user: OrdinaryUser) -> None:
    import inspect

    done = ordinary_user.run(_AS_USER, inspect.getsource(fill), json.dumps(HIDE), LOOK)
    assert done.returncode == 0, done.stderr
    base = {"tree": SHOWN, "read": GONE, "plain": "canary of deep/er/plain", "mode": "0o775"}
    assert json.loads(done.stdout) == [{**base, "write": "EROFS"}, {**base, "write": "ok"}]
