"""Git's configuration, read as git does, and the settings that lead to files of a writable mount."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ringfence.plan.rootfs.protected import named_by, settings

WRITTEN = {
    "plain": "[core]\n\thooksPath = tools/hooks\n",
    "one line": '[core] hookspath = "tools/hooks" ; why\n',
    "comments": '# [core] \\\n[core] # a = b\n;x = y\nhooksPath=a b # c\n  sshCommand = "a # b" c\n',
    "quotes": '[core]\nhooksPath = "a\\"b" \\\\c\\td\n',
    "continued": "[core]\nhooksPath = a\\\n  b\\\nc\neditor = x\n",
    "subsections": '[includeIf "gitdir:a]b\\"c"]\n\tpath = one\n[include]\npath = two\n[branch.x]\nremote = o\n',
    "other lines": '\ufeff[core]\r\n\tbare\r\n\thooksPath = x\r\n[a "b"]c=d\r\n',
    "blanks": "[core]\n   hooksPath   =   a  b   \n",
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_it_is_read_as_git_reads_it(tmp_path: Path, text: str) -> None:
    config = tmp_path / "config"
    config.write_bytes(text.encode())
    listed = subprocess.run(
        ["git", "config", "-z", "-l", "-f", config], capture_output=True, check=True
    ).stdout.decode()
    theirs = [row.partition("\n") for row in listed.split("\0") if "\n" in row]
    wanted = [(key.partition(".")[0], key.rpartition(".")[2], value) for key, _, value in theirs]
    assert list(settings(text.removeprefix("\ufeff"))) == wanted
    assert wanted


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("GIT_CONFIG_GLOBAL", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(tmp_path / "none"))
    return tmp_path / "home"


def test_what_is_included_is_read_too_and_a_circle_ends(home: Path, tmp_path: Path) -> None:
    config, more = tmp_path / "config", tmp_path / "more"
    config.write_text("[include]\npath = more\n")
    more.write_text("[include]\npath = config\n[core]\nhooksPath = ~/hooks\n")
    found = list(named_by([str(config)], "/tree"))
    assert found == [
        ("include.path", str(more)),
        ("include.path", str(config)),
        ("core.hooksPath", f"{home}/hooks"),
    ]


@pytest.mark.parametrize("name", [".gitconfig", ".config/git/config"])
def test_the_users_own_hooks_path_means_a_folder_of_the_repository(home: Path, name: str) -> None:
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_text("[core]\nhooksPath = .hooks\n")
    assert list(named_by([], "/tree")) == [("core.hooksPath", "/tree/.hooks")]


def test_what_cannot_be_read_names_nothing(home: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert list(named_by([str(tmp_path / "folder"), "/dev/null", str(tmp_path / "missing")], "/tree")) == []
