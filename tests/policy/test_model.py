"""Policy values: the arguments that constructors accept, the values made, and the arguments refused."""

from __future__ import annotations

import os
import pathlib
import pickle
from typing import Any

import pytest

from ringfence.errors import PolicyError
from ringfence.policy import Image, Limits, Mount, Network, Policy, Quota, Rule, Secret
from ringfence.policy.model import canonical, mount_path
from ringfence.policy.secrets import origin, reveal

LIMITS: Any = Limits
NETWORK: Any = Network
POLICY: Any = Policy
MOUNT: Any = Mount
RULE: Any = Rule
SECRET: Any = Secret
IMAGE: Any = Image


def refusal(make: Any, *args: Any, **kwargs: Any) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        make(*args, **kwargs)
    return caught.value


def test_the_default_policy_is_closed() -> None:
    policy = Policy()
    assert (policy.network.allow, policy.network.rules, policy.mounts, policy.secrets) == ((), (), (), ())
    assert (dict(policy.env), policy.isolation, policy.strict) == ({}, "shared-kernel", False)


def test_limits_read_back_as_numbers_of_their_unit() -> None:
    limits = Limits(memory="1G", timeout_s=5)
    assert (limits.memory, limits.timeout_s) == (1 << 30, 5.0)
    assert limits == Limits(memory=1 << 30, timeout_s=5.0)
    assert hash(limits) == hash(Limits(memory=1 << 30, timeout_s=5.0))


@pytest.mark.parametrize("name", [name for name in Limits.__fields__ if name != "on_idle"])
@pytest.mark.parametrize(
    "value", [0, -1, float("nan"), float("inf"), -float("inf"), True, None, "", "12Q", 10**400, []]
)
def test_no_limit_is_zero_negative_endless_or_not_a_number(name: str, value: object) -> None:
    assert refusal(LIMITS, **{name: value}).key == f"limits.{name}"


def test_limits_take_keywords_only_and_no_unknown_ones() -> None:
    with pytest.raises(TypeError):
        LIMITS(30)
    with pytest.raises(TypeError):
        LIMITS(memory_mb=512)


@pytest.mark.parametrize("name", ["allow", "deny", "private"])
def test_a_bare_string_is_never_a_list(name: str) -> None:
    error = refusal(NETWORK, **{name: "a.com"})
    assert error.key == f"network.{name}"
    assert error.fix == "write a list: ['a.com']"


def test_hosts_are_canonical_and_named_once() -> None:
    assert Network(allow=["API.example.com."]).allow == ("api.example.com",)
    assert refusal(NETWORK, allow=["a.com", "A.com."]).key == "network.allow[1]"
    assert refusal(NETWORK, allow=["a.com"], rules=[Rule("a.com")]).key == "network.rules[0].host"
    assert refusal(NETWORK, allow=["a.com"], rules=[Rule("a.com:443")]).key == "network.rules[0].host"
    assert refusal(NETWORK, rules=[Rule("a.com"), Rule("a.com")]).key == "network.rules[1].host"


def test_an_open_network_is_spelled_public() -> None:
    assert Network.open() == Network(allow="public")
    assert refusal(NETWORK, allow=["a.com", "*"]).key == "network.allow[1]"
    assert refusal(NETWORK, allow=["a.com", "Public"]).fix == 'for every public host, without a list: allow = "public"'
    assert refusal(NETWORK, allow="Public").fix == 'did you mean "public"?'


@pytest.mark.parametrize("ports", [[], [0], [65536], [True], ["443"], [443, 443], 443])
def test_ports_are_numbers_named_once(ports: object) -> None:
    assert (refusal(NETWORK, ports=ports).key or "").startswith("network.ports")


