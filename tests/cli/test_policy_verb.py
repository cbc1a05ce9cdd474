"""ringfence policy: check, explain, show and list, for people and for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence.cli import main
from ringfence.policy import Mount, Network, Policy
from ringfence.policy.secrets import reveal
from ringfence.values import replace


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "good.toml").write_text("version = 1\nstrict = true\n")
    (tmp_path / "bad.toml").write_text('version = 1\n[limits]\nmemroy = 1\ntimeout_s = 0\n[network]\nallow = "a.com"\n')
    return tmp_path


def test_check_of_a_good_policy(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", "good.toml"]) == 0
    assert capfd.readouterr() == ("good.toml: no mistakes\n", "")


def test_check_reports_every_mistake_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", "bad.toml"]) == 1
    said = capfd.readouterr()
    assert said.out == ""
    places = [line.split(": ")[1] for line in said.err.splitlines()]
    assert places == ["bad.toml:3", "bad.toml:4", "bad.toml:6"]
    assert 'did you mean "memory"?' in said.err.splitlines()[0]


def test_check_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", "bad.toml", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert (found["file"], found["ok"]) == ("bad.toml", False)
    assert [(each["line"], each["key"]) for each in found["mistakes"]] == [
        (3, "limits.memroy"),
        (4, "limits.timeout_s"),
        (6, "network.allow"),
    ]
    assert main(["policy", "check", "--json", "good.toml"]) == 0
    assert json.loads(capfd.readouterr().out) == {"file": "good.toml", "ok": True, "mistakes": []}


def test_a_file_that_is_no_text_is_a_mistake(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "bin.toml").write_bytes(b"\xff\xfe")
    assert main(["policy", "check", "bin.toml"]) == 1
    assert "is not UTF-8 text" in capfd.readouterr().err


def test_a_folder_is_no_policy(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "dir.toml").mkdir()
    assert main(["policy", "check", "dir.toml"]) == 2
    assert capfd.readouterr().err.startswith("ringfence: 'dir.toml' is a folder, not a policy file\n")


def test_explain_is_the_policys_own_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "explain", "hostile"]) == 0
    assert capfd.readouterr().out.rstrip("\n") == Policy.preset("hostile").explain().rstrip("\n")
    assert main(["policy", "explain", "hostile", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert "\n".join(found["explain"]) == Policy.preset("hostile").explain().rstrip("\n")
    assert (found["policy"], found["digest"]) == ("hostile", Policy.preset("hostile").digest)


@pytest.mark.parametrize("name", ["offline", "dev", "hostile"])
def test_show_prints_a_preset_that_loads_back(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show", name]) == 0
    assert Policy.loads(capfd.readouterr().out) == find_preset(name)


def find_preset(name: str) -> Policy:
    return {preset: Policy.preset(preset) for preset in ("offline", "dev", "hostile")}[name]


def test_show_prints_what_options_add_up_to(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = "policy show --rw . --allow-net api.example.com --memory 1G -e A=1 --hide .env --strict"
    assert main(line.split()) == 0
    dev = Policy.preset("dev")
    assert Policy.loads(capfd.readouterr().out) == dev.replace(
        mounts=[Mount(str(folder), mode="rw", hide=[".env"])],
        network=Network(allow=["api.example.com"]),
        limits=replace(dev.limits, memory="1G"),
        env={"A": "1"},
        strict=True,
    )


def test_show_of_a_secret_prints_where_it_comes_from_and_never_the_value(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RF_TEST_TOKEN", "s3cr3t-value")
    assert main(["policy", "show", "--allow-net", "a.com", "--secret", "RF_TEST_TOKEN@a.com"]) == 0
    toml = capfd.readouterr().out
    assert "s3cr3t" not in toml
    assert reveal(Policy.loads(toml).secrets[0]) == "s3cr3t-value"


def test_list_names_presets_and_ones_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = folder / ".config/ringfence/policies"
    own.mkdir(parents=True)
    (own / "shop.toml").write_text("version = 1\n")
    (own / "dev.toml").write_text("version = 1\n")
    (own / "notes.txt").write_text("")
    assert main(["policy", "list"]) == 0
    said = capfd.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["offline", "dev", "hostile", "shop"]
    assert said.err == f"ringfence: {own}/dev.toml is never used by name: dev is a preset; rename it\n"
    assert main(["policy", "list", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["policies"]
    assert [(row["name"], row["kind"], row["file"]) for row in rows] == [
        ("offline", "preset", None),
        ("dev", "preset", None),
        ("hostile", "preset", None),
        ("shop", "own", f"{own}/shop.toml"),
    ]
