"""The scan of a writable mount reports links that lead out, and files that another program's Python would import."""

from __future__ import annotations

import ast
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accounts import OrdinaryUser, let_others_through
from ringfence.host import mount_scan
from ringfence.host.mount_scan import Before, end_scan, snapshot_before


def settle() -> None:
    """Wait until the files are older than a clock tick, as a project's files are when a sandbox starts."""
    time.sleep(0.05)


def scanned(folder: Path, work: Callable[[], object]) -> list[tuple[str, str]]:
    """Return code and path of each finding."""
    before = snapshot_before(str(folder))
    work()
    return [(one.code, os.path.relpath(one.target, folder)) for one in end_scan(str(folder), before)]


def told(folder: Path, work: Callable[[], object]) -> list[tuple[str, str]]:
    """Return code and message of each finding."""
    before = snapshot_before(str(folder))
    work()
    return [(one.code, one.message) for one in end_scan(str(folder), before)]


def test_a_link_is_reported_by_name_and_by_where_it_leads_and_never_followed(tmp_path: Path) -> None:
    """L15-report"""
    folder = tmp_path / "project"
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".mcp.json").write_text("")
    (folder / "old").symlink_to(outside / "of the user's")
    settle()

    def work() -> None:
        (folder / ".vscode").symlink_to(outside)
        (folder / "other").symlink_to(outside)

    held, out = told(folder, work)
    said = (
        f".vscode appeared or changed, and leads out of the mount to {outside}, as does 1 more; "
        "a program on the host that follows it reads or writes there"
    )
    assert (held[0], out) == ("mount.protected-name", ("mount.link-out", said))


WAYS_OUT = {
    "absolute": "/elsewhere/file",
    "up": "../sibling",
    "d/deep": "../../sibling",
    "d/crooked": "e/../../../sibling",
    "beside": "project2",
    "by-old": "old-out/file",  # a link that was there, and leads out itself
    "dots": "d/back/../../sibling",  # `back` leads to the top
}
WAYS_IN = {
    "in": "d/e/file",
    "d/up": "../d/e",
    "self": ".",
    "d/e/top": "../..",
    "missing": "nothing/here",
    "round": "round",
    "one": "two",
    "two": "one",
    "by-old-in": "d/back/d/e",
    "lexically": "d/e/../e/../../in",
}


def test_of_new_links_those_that_lead_out_are_told_by_where_they_lead(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "d/e").mkdir(parents=True)
    (folder / "old-out").symlink_to("/elsewhere")
    (folder / "d/back").symlink_to("..")
    settle()

    def work() -> None:
        for name, target in (WAYS_OUT | WAYS_IN).items():
            (folder / name).symlink_to(f"{folder}2" if target == "project2" else target)
        (folder / "whole").symlink_to(f"{folder}/d")
        (folder / "by-new").symlink_to("absolute")  # its target is reported already
        (folder / "d/e/by-new").symlink_to("../../up/x")

    found = end_scan(str(folder), snapshot_before(str(folder)))
    assert found == ()
    before = snapshot_before(str(folder))
    work()
    found = end_scan(str(folder), before)
    assert {one.code for one in found} == {"mount.link-out"}
    places = {
        one.target[len(str(folder)) + 1 :]: one.message.split(" to ")[1].split(",")[0].split(";")[0] for one in found
    }
    outside = str(tmp_path / "sibling")
    assert places == {
        "absolute": "/elsewhere/file",
        "beside": f"{folder}2",
        "by-old": "/elsewhere",
        "d/crooked": outside,
        "dots": str(tmp_path.parent / "sibling"),
    }
    (one,) = (one for one in found if f"{outside}," in one.message)
    assert "as do 2 more" in one.message


def test_links_to_the_hosts_programs_are_told_to_root_alone(tmp_path: Path, ordinary_user: OrdinaryUser) -> None:
    """A virtual environment has them, and a user can change nothing there."""
    (tmp_path / "python").symlink_to("/usr/bin/python3")
    code = """
import sys
from ringfence.host.mount_scan import Before, end_scan
print([one.code for one in end_scan(sys.argv[1], Before(at_ns=0)) if one.code != "mount.scan-cut"])
"""
    let_others_through(tmp_path)
    assert ordinary_user.run(code, str(tmp_path)).stdout == "[]\n"
    if os.geteuid() == 0:
        assert [one.code for one in end_scan(str(tmp_path), Before(at_ns=0))] == ["mount.link-out"]