def test_a_rule_is_normalised_and_tcp_sees_no_requests() -> None:
    assert Rule("A.com", methods=["GET"]) == Rule("a.com", ("GET",))
    assert refusal(RULE, "a.com", methods=["GET"], protocol="tcp").key == "network.rules.protocol"
    assert refusal(RULE, "a.com", protocol="udp").key == "network.rules.protocol"
    assert refusal(RULE, "a.com", methods="GET").key == "network.rules.methods"


def test_a_mount_source_is_made_absolute_at_once_and_nothing_else_is_expanded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mount = Mount("./data/../x", "/x/", hide=["./.env", "a//b/"])
    monkeypatch.chdir("/")
    assert mount == Mount(str(tmp_path / "x"), "/x", hide=(".env", "a/b"))
    assert mount_path(Mount(tmp_path)) == str(tmp_path)
    assert Mount("$HOME", "/h").source == "/$HOME"
    assert "expanduser" in (refusal(MOUNT, "~/x").fix or "")


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "//",
        "/.",
        "data",
        "",
        "/a/../b",
        "..",
        "/..",
        "/proc",
        "/proc/self",
        "/sys",
        "/dev/shm",
        "/a\x00",
        "/\ud800",
        3,
    ],
)
def test_a_mount_target_is_absolute_and_leaves_the_sandbox_its_own(target: object) -> None:
    assert refusal(MOUNT, "/data", target).key == "mounts.target"


@pytest.mark.parametrize("source", ["", "/", "/proc", "/a\x00b", "\udcff", b"/data", None, 3, "/" + "a" * 5000])
def test_a_mount_source_is_a_path_that_can_be_shown(source: object) -> None:
    assert refusal(MOUNT, source).key == "mounts.source"


@pytest.mark.parametrize("path", ["/etc", "..", "a/../b", "", ".", "\x00"])
@pytest.mark.parametrize("name", ["hide", "protect"])
def test_hidden_and_protected_paths_stay_below_the_source(name: str, path: str) -> None:
    assert refusal(MOUNT, "/data", **{name: [path]}).key == f"mounts.{name}[0]"


def test_other_mount_options_are_closed_choices() -> None:
    assert refusal(MOUNT, "/data", mode="write").key == "mounts.mode"
    assert refusal(MOUNT, "/data", credentials=1).key == "mounts.credentials"


def test_two_mounts_never_share_a_target() -> None:
    assert refusal(POLICY, mounts=[Mount("/a", "/x"), Mount("/x")]).key == "mounts[1].target"


@pytest.mark.parametrize(
    "commands", ["git", None, ["/usr/bin/git"], [""], [".."], ["a\x00"], ["git", "git"], [" git"], [3]]
)
def test_commands_are_names_or_any(commands: object) -> None:
    assert (refusal(POLICY, commands=commands).key or "").startswith("commands")


def test_a_command_path_is_answered_with_its_name() -> None:
    assert refusal(POLICY, commands=["/usr/bin/git"]).fix == "write its name only: 'git'"


@pytest.mark.parametrize(
    "env", [{"": "x"}, {"A=B": "x"}, {"A\x00": "x"}, {"A": "\x00"}, {"A": 1}, {1: "x"}, [("A", "x")], "A=x"]
)
def test_variables_have_names_and_text(env: object) -> None:
    assert (refusal(POLICY, env=env).key or "").startswith("env")


def test_a_policy_does_not_follow_the_mapping_it_was_given() -> None:
    given = {"A": "1"}
    policy = Policy(env=given)
    given["B"] = "2"
    assert dict(policy.env) == {"A": "1"}


@pytest.mark.parametrize(
    "parts",
    [
        {"limits": {"memory": 1}},
        {"network": None},
        {"mounts": ["/x"]},
        {"secrets": ["x"]},
        {"isolation": "trusted"},
        {"strict": 1},
        {"mounts": Mount("/x")},
    ],
    ids=str,
)
def test_parts_of_the_wrong_type_are_policy_errors(parts: dict[str, object]) -> None:
    assert (refusal(POLICY, **parts).key or "").startswith(next(iter(parts)))


# secrets

