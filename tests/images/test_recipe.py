"""Recipes: every mistake has its line, and what a recipe says of the host's configuration stays there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import images
from ringfence.errors import ImageError, PolicyError, UnsupportedError
from ringfence.host import programs
from ringfence.images import builder, packages
from ringfence.images.builder import Recipe, RecipeFile, load, loads
from ringfence.images.store import ImageStore

WHOLE = """
base = "debian:stable"
apt = ["git"]
pip = ["numpy==2.1"]
npm = ["typescript"]
preload = ["numpy"]
user = "agent"

[env]
LANG = "C"

[[files]]
source = "tool"
target = "/usr/local/bin/tool"
"""


def test_a_recipe_with_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("x")
    (tmp_path / "r.toml").write_text(WHOLE)
    recipe = load(tmp_path / "r.toml")
    assert recipe == Recipe(
        base="debian:stable",
        apt=("git",),
        pip=("numpy==2.1",),
        npm=("typescript",),
        preload=("numpy",),
        user="agent",
        env={"LANG": "C"},
        files=(RecipeFile(str(tmp_path / "tool"), "/usr/local/bin/tool"),),
    )


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ('base = "debian"\n\naptt = ["git"]\n', 3, "unknown key 'aptt'", 'did you mean "apt"?'),
        ("x = 1\n", 1, "unknown key 'x'", "a recipe has: base, apt, pip, npm, env, preload, user, files"),
        ('apt = "git"\n', 1, "apt", None),
        ('\napt = ["--force"]\n', 2, "not the name of a package", None),
        ('apt = ["a,b"]\n', 1, "no name of a Debian package", None),
        ('pip = ["-r x"]\n', 1, "not the name of a package", None),
        ('base = "debian:-x"\n', 1, "is no base", None),
        ('base = "ubuntu:24"\n', 1, "is no base", None),
        ('user = "root"\n', 1, "cannot be called", None),
        ('[env]\n"A=B" = "x"\n', 1, "env", None),
        ('[[files]]\nsource = "x"\n', 1, "needs a source and a target", None),
        ('[[files]]\nsource = "x"\ntarget = "/x"\nmode = "1"\n', 4, "unknown key 'mode'", None),
        ('[[files]]\nsource = "missing"\ntarget = "/x"\n', 1, "is not there", None),
        ('[[files]]\nsource = "."\ntarget = "/a/../b"\n', 1, "is no place inside", None),
        ("files = 3\n", 1, "must be a list of tables", None),
        ('apt = ["git"\n', None, "not TOML", None),
    ],
)
def test_a_mistake_is_said_with_its_line(
    text: str, line: int | None, what: str, fix: str | None, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match=what) as caught:
        loads(text, str(tmp_path))
    if line is not None:
        assert caught.value.line == line
    if fix is not None:
        assert caught.value.fix == fix


@pytest.mark.parametrize("name", builder.NAMES)
def test_a_preset_is_a_recipe(name: str) -> None:
    recipe = builder.recipe_of_preset(name)
    assert {"git", "curl", "ripgrep"} <= set(recipe.apt)
    assert ("python3" in recipe.apt) == (name != "node")
    assert ({"numpy", "pandas", "matplotlib", "requests"} <= set(recipe.pip)) == (name in ("data", "polyglot"))
    assert ("nodejs" in recipe.apt) == (name in ("node", "polyglot"))


def test_bad_arguments_of_build_start_nothing(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="a recipe or from a preset"):
        images.build("x")
    with pytest.raises(PolicyError, match="no preset named 'pythn'"):
        images.build("x", preset="pythn")
    with pytest.raises(ImageError, match="this machine itself"):
        images.build("host", preset="python")
    with pytest.raises(FileNotFoundError):
        images.build("x", tmp_path / "missing.toml")
    with pytest.raises(ImageError, match="no image named 'base'"):
        images.build("x", Recipe(base="base"))
    assert not Path(store.directory).exists()


def test_without_mmdebstrap_building_says_what_to_install(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UnsupportedError, match="needs mmdebstrap") as caught:
        images.build("x", preset="python")
    assert caught.value.fix == "sudo apt-get install mmdebstrap"


def test_sources_of_the_release_are_taken_from_both_forms_of_the_hosts_apt() -> None:
    one_line = "# x\ndeb [arch=amd64 signed-by=/k.gpg] http://a/debian  rel main\ndeb http://b/debian other main\n"
    stanzas = (
        "Types: deb deb-src\nURIs: http://c/debian\nSuites: rel rel-updates other\nComponents: main\n"
        "Signed-By: /k.gpg\n\nTypes: deb\nURIs: http://d\nSuites: rel\nEnabled: no\n"
    )
    wanted = {"rel", "rel-updates", "rel-security"}
    assert packages._one_lines(one_line, wanted) == ["deb [arch=amd64 signed-by=/k.gpg] http://a/debian rel main"]
    assert packages._stanzas(stanzas, wanted) == [
        "deb [signed-by=/k.gpg] http://c/debian rel main",
        "deb [signed-by=/k.gpg] http://c/debian rel-updates main",
    ]


def test_a_recipe_plus_packages_names_each_once() -> None:
    assert Recipe(pip=("a", "b")).plus(pip=("b", "c"), apt=("x",)) == Recipe(pip=("a", "b", "c"), apt=("x",))