def test_a_flood_of_links_hides_none_that_leads_to_something(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "private").write_text("")

    def work() -> None:
        for number in range(1500):
            (folder / f"{number}").symlink_to(f"/nothing/{number}")
            (folder / f"a{number}").symlink_to("/nothing/0")
        (folder / "999").unlink()
        (folder / "999").symlink_to(tmp_path / "private")
        (folder / ".envrc").symlink_to("/nothing/0")

    found = told(folder, work)
    assert len(found) == 102
    assert found[0][0] == "mount.protected-name"  # another kind hides none either
    assert found[1][1].startswith(f"999 appeared or changed, and leads out of the mount to {tmp_path}/private;")
    assert "as do 1501 more" in found[2][1]
    assert found[-1] == ("mount.scan-cut", "not listed are 902 mount.link-out more")


def test_links_that_came_to_lead_out_by_a_move_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "a/b/c").mkdir(parents=True)
    for name in ("one", "two"):
        (folder / "a/b/c" / name).symlink_to("../../../private")
    (folder / "a/b/c/down").symlink_to("x")
    (folder / "top").symlink_to("../private")
    settle()
    assert told(folder, lambda: (folder / "new").write_text("")) == []
    ((code, message),) = told(folder, lambda: (folder / "a/b/c").rename(folder / "c"))
    said = (
        "2 links, the first of them c/one, lead out of the mount and are older than the sandbox; their folder changed, "
        "and may have been moved"
    )
    assert (code, message) == ("mount.link-out", said)


SHADOWING = ("hashlib.py", "json.pyc", "_json.so", "zlib.cpython-311-x86_64-linux-gnu.so", "h11.abi3.so", "lib/ssl.py")
NO_SHADOW = ("mine.py", "hashlib", "hashlib.txt", "deep/hashlib.py", "json.py.bak", "h11.toml", "re/nothing.py")


def test_new_files_that_python_would_import_for_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12-report: at the mount's top, and in a folder of it that is on our path."""
    for name in ("lib", "deep", "old"):
        (tmp_path / name).mkdir()
    (tmp_path / "lib/old").symlink_to(tmp_path / "old")
    (tmp_path / "types.py").write_text("")  # the user's own
    (tmp_path / "calendar").mkdir()
    (tmp_path / "calendar/__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "lib")])
    settle()

    def work() -> None:
        for name in (*SHADOWING, *NO_SHADOW):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("evil")
        (tmp_path / "datetime").mkdir()
        (tmp_path / "datetime/__init__.py").write_text("evil")
        (tmp_path / "old/__init__.py").write_text("evil")
        (tmp_path / "old").rename(tmp_path / "random")  # a package by its new name
        (tmp_path / "random.py").symlink_to("mine.py")
        (tmp_path / "lib/secrets").symlink_to("../deep")

    found = scanned(tmp_path, work)
    assert {code for code, _ in found} == {"mount.import-shadow"}
    assert sorted(path for _, path in found) == sorted((*SHADOWING, "datetime", "random", "random.py", "lib/secrets"))
    settle()
    assert scanned(tmp_path, lambda: (tmp_path / "deep/x").write_text("")) == []


def test_every_package_that_is_imported_by_name_is_known_to_the_scan() -> None:
    """Compares the packages that Ringfence needs or can use, and their dependencies."""
    source = Path(mount_scan.__file__).parents[1]
    trees = [ast.parse(path.read_text()) for path in source.rglob("*.py")]
    names = {
        name.split(".")[0]
        for node in (node for tree in trees for node in ast.walk(tree))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    assert names - sys.stdlib_module_names - mount_scan.IMPORTED - OF_OTHER_PYTHONS == set()


OF_OTHER_PYTHONS = {"_sha2", "_sha256", "compression"}