REACH = Network(allow=["a.com"], rules=[Rule("b.com", protocol="tcp"), Rule("c.com", protocol="http"), Rule("d.com")])


def test_a_secret_never_shows_its_value() -> None:
    secret = Secret("TOKEN", "hunter2", hosts=["a.com"])
    policy = Policy(network=REACH, secrets=[secret])
    said = [repr(secret), str(secret), repr(policy), policy.explain(), canonical(policy), repr(pickle.dumps(policy))]
    assert not [text for text in said if "hunter2" in text]
    assert secret == Secret("TOKEN", "other", hosts=["a.com"])
    assert policy.digest == Policy(network=REACH, secrets=[Secret("TOKEN", "other", hosts=["a.com"])]).digest
    assert reveal(secret) == "hunter2"
    assert "has no value after pickling" in str(refusal(reveal, pickle.loads(pickle.dumps(secret))))


@pytest.mark.parametrize("value", ["", "a\nb", "a\r\nX: y", "\x00", "ä", "x" * 70_000])
def test_a_secret_value_that_no_header_carries_is_refused_without_being_shown(value: str) -> None:
    error = refusal(SECRET, "TOKEN", value, hosts=["a.com"])
    assert error.key == "secrets.value"
    assert value == "" or value not in str(error)


@pytest.mark.parametrize(
    "parts",
    [
        {"name": ""},
        {"name": "A=B"},
        {"name": "1A"},
        {"hosts": []},
        {"hosts": "a.com"},
        {"inject": ()},
        {"inject": ("body",)},
    ],
)
def test_a_secret_has_a_name_hosts_and_places(parts: dict[str, Any]) -> None:
    given = {"name": "TOKEN", "value": "v", "hosts": ["a.com"]} | parts
    assert (refusal(SECRET, **given).key or "").startswith(f"secrets.{next(iter(parts))}")


@pytest.mark.parametrize("host", ["x.com", "b.com", "c.com", "a.com:8443", "*.a.com"])
def test_a_secret_goes_only_where_tls_is_permitted(host: str) -> None:
    assert refusal(POLICY, network=REACH, secrets=[Secret("T", "v", hosts=[host])]).key == "secrets[0].hosts"


def test_a_secret_host_may_be_permitted_by_rule_by_port_or_with_everything() -> None:
    Policy(network=REACH, secrets=[Secret("T", "v", hosts=["a.com:443", "d.com"])])
    Policy(network=Network.open(), secrets=[Secret("T", "v", hosts=["x.com"])])


def test_a_secret_is_named_once_and_is_no_plain_variable() -> None:
    secret = Secret("T", "v", hosts=["a.com"])
    assert refusal(POLICY, network=REACH, secrets=[secret, secret]).key == "secrets[1].name"
    assert refusal(POLICY, network=REACH, secrets=[secret], env={"T": "x"}).key == "secrets[0].name"


def test_a_secret_from_a_variable_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_TOKEN", "v1")
    secret = Secret.from_env("TOKEN", hosts=["a.com"], variable="HOST_TOKEN")
    monkeypatch.setenv("HOST_TOKEN", "v2")
    assert (reveal(secret), origin(secret)) == ("v1", ("from_env", "HOST_TOKEN"))
    assert refusal(Secret.from_env, "NOT_SET_HERE", hosts=["a.com"]).key == "secrets.from_env"


def test_a_secret_from_a_file_loses_its_last_line_break(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"v1\r\n")
    assert reveal(Secret.from_file("TOKEN", path, hosts=["a.com"])) == "v1"


def test_a_secret_file_that_is_missing_a_folder_a_pipe_or_large_is_an_error_and_never_a_wait(
    tmp_path: pathlib.Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 70_000)
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe", tmp_path / "large", tmp_path / "bytes", "/dev/zero"):
        assert refusal(Secret.from_file, "TOKEN", path, hosts=["a.com"]).key == "secrets.from_file"


# the rest


