"""Stored images on the process backend: their own programs and Python, read-only, behind the same fence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ringfence
from accounts import OrdinaryUser
from images.packing import E, directory, symlink, tar
from ringfence import Limits, Mount, Policy, Sandbox, images
from ringfence.errors import ImageError, PolicyError, UnsupportedError
from ringfence.images.store import ImageStore
from ringfence.policy.image import Image

pytestmark = pytest.mark.timeout(300)  # the first run on a machine builds the image

SOURCE = Path(__file__).resolve().parents[2] / "src"


def test_python_code_runs_in_the_images_own_python(debian: str) -> None:
    code = "import os, sys\nprint(sys.executable, os.environ['GREETING'], os.getuid(), os.getcwd())\n6 * 7"
    result = ringfence.run(code, image=debian)
    assert (result.status, result.stdout, result.value, result.image) == (
        "ok",
        "/usr/bin/python3 hello 1000 /workspace\n",
        "42",
        "debian",
    )


def test_a_failing_run_is_told_as_on_the_host(debian: str) -> None:
    result = ringfence.run("import sys\nprint('x')\n1 / 0", image=debian)
    assert (result.status, result.reason, result.exit_code, result.stdout) == ("error", "exception", 1, "x\n")
    assert result.exception is not None
    assert result.exception.name == "ZeroDivisionError"


def test_only_the_image_is_there_and_it_is_read_only(debian: str) -> None:
    with Sandbox(image=debian) as box:
        tops = set(box.exec(["ls", "/"]).check().stdout.split())
        assert {"bin", "etc", "usr", "workspace", "tmp", "proc", "dev", "sys"} <= tops
        for path in ("/x", "/etc/x", "/usr/bin/x", "/var/x"):
            assert "Read-only" in box.exec(["touch", path]).stderr
        assert box.exec(["id", "-un"]).stdout == "user\n"
        assert box.exec(["cat", "/etc/resolv.conf"]).stdout.startswith("nameserver 127.0.0.1\n")
        assert box.exec(["sh", "-c", "touch /workspace/a /tmp/b /var/tmp/c && ls /tmp"]).stdout == "b\nc\n"
        assert box.exec(["ls", str(SOURCE)]).exit_code == 2


def test_files_commands_and_sessions_work_as_on_the_host(debian: str) -> None:
    with Sandbox(image=debian) as box:
        box.files.write("in.txt", "hello")
        assert box.exec(["cat", "in.txt"]).stdout == "hello"
        assert [info.path for info in box.files.list()] == ["in.txt"]
        box.run("x = 41")
        assert box.run("x + 1").value == "42"
        assert box.run("echo $((6 * 7))", language="bash").stdout == "42\n"


def test_limits_hold(debian: str) -> None:
    policy = Policy(limits=Limits(timeout_s=1, memory="256M"))
    assert ringfence.run("while True: pass", image=debian, policy=policy).status == "timeout"
    result = ringfence.run("import os\nprint(len(os.sched_getaffinity(0)))", image=debian, policy=policy)
    assert result.stdout == "1\n"


def test_a_folder_of_the_host_is_shown_at_its_own_path_beside_the_images(debian: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("of the host")
    policy = Policy(
        mounts=[Mount(tmp_path, mode="rw"), Mount(tmp_path, target="/usr/share/mine"), Mount(tmp_path, target="/data")]
    )
    with Sandbox(image=debian, policy=policy) as box:
        assert box.exec(["cat", str(tmp_path / "f"), "/usr/share/mine/f", "/data/f"]).stdout == "of the host" * 3
        assert box.exec(["ls", "/usr/share"]).stdout.split() != ["mine"]
        assert box.exec(["sh", "-c", f"echo new > {tmp_path}/g; ls /usr/bin/env"]).stdout == "/usr/bin/env\n"
    assert (tmp_path / "g").read_text() == "new\n"


def test_the_store_itself_cannot_be_mounted(debian: str, tmp_path: Path) -> None:
    store = ImageStore()
    for source in (store.directory, f"{store.directory}/trees", store.root(images.inspect(debian).digest)):
        with pytest.raises(PolicyError, match="own state"):
            ringfence.run("1", policy=Policy(mounts=[Mount(source, target="/data")]))


# ── hostile roots ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def static_program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A program that needs nothing of its root."""
    folder = tmp_path_factory.mktemp("static")
    (folder / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n')
    done = subprocess.run(["gcc", "-static", "-o", str(folder / "hello"), str(folder / "hello.c")], capture_output=True)
    if done.returncode != 0:
        pytest.skip("gcc or the static C library is missing: make system")
    return (folder / "hello").read_bytes()


def bare(store: ImageStore, folder: Path, program: bytes, *more: E) -> str:
    path = folder / "bare.tar"
    path.write_bytes(tar([directory("bin"), E("bin/hello", program, mode=0o755), *more]))
    images.import_image("bare", path)
    return "bare"


def test_an_image_without_python_runs_its_programs_and_says_so_for_code(
    store: ImageStore, tmp_path: Path, static_program: bytes
) -> None:
    with Sandbox(image=bare(store, tmp_path, static_program)) as box:
        assert box.exec(["hello"]).stdout == "hello\n"
        box.files.write("x", "1")
        assert [info.path for info in box.files.list()] == ["x"]
        assert box.exec(["nothing"]).reason == "not-found"
        with pytest.raises(ImageError, match="no Python of its own") as caught:
            box.run("1")
        assert caught.value.fix is not None
    with pytest.raises(ImageError, match="no Python of its own"):
        ringfence.run("1", image="bare")


def test_every_file_operation_works_in_a_root_that_holds_one_program(
    store: ImageStore, tmp_path: Path, static_program: bytes
) -> None:
    with Sandbox(image=bare(store, tmp_path, static_program)) as box:
        box.files.write("a/x.txt", "one\ntwo\n")
        assert [(match.path, match.line) for match in box.files.search("t.o", regex=True)] == [("a/x.txt", 2)]
        for form in ("tar", "zip"):
            packed = b"".join(box.files.pack("a", format=form))
            box.files.unpack(packed, form, format=form)
            assert box.files.read(f"{form}/x.txt") == b"one\ntwo\n"
        box.files.download("a", tmp_path / "out")
        box.files.upload(tmp_path / "out", "back")
        assert [info.path for info in box.files.list("back", recursive=True)] != []
        box.files.rename("a", "b")
        box.files.remove("b", recursive=True)
        with box.files.watch(".") as watch:
            box.files.write("seen", "1")
            assert next(iter(watch)) is not None
        assert box.files.usage().files > 0


def test_nothing_of_a_root_is_imported_by_our_own_processes(
    store: ImageStore, tmp_path: Path, static_program: bytes
) -> None:
    """J19. The root holds modules under every name that our processes use, where the caller's Python looks for its own:
    each would leave a mark on standard error, or fail, if it were imported."""
    poison = b"import os\nos.write(2, b'POISON')\nraise SystemExit(99)\n"
    places = [path.strip("/") for path in sys.path if path.startswith("/")]
    guest = str(SOURCE / "ringfence" / "guest").strip("/")
    names = ("linecache", "traceback", "fnmatch", "re", "json", "stat", "posixpath", "encodings/ascii", "codecs")
    entries = [E(f"{place}/{name}.py", poison) for place in {*places, guest} for name in names]
    entries += [E(f"{guest}/{path.name}", poison) for path in (SOURCE / "ringfence" / "guest").glob("*.py")]
    with Sandbox(image=bare(store, tmp_path, static_program, *entries)) as box:
        result = box.exec(["hello"])
        assert (result.stdout, result.stderr, result.exit_code) == ("hello\n", "", 0)
        box.files.write("x", "1")
        assert [info.path for info in box.files.list(pattern="*")] == ["x"]
        assert box.files.read("x") == b"1"


def test_links_at_the_top_of_a_root_lead_nowhere_outside(
    store: ImageStore, tmp_path: Path, static_program: bytes
) -> None:
    """M10. Nothing is made or mounted behind a link of the image, neither by us nor for a mount of the policy."""
    outside = tmp_path / "outside"
    outside.mkdir()
    shown = tmp_path / "shown"
    shown.mkdir()
    entries = [symlink("data", str(outside)), symlink("home/me", str(outside)), symlink("lib", "../../../../etc")]
    image = bare(store, tmp_path, static_program, directory("home"), *entries)
    with Sandbox(image=image, policy=Policy(mounts=[Mount(shown, target="/data/deep", mode="rw")])) as box:
        assert box.exec(["hello"]).stdout == "hello\n"
    with pytest.raises(PolicyError, match="is a link in image bare"):
        Sandbox(image=image, policy=Policy(mounts=[Mount(shown, target="/home/me/deep", mode="rw")])).start()
    assert list(outside.iterdir()) == []
    assert not os.path.ismount(outside)


def test_an_image_cannot_hide_what_every_sandbox_has(store: ImageStore, tmp_path: Path, static_program: bytes) -> None:
    entries = [
        symlink("proc", "/etc"),
        symlink("dev", "/"),
        symlink("tmp", "/etc"),
        symlink("workspace", "/"),
        E(".mask", b"x"),
        E(".sources/0", b"x"),
        E("dev2", b""),
    ]
    with Sandbox(image=bare(store, tmp_path, static_program, *entries)) as box:
        assert box.exec(["hello"]).stdout == "hello\n"
        box.files.write("/tmp/x", "1")
        assert box.files.read("/proc/self/comm") != b""
        assert box.files.stat("/dev/null").kind != "directory"


_AS_USER = """
import os, sys
import ringfence
from ringfence import Mount, Policy, Sandbox, images
images.import_image("debian", sys.argv[1])
print(ringfence.run("import os; print(os.getuid(), os.environ['GREETING'])", image="debian").stdout, end="")
with Sandbox(image="debian", policy=Policy(mounts=[Mount(sys.argv[2], mode="rw")])) as box:
    print(box.exec(["sh", "-c", f"echo hi > {sys.argv[2]}/f; touch /etc/x 2>&1; id -un"]).stdout, end="")
print(open(f"{sys.argv[2]}/f").read(), end="")
images.remove("debian")
print(images.gc().trees, os.listdir(images.directory() + "/trees"), os.listdir(images.directory() + "/work"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above already run as an ordinary user")
def test_an_ordinary_user_imports_and_runs_an_image(ordinary_user: OrdinaryUser, debian_archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rf-tests-") as folder:
        shared = Path(folder, "debian.tar")
        shutil.copy(debian_archive, shared)
        work = Path(folder, "work")
        work.mkdir()
        os.chown(work, ordinary_user.uid, ordinary_user.gid)
        os.chmod(folder, 0o755)
        done = ordinary_user.run(_AS_USER, str(shared), str(work), timeout_s=120)
    assert (done.returncode, done.stdout) == (
        0,
        "1000 hello\ntouch: cannot touch '/etc/x': Read-only file system\nuser\nhi\n0 [] []\n",
    ), done.stderr


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


def test_what_an_image_cannot_do_is_refused_before_anything_starts(debian: str) -> None:
    with pytest.raises(ImageError, match="no image named 'debain'") as caught:
        ringfence.run("1", image="debain")
    assert caught.value.fix == "did you mean debian?"
    with pytest.raises(UnsupportedError, match="a list of commands"):
        ringfence.run("1", image=debian, policy=Policy(commands=["ls"]))
    with pytest.raises(UnsupportedError, match="preload"):
        ringfence.run("1", image=Image(debian, preload=["json"]))
    with pytest.raises(ImageError, match="is not built, and running a sandbox never builds an image"):
        ringfence.run("1", image=Image(debian, pip=["six"]))
    with pytest.raises(UnsupportedError, match="this machine itself"):
        ringfence.run("1", image=Image("host", pip=["six"]))


def test_variables_of_the_caller_win_over_those_of_the_image(debian: str) -> None:
    code = "import os\nprint(os.environ['GREETING'])"
    assert ringfence.run(code, image=Image(debian, env={"GREETING": "mine"})).stdout == "mine\n"
    policy = Policy(env={"GREETING": "the policy's"})
    assert ringfence.run(code, image=Image(debian, env={"GREETING": "mine"}), policy=policy).stdout == "the policy's\n"


def test_an_image_is_in_use_while_a_sandbox_is_open_and_stored_once_for_ten(debian: str) -> None:
    images.export(debian, Path(ImageStore().directory, "work", "again.tar"))
    images.import_image("again", Path(ImageStore().directory, "work", "again.tar"))
    os.unlink(Path(ImageStore().directory, "work", "again.tar"))
    assert images.inspect("again").digest == images.inspect(debian).digest
    assert len(list(ImageStore().every_tree())) == 1
    boxes = [Sandbox(image="again").start() for _ in range(10)]
    try:
        assert {box.exec(["echo", "x"]).stdout for box in boxes} == {"x\n"}
        assert len(list(ImageStore().every_tree())) == 1
        with pytest.raises(ImageError, match="in use"):
            images.remove("again")
    finally:
        for box in boxes:
            box.close()
    images.remove("again")
    assert [info.name for info in images.list_images()] == [debian]


def test_an_image_that_is_imported_again_is_the_new_one_for_the_next_sandbox(
    store: ImageStore, tmp_path: Path, static_program: bytes
) -> None:
    bare(store, tmp_path, static_program, E("version", b"1"))
    with Sandbox(image="bare") as old:
        assert old.files.read("/version") == b"1"
        bare(store, tmp_path, static_program, E("version", b"2"))
        with Sandbox(image="bare") as new:
            assert new.files.read("/version") == b"2"
        assert old.files.read("/version") == b"1"
        assert images.gc().trees == 0
    assert images.gc().trees == 1
