"""Paths that a caller names: which links are followed on the way, and what is said of the others."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from accounts import OrdinaryUser
from ringfence.policy import host_paths
from ringfence.policy.host_paths import LinkError, open_itself, open_parent, resolve

AS_ROOT = os.geteuid() == 0


def refused(path: str) -> LinkError:
    """Return the error of every function that opens or resolves the path; all must be the same."""
    errors = []
    for call in (resolve, host_paths.without_links, open_parent, lambda path: open_itself(path, os.O_RDONLY)):
        with pytest.raises(LinkError) as caught:
            call(path)
        errors.append(caught.value)
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def test_what_is_no_link_is_found_and_opened(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_text("x")
    for path in ("d/f", "d/../d/./f", "d//f"):
        where, info = resolve(f"{tmp_path}/{path}")
        assert (where, info.st_ino) == (f"{tmp_path}/d/f", (tmp_path / "d/f").stat().st_ino)
        fd = open_itself(f"{tmp_path}/{path}", os.O_RDONLY)
        assert os.read(fd, 9) == b"x"
        os.close(fd)
    folder, name = open_parent(f"{tmp_path}/d/new")
    assert (os.fstat(folder).st_ino, name) == ((tmp_path / "d").stat().st_ino, "new")
    os.close(folder)
    assert (resolve("/")[0], resolve("/..")[0], resolve(f"{tmp_path}/d/..")[0]) == ("/", "/", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nothing"):
        resolve(f"{tmp_path}/nothing/there")
    with pytest.raises(NotADirectoryError):
        resolve(f"{tmp_path}/d/f/x")


@pytest.mark.parametrize("path", ["link", "way/f", "link/../other/f", "deep/way/f", "dangling", "dangling/f", "round"])
def test_a_link_that_a_guest_could_have_made_is_refused_wherever_it_lies(tmp_path: Path, path: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "other/f").write_text("private")
    (tmp_path / "link").symlink_to("other/f")
    (tmp_path / "way").symlink_to(tmp_path / "other")
    (tmp_path / "deep/way").symlink_to("../other")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "round").symlink_to("round")
    error = refused(f"{tmp_path}/{path}")
    first = path.split("/", maxsplit=1)[0] if not path.startswith("deep") else "deep/way"
    target = os.readlink(tmp_path / first)
    assert error.strerror == f"{tmp_path}/{first} is a link to {target}, and a guest could have made it"
    assert error.fix == f"name {os.path.realpath(tmp_path / path)} itself, if that is what you mean"
    assert os.strerror(error.errno or 0) == "Too many levels of symbolic links"


def test_a_path_starts_where_we_are_whatever_that_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real/sub").mkdir(parents=True)
    (tmp_path / "alias").symlink_to("real")
    monkeypatch.chdir(tmp_path / "alias")
    for path, found in (("sub", "real/sub"), (".", "real"), ("..", "."), ("../real/sub", "real/sub")):
        assert resolve(path)[0] == os.path.normpath(tmp_path / found)
    refused("../alias/sub")


def test_the_ways_that_only_root_can_make_are_followed() -> None:
    links = [path for path in ("/bin", "/var/run", "/var/lock", "/etc/os-release") if os.path.islink(path)]
    for path in links:
        assert resolve(path)[0] == os.path.realpath(path)
    assert links, "this host has none of them"


def test_a_link_through_proc_is_refused_and_a_descriptor_is_that_very_one(tmp_path: Path) -> None:
    refused(f"/proc/self/cwd{tmp_path}")
    with (tmp_path / "f").open("w") as file:
        file.write("before ")
        file.flush()
        for folder in ("/dev/fd", "/proc/self/fd"):
            fd = open_itself(f"{folder}/{file.fileno()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(fd, b"more ")
            os.close(fd)
        with pytest.raises(OSError, match="other direction"):
            open_itself(f"/dev/fd/{file.fileno()}", os.O_RDONLY)
    assert (tmp_path / "f").read_text() == "before more more "
    with pytest.raises(OSError, match="Bad file descriptor"):
        open_itself("/dev/fd/9999", os.O_WRONLY)


def test_what_a_guest_named_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("\x1b]0;x\n\udcff")
    assert "a link to \\x1b]0;x\\n\\xff, and" in str(refused(f"{tmp_path}/link"))


def test_a_link_made_after_the_look_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside").write_text("private")
    (tmp_path / "link").symlink_to("outside")
    monkeypatch.setattr(host_paths._Way, "_link", lambda *_: None)
    for flags in (os.O_RDONLY, os.O_PATH, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
        with pytest.raises(LinkError):
            open_itself(f"{tmp_path}/link", flags)
    assert (tmp_path / "outside").read_text() == "private"


@pytest.fixture
def of_root() -> Iterator[Path]:
    """Make a folder that only root may write to."""
    if not AS_ROOT:
        pytest.skip("makes folders of root's")
    folder = Path(tempfile.mkdtemp(prefix="rf-links-", dir="/opt"))
    folder.chmod(0o755)
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real")
    yield folder
    shutil.rmtree(folder)


ASK = """
import sys
from ringfence.policy.host_paths import resolve
for path in sys.argv[1:]:
    try:
        print(resolve(path)[0])
    except OSError as error:
        print(error.strerror)
"""


def test_roots_links_are_followed_for_a_user_where_only_root_writes(of_root: Path, ordinary_user: OrdinaryUser) -> None:
    """For root the links are not followed: root's guests write files that look like root's."""

    def asked(path: Path) -> str:
        return ordinary_user.run(ASK, str(path)).stdout.strip()

    refused_ = f"{of_root}/link is a link to real, and a guest could have made it"
    assert (asked(of_root / "link"), str(refused(f"{of_root}/link").strerror)) == (f"{of_root}/real", refused_)
    for mode in (0o775, 0o757, 0o1777):
        of_root.chmod(mode)
        assert asked(of_root / "link") == refused_
    of_root.chmod(0o755)
    (of_root / "of-user").mkdir()
    (of_root / "of-user/of-root").mkdir()
    (of_root / "of-user/of-root/link").symlink_to("/usr")
    os.chown(of_root / "of-user", ordinary_user.uid, ordinary_user.gid)  # a user that may replace the link
    assert "is a link to /usr" in asked(of_root / "of-user/of-root/link")