def test_replace_changes_parts_and_checks_the_whole() -> None:
    assert Policy().replace(strict=True) == Policy(strict=True)
    policy = Policy(network=REACH, secrets=[Secret("T", "v", hosts=["a.com"])])
    assert refusal(policy.replace, network=Network()).key == "secrets[0].hosts"
    assert reveal(policy.replace(strict=True).secrets[0]) == "v"


def test_policies_are_frozen_hashable_and_picklable() -> None:
    policy = Policy(network=REACH, mounts=[Mount("/data")], env={"A": "1"}, commands=["git"])
    with pytest.raises(AttributeError):
        policy.limits.memory = 3  # type: ignore[misc]  # that it is refused is the test
    assert {policy: 1}[pickle.loads(pickle.dumps(policy))] == 1


def test_the_digest_is_stable_and_depends_on_every_part() -> None:
    base = Policy()
    assert base.digest == "41236de43e9d97fb962388b8a2ce805d313d3a2add56d4eda49b2d9aa92e4904"
    others = [
        Policy(limits=Limits(cpus=2)),
        Policy(network=Network(allow=["a.com"])),
        Policy(mounts=[Mount("/data")]),
        Policy(commands=["git"]),
        Policy(env={"A": "\u00e4\U0001f600"}),
        Policy(network=REACH, secrets=[Secret("T", "v", hosts=["a.com"])]),
        Policy(isolation="own-kernel"),
        Policy(strict=True),
    ]
    assert len({base.digest, *(policy.digest for policy in others)}) == len(others) + 1


def test_the_canonical_form_is_json() -> None:
    import json

    policy = Policy(env={"B": 'quote " back \\ \u00e4 \U0001f600 \n', "A": "1"}, network=REACH)
    found = json.loads(canonical(policy))
    assert found["env"] == dict(policy.env)
    assert found["limits"]["memory"] == 512 << 20


def test_presets_differ_in_limits_and_isolation_only() -> None:
    offline, dev, hostile = Policy.preset("offline"), Policy.preset("dev"), Policy.preset("hostile")
    assert offline == Policy()
    assert dev.replace(limits=Limits()) == Policy()
    assert (dev.limits.timeout_s, dev.limits.memory, dev.limits.cpus) == (3600, 4 << 30, 4)
    assert hostile == Policy(isolation="own-kernel", strict=True)
    assert refusal(Policy.preset, "offlin").fix == 'did you mean "offline"?'


def test_quotas_and_images_are_checked_and_normalised() -> None:
    assert Quota(memory="2G").memory == 2 << 30
    assert Quota() == Quota(8, 4.0, 4 << 30, 10 << 30, 1 << 30, 600)
    assert Image("data", preload=["numpy"]) == Image("data", preload=("numpy",))
    assert refusal(Quota, sandboxes=0).key == "quota.sandboxes"
    for wrong in ({"name": "../x"}, {"name": ""}, {"name": "a/b"}, {"pip": ["--index-url=x"]}, {"pip": "numpy"}):
        assert (refusal(IMAGE, **wrong).key or "").startswith(f"image.{next(iter(wrong))}")
    for module in ("os;x", "", "a..b", "a-b"):
        assert refusal(IMAGE, preload=[module]).key == "image.preload[0]"


def test_explaining_says_what_is_closed_and_what_is_open() -> None:
    closed = Policy().explain()
    assert "No network: nothing can be reached." in closed
    policy = Policy(
        network=REACH, mounts=[Mount("/data\nrm", "/d", "rw", protect=["x"])], commands=["git"], env={"A": "1"}
    )
    lines = policy.explain().splitlines()
    assert "a.com can be reached, on port 443 or 80 where no port is named." in lines
    assert "b.com can be reached over TCP; the data is not inspected." in lines
    assert "'/data\\nrm' is shown as /d and can be read and written, with x read-only." in lines
    assert "Of the image's programs only git exist." in lines
