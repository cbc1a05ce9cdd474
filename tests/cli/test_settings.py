"""Sandbox options become a policy: the base first, the options on top, compared as whole values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.cli.console import Console, Problem
from ringfence.cli.options import LIMITS, exec_table
from ringfence.cli.settings import Settings, find_policy
from ringfence.policy import Limits, Mount, Network, Policy, Secret
from ringfence.values import replace


def settings(*argv: str) -> Settings:
    given = exec_table().parse([*argv, "--", "true"], Console())
    assert given is not None
    return Settings(given, "dev")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "shop"
    (here / "data").mkdir(parents=True)
    (here / "data" / ".env").write_text("x")
    (here / "odd:/name").mkdir(parents=True)
    (here / "a.csv").write_text("1")
    (tmp_path / "link").symlink_to(here / "data")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    return here


def test_without_options_it_is_the_preset() -> None:
    assert settings().policy == Policy.preset("dev")


def test_every_key_of_limits_is_known_to_limit() -> None:
    assert tuple(LIMITS) == Limits.__fields__


def test_every_limit_can_be_set() -> None:
    words = "timeout_s=5 cpu_time_s=6.5 cpus=0.5 memory=64M processes=7 open_files=80 disk=9M disk_files=10 output=11K"
    argv = [f"--limit={word}" for word in [*words.split(), "lifetime_s=12", "idle_s=13", "on_idle=pause"]]
    assert settings(*argv).policy.limits == Limits(
        timeout_s=5,
        cpu_time_s=6.5,
        cpus=0.5,
        memory="64M",
        processes=7,
        open_files=80,
        disk="9M",
        disk_files=10,
        output="11K",
        lifetime_s=12,
        idle_s=13,
        on_idle="pause",
    )


def test_the_last_of_two_wins() -> None:
    dev = Policy.preset("dev").limits
    chosen = settings("--memory", "1G", "--limit", "memory=2G", "--memory", "3G").policy.limits
    assert chosen == replace(dev, memory="3G")


def test_a_longer_time_is_not_cut_short_by_another_clock() -> None:
    dev = Policy.preset("dev").limits
    assert settings("--timeout", "86400").policy.limits == replace(
        dev, timeout_s=86400, cpu_time_s=86400, lifetime_s=86400
    )
    assert settings("--timeout", "5").policy.limits == replace(dev, timeout_s=5)
    named = settings("--timeout", "86400", "--limit", "cpu_time_s=9").policy.limits
    assert named == replace(dev, timeout_s=86400, cpu_time_s=9, lifetime_s=86400)


def test_paths_are_made_whole_and_keep_their_place(folder: Path) -> None:
    mounts = settings("--ro", "a.csv", "--rw", ".", "--copy", "data:/data", "--ro", "/usr/share").policy.mounts
    assert mounts == (
        Mount(str(folder / "a.csv"), mode="ro"),
        Mount(str(folder), mode="rw"),
        Mount(str(folder / "data"), "/data", mode="copy"),
        Mount("/usr/share", mode="ro"),
    )


def test_a_path_with_a_colon_that_exists_wins(folder: Path) -> None:
    assert settings("--ro", "odd:/name").policy.mounts == (Mount(f"{folder}/odd:/name", mode="ro"),)


def test_dots_are_resolved_where_they_cross_a_link(folder: Path) -> None:
    # Lexically ../shop/link/.. would be shop; the kernel says it is where that leads. A guest could have made it (L16).
    (folder / "link").symlink_to("/usr/bin")
    for path in ("link/..", "../link/..", "../link"):
        with pytest.raises(Problem, match=r"is a link to .*, and a guest could have made it") as caught:
            settings("--ro", path)
        assert caught.value.fix == f"name {os.path.realpath(path)} itself, if that is what you mean"
    assert settings("--ro", "../shop/data/..").policy.mounts == (Mount(str(folder), mode="ro"),)
    if os.path.islink("/bin"):
        assert settings("--ro", "/bin/..").policy.mounts == (Mount("/usr", mode="ro"),)


def test_hide_goes_to_the_mount_that_shows_the_path(folder: Path) -> None:
    mounts = settings("--rw", ".", "--ro", "data", "--hide", "data/.env", "--hide", ".env").policy.mounts
    assert mounts == (
        Mount(str(folder), mode="rw", hide=(".env",)),
        Mount(str(folder / "data"), mode="ro", hide=(".env",)),
    )


def test_hide_goes_to_every_mount_that_shows_the_path(folder: Path) -> None:
    mounts = settings("--copy", ".", "--ro", "data:/cfg", "--hide", "data/.env").policy.mounts
    assert mounts == (
        Mount(str(folder), mode="copy", hide=("data/.env",)),
        Mount(str(folder / "data"), "/cfg", mode="ro", hide=(".env",)),
    )


def test_hide_finds_what_is_shown_through_a_link(folder: Path) -> None:
    (folder / "here").symlink_to("data")
    shown = settings("--ro", f"{folder}/here", "--hide", "data/.env").policy.mounts
    named = settings("--ro", "data", "--hide", "here/.env").policy.mounts
    assert shown == (Mount(f"{folder}/here", mode="ro", hide=(".env",)),)
    assert named == (Mount(f"{folder}/data", mode="ro", hide=(".env",)),)


def test_an_option_replaces_the_policys_mount_at_the_same_place(folder: Path) -> None:
    (folder / "p.toml").write_text(
        'version = 1\n[[mounts]]\nsource = "data"\nmode = "ro"\n[[mounts]]\nsource = "a.csv"\n[env]\nA = "1"\nB = "2"\n'
    )
    policy = settings("-p", "p.toml", "--copy", "data", "-e", "B=3", "-e", "C=").policy
    mounts = (Mount(str(folder / "a.csv")), Mount(str(folder / "data"), mode="copy"))
    assert policy == Policy(mounts=mounts, env={"A": "1", "B": "3", "C": ""})


def test_a_variable_without_a_value_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RF_TEST_VALUE", "a=b")
    assert dict(settings("--env", "RF_TEST_VALUE").policy.env) == {"RF_TEST_VALUE": "a=b"}


def test_network_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RF_TEST_TOKEN", "s3cret")
    argv = ["--allow-net", "a.com", "--allow-net", "*.b.com:8443", "--deny-net", "x.b.com", "--allow-net", "a.com"]
    policy = settings(*argv, "--secret", "RF_TEST_TOKEN@a.com,q.b.com:8443").policy
    assert policy.network == Network(allow=["a.com", "*.b.com:8443"], deny=["x.b.com"])
    assert policy.secrets == (Secret("RF_TEST_TOKEN", "s3cret", hosts=["a.com", "q.b.com:8443"]),)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--secret", "RF_TEST_TOKEN=typed-value@a.com"), "never give the value here"),
        (("--secret", "RF_TEST_TOKEN@a.com", "--secret", "RF_TEST_TOKEN@b.com"), "is given twice"),
    ],
)
def test_a_secret_with_a_value_or_given_twice_is_refused_and_the_value_not_shown(
    argv: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RF_TEST_TOKEN", "s3cret")
    with pytest.raises(Problem, match=words) as caught:
        settings("--allow-net", "a.com", "--allow-net", "b.com", *argv)
    assert "typed-value" not in f"{caught.value} {caught.value.fix}"


def test_public_is_a_word_of_its_own() -> None:
    assert settings("--allow-net", "a.com", "--allow-net", "public").policy.network == Network.open()
    assert settings("--allow-net", "public", "--allow-net", "a.com").policy.network == Network.open()


def test_isolation_strict_backend_and_image() -> None:
    chosen = settings("--isolation", "own-kernel", "--strict", "-b", "process", "-i", "data", "--raw", "--explain")
    assert chosen.policy == Policy.preset("dev").replace(isolation="own-kernel", strict=True)
    assert (chosen.backend, chosen.image, chosen.raw, chosen.explain) == ("process", "data", True, True)


def test_it_starts_in_this_folder_if_that_or_something_in_it_is_shown(folder: Path) -> None:
    here = str(folder)
    assert settings().cwd is None
    assert settings("--ro", "/usr/share").cwd is None
    assert settings("--ro", ".").cwd == here
    assert settings("--ro", "..").cwd == here
    assert settings("--ro", "a.csv").cwd == here
    assert settings("--ro", "data").cwd == here
    assert settings("--ro", "data:/data").cwd is None
    assert settings("--ro", ".:/project").cwd == "/project"
    assert settings("--ro", "..:/all").cwd == "/all/shop"


def test_a_place_to_start_is_inside_or_a_shown_folder(folder: Path) -> None:
    assert settings("--cwd", "/tmp").cwd == "/tmp"
    assert settings("--ro", ".", "--cwd", "data").cwd == f"{folder}/data"
    assert settings("--ro", ".:/p", "-C", "data").cwd == "/p/data"


def test_a_policy_is_found_by_name_in_the_home_folder_and_never_here(folder: Path) -> None:
    own = Path(os.environ["HOME"], ".config/ringfence/policies")
    own.mkdir(parents=True)
    (own / "shop.toml").write_text("version = 1\nstrict = true\n")
    (own / "dev.toml").write_text("version = 1\nstrict = true\n")
    (folder / "ringfence.toml").write_text("version = 1\nstrict = true\n")
    assert find_policy("shop") == Policy(strict=True)
    assert find_policy("dev") == Policy.preset("dev")
    assert settings().policy.strict is False
