"""npm packages of a recipe: what comes from a registry or from the recipe's own files, nothing else of this host."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from ringfence import ImageError
from ringfence.images.packages import add_npm
from ringfence.images.tree import ImageTree


@pytest.fixture
def tree(tmp_path: Path) -> ImageTree:
    if shutil.which("npm") is None or shutil.which("git") is None:
        pytest.skip("npm or git is not installed")
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "scratch folder").mkdir()
    return ImageTree(str(root))


def package(at: Path, needs: dict[str, str]) -> str:
    """Return the archive of a package in the form of a registry."""
    text = json.dumps({"name": at.stem, "version": "1.0.0", "dependencies": needs}).encode()
    with tarfile.open(at, "w:gz") as tar:
        entry = tarfile.TarInfo("package/package.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    return str(at)


def repository(at: Path) -> str:
    """Make a git repository on this host that is private to its user."""
    at.mkdir()
    (at / "package.json").write_text('{"name": "private", "version": "1.0.0"}')
    (at / "secret").write_text("private\n")
    git = ["git", "-C", str(at), "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return f"git+file://{at}"


def install(tree: ImageTree, tmp_path: Path, name: str) -> list[str]:
    with tree:
        tree.begin_layer()
        add_npm(tree, (name,), str(tmp_path / "scratch folder"), lambda _: None)
    return sorted(str(path.relative_to(tree.directory)) for path in Path(tree.directory).rglob("*") if path.is_file())


def test_an_archive_that_a_recipe_names_is_installed(tree: ImageTree, tmp_path: Path) -> None:
    assert install(tree, tmp_path, package(tmp_path / "plain.tgz", {})) == [
        "usr/local/lib/node_modules/plain/package.json"
    ]


def test_a_repository_of_this_host_that_a_package_needs_does_not_come_into_the_image(
    tree: ImageTree, tmp_path: Path
) -> None:
    """git is a program that npm starts, on an address that a stranger's package names."""
    name = package(tmp_path / "needing.tgz", {"private": repository(tmp_path / "mine")})
    with pytest.raises(ImageError, match="npm found what no registry has; nothing was kept") as caught:
        install(tree, tmp_path, name)
    assert caught.value.code == "package-source"
    assert list(Path(tree.directory).rglob("secret")) == []
