"""ringfence image: what each action says and does, for people and for programs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from ringfence import images
from ringfence.cli import main


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the archive of a root file system with a single program, and use an empty store."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "root.tar"
    with tarfile.open(path, "w") as tar:
        entry = tarfile.TarInfo("bin/tool")
        entry.mode, entry.size = 0o4755, 3
        tar.addfile(entry, io.BytesIO(b"xyz"))
    return path


def said(capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    found = capfd.readouterr()
    return found.out, found.err


def test_an_image_goes_in_is_listed_shown_exported_and_removed(
    archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["image", "list"]) == 0
    assert said(capfd)[0].splitlines() == [
        "host  this machine's programs, read-only; always there",
        "to add one: ringfence image build data --preset data",
    ]
    assert main(["image", "import", "tools", str(archive)]) == 0
    out, err = said(capfd)
    digest = images.inspect("tools").digest
    assert out.startswith(f"tools  {digest[:12]}  ")
    assert "ringfence: 1 set-uid and set-gid bits left out\n" in err
    assert main(["image", "list"]) == 0
    assert said(capfd)[0].splitlines()[1].startswith(f"tools  {digest[:12]}")
    assert main(["image", "inspect", "tools"]) == 0
    assert f"digest  sha256:{digest}\n" in said(capfd)[0]
    assert main(["image", "export", "tools", str(tmp_path / "out.tar")]) == 0
    assert main(["image", "import", "again", str(tmp_path / "out.tar")]) == 0
    assert images.inspect("again").digest == digest
    assert main(["image", "remove", "tools", "again", "--yes"]) == 0
    assert main(["image", "gc", "--yes"]) == 0
    assert said(capfd)[0].splitlines()[-1].startswith("0 trees removed")
    assert images.list_images() == []


def test_json_of_every_action_is_one_document(archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "import", "one", str(archive), "--json"]) == 0
    made = json.loads(said(capfd)[0])
    assert made == images.inspect("one").to_dict()
    assert main(["image", "inspect", "one", "--json"]) == 0
    assert json.loads(said(capfd)[0]) == made
    assert main(["image", "list", "--json"]) == 0
    assert json.loads(said(capfd)[0]) == {"directory": images.directory(), "images": [made]}
    assert main(["image", "remove", "one", "--yes", "--json"]) == 0
    assert json.loads(said(capfd)[0]) == {"removed": ["one"]}
    assert main(["image", "inspect", "one", "--json"]) == 125
    error = json.loads(said(capfd)[0])["error"]
    assert (error["code"], error["message"]) == ("image-unknown", "no image named 'one'")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ([], 2, "image needs to know what to do"),
        (["lst"], 2, "did you mean: ringfence image list?"),
        (["list", "x"], 2, "image list takes no 'x'"),
        (["import", "x"], 2, "write: ringfence image import NAME SOURCE"),
        (["import", "x", "/missing.tar"], 125, "there is no '/missing.tar' to import"),
        (["import", "host", "/"], 125, "is this machine itself"),
        (["import", "a/b", "/"], 2, "is not the name of an image"),
        (["build", "x"], 2, "build needs a recipe or a preset"),
        (["build", "x", "r.toml", "--preset", "data"], 2, "a recipe and a preset"),
        (["build", "x", "--preset", "dta"], 2, "did you mean --preset data?"),
        (["build", "x", "/missing.toml"], 125, "No such file or directory"),
        (["inspect", "host"], 2, "this machine itself"),
        (["inspect", "nothing"], 125, "no image named 'nothing'"),
        (["remove"], 2, "image remove needs a NAME"),
        (["remove", "host", "--yes"], 2, "cannot be removed"),
        (["remove", "nothing", "--yes"], 125, "no image named 'nothing'"),
        (["remove", "one"], 2, "to do it without a question: --yes"),
        (["gc"], 2, "to do it without a question: --yes"),
        (["list", "--yes"], 2, "image list takes no --yes"),
        (["prepare", "one"], 125, "image prepare is not in this version"),
        (["prepare", "one", "--for", "vm"], 125, "image prepare is not in this version"),
        (["export", "one", "/nonexistent/x.tar"], 125, "No such file or directory"),
    ],
)
def test_a_mistake_is_said_with_what_to_do(
    line: list[str], code: int, message: str, archive: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images.import_image("one", archive)
    assert main(["image", *line]) == code
    out, err = said(capfd)
    assert (out, message in err) == ("", True), err
    assert [info.name for info in images.list_images()] == ["one"]


def test_a_recipes_mistake_names_its_line(archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text('base = "debian"\n\naptt = ["git"]\n')
    assert main(["image", "build", "x", str(tmp_path / "r.toml")]) == 2
    assert said(capfd)[1] == ("ringfence: line 3: unknown key 'aptt' in the recipe\nringfence: did you mean \"apt\"?\n")


def test_an_unknown_image_of_a_run_is_said_with_the_near_one(archive: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images.import_image("tools", archive)
    assert main(["exec", "--image", "tolls", "--", "true"]) == 125
    assert said(capfd)[1] == "ringfence: no image named 'tolls'\nringfence: did you mean tools?\n"
