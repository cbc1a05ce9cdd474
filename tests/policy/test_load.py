"""Loading TOML: every mistake has its key and line, and nothing but PolicyError comes out."""

from __future__ import annotations

import os
import pathlib
import time
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.errors import PolicyError
from ringfence.policy import Limits, Mount, Network, Policy, Rule, Secret
from ringfence.policy.load import TooDeepError, check, find_lines, load, loads
from ringfence.policy.secrets import deferred, reveal

SURFACE = pathlib.Path(__file__).parent.parent / "surface" / "policy.toml"


def mistakes(text: str) -> list[tuple[int | None, str | None]]:
    return [(error.line, error.key) for error in check(text)]


def test_the_policy_with_every_key_loads_as_its_comments_say() -> None:
    secret = deferred("EXAMPLE_TOKEN", hosts=["api.example.com"], from_env="EXAMPLE_TOKEN")
    rule = Rule("api.example.net", methods=["GET", "HEAD"], paths=["/v1/public/"])
    assert Policy.load(SURFACE) == Policy(
        commands=["python3", "git"],
        network=Network(allow=["api.example.com:443", "*.example.org"], deny=["internal.example.org"], rules=[rule]),
        mounts=[Mount(SURFACE.parent / "data", "/data", hide=[".env", "secrets"])],
        env={"LANG": "C.UTF-8"},
        secrets=[secret],
    )


def test_the_keys_and_defaults_of_the_documented_file_are_those_of_the_model() -> None:
    data = tomllib.loads(SURFACE.read_text())
    assert set(data) - {"version", "extends"} == set(Policy.__fields__)
    assert set(data["network"]) == set(Network.__fields__)
    assert set(data["network"]["rules"][0]) == set(Rule.__fields__)
    assert set(data["mounts"][0]) == set(Mount.__fields__)
    assert set(data["secrets"][0]) - {"from_env"} == set(Secret.__fields__)
    assert Limits(**data["limits"]) == Limits()
    shown: Any = {key: data["network"][key] for key in ("ports", "private", "connections", "upload", "download")}
    assert Network(**shown) == Network()
    assert (data["isolation"], data["strict"]) == (Policy().isolation, Policy().strict)


def test_only_the_version_is_required() -> None:
    assert loads("version = 1") == Policy()
    assert mistakes("") == [(1, "version")]
    assert mistakes("\n\nversion = 2") == [(3, "version")]
    assert mistakes("version = true") == [(1, "version")]
    assert mistakes("version = 1.0") == [(1, "version")]


def test_what_is_left_out_keeps_the_value_of_extends() -> None:
    policy = loads('version = 1\nextends = "dev"\n[limits]\nmemory = "1G"')
    dev = Policy.preset("dev").limits
    assert (policy.limits.memory, policy.limits.timeout_s) == (1 << 30, dev.timeout_s)
    assert mistakes('version = 1\nextends = "other.toml"') == [(2, "extends")]


def test_an_unknown_key_is_an_error_with_its_line_and_the_near_one() -> None:
    errors = check('version = 1\n\n[limits]\n# a comment\nmemory_mb = 512\n\n[network]\nallowed = ["a.com"]\n')
    assert [(error.line, error.key, error.fix) for error in errors] == [
        (5, "limits.memory_mb", 'did you mean "memory"?'),
        (8, "network.allowed", 'did you mean "allow"?'),
    ]


def test_every_mistake_is_reported_in_the_order_of_the_lines() -> None:
    text = """version = 1
strict = "yes"
commands = "git"
[limits]
memory = "12Q"
cpus = 0
[network]
allow = [
  "a.com",
  "A.com.",
]
ports = [443, 0]
rules = [{host = "b.com", methods = ["get"]}, {hots = "c.com"}]
[[mounts]]
source = "/x"
target = "/"
[[mounts]]
source = "/y"
mode = "w"
hide = [".env", "../x"]
[env]
A = 1
"B=C" = "2"
[[secrets]]
name = "X"
value = "hunter2"
[[secrets]]
name = "Y"
hosts = ["a.com"]
"""
    assert mistakes(text) == [
        (2, "strict"),
        (3, "commands"),
        (5, "limits.memory"),
        (6, "limits.cpus"),
        (10, "network.allow[1]"),
        (12, "network.ports[1]"),
        (13, "network.rules[0].methods[0]"),
        (13, "network.rules[1].hots"),
        (13, "network.rules[1]"),
        (16, "mounts[0].target"),
        (19, "mounts[1].mode"),
        (20, "mounts[1].hide[1]"),
        (22, "env.A"),
        (23, "env.'B=C'"),
        (26, "secrets[0].value"),
        (27, "secrets[1]"),
    ]
    assert not [error for error in check(text) if "hunter2" in f"{error} {error.fix}"]


def test_mistakes_between_parts_have_a_line_too() -> None:
    base = 'version = 1\n[network]\nallow = ["a.com"]\n'
    assert mistakes(base + '[[network.rules]]\nhost = "b.com"\n[[network.rules]]\nhost = "a.com"') == [
        (7, "network.rules[1].host")
    ]
    assert mistakes(base + '[[secrets]]\nname = "T"\nhosts = ["x.com"]\nfrom_env = "T"') == [(6, "secrets[0].hosts")]
    assert mistakes('version = 1\n[[mounts]]\nsource = "/a"\n[[mounts]]\nsource = "/b"\ntarget = "/a"') == [
        (6, "mounts[1].target")
    ]


def test_loading_raises_the_first_mistake_and_counts_the_rest() -> None:
    with pytest.raises(PolicyError, match=r"^limits\.memory .* \(and 1 more; ") as caught:
        loads('version = 1\n[limits]\nmemory = "12Q"\ncpus = -1')
    assert (caught.value.key, caught.value.line) == ("limits.memory", 3)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "line"),
    [("version = ", 1), ("version = 1\nversion = 1", 2), ("version = 1\n[a\n", 2), ("a = 1\n\n\nb = '", 4), ("\0", 1)],
)
def test_what_is_not_toml_is_an_error_with_its_line(text: str, line: int) -> None:
    assert mistakes(text) == [(line, "policy")]


@pytest.mark.parametrize("value", ["3", '"x"', "[1]", '["x"]', "true", "1979-05-27", "{a = 1}", "nan", "[[]]"])
@pytest.mark.parametrize(
    "key",
    [
        "version",
        "extends",
        "isolation",
        "strict",
        "commands",
        "limits",
        "network",
        "mounts",
        "env",
        "secrets",
        "limits.memory",
        "limits.timeout_s",
        "limits.on_idle",
        "network.ports",
        "network.rules",
        "network.private",
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_on_its_line(key: str, value: str) -> None:
    right = {
        ("strict", "true"),
        ("version", "1"),
        ("limits.memory", "3"),
        ("limits.timeout_s", "3"),
        ("commands", '["x"]'),
        ("network.ports", "[1]"),
    }
    if (key, value) in right:
        return
    head = "" if key == "version" else "version = 1\n"
    found = mistakes(f"{head}{key} = {value}")
    assert found
    assert {line for line, _ in found} == {2 if head else 1}


def test_relative_mounts_and_secrets_start_at_the_folder_of_the_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("v\n")
    text = 'version = 1\n[network]\nallow = ["a.com"]\n[[mounts]]\nsource = "../data"\ntarget = "/data"\n'
    text += '[[secrets]]\nname = "T"\nhosts = ["a.com"]\nfrom_file = "token"\n'
    (tmp_path / "p.toml").write_text(text)
    monkeypatch.chdir("/")
    policy = load(tmp_path / "p.toml")
    assert policy.mounts == (Mount(tmp_path.parent / "data", "/data"),)
    assert reveal(policy.secrets[0]) == "v"


def test_a_text_has_no_folder_for_relative_mounts() -> None:
    assert mistakes('version = 1\n[[mounts]]\nsource = "data"') == [(3, "mounts[0].source")]


def test_home_is_expanded_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    policy = loads('version = 1\n[[mounts]]\nsource = "~/data"')
    assert policy.mounts == (Mount("/home/ada/data"),)


def test_a_secret_is_not_read_when_its_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXAMPLE_TOKEN", raising=False)
    secret = load(SURFACE).secrets[0]
    with pytest.raises(PolicyError, match=r"EXAMPLE_TOKEN.* is not set"):
        reveal(secret)
    monkeypatch.setenv("EXAMPLE_TOKEN", "v")
    assert reveal(secret) == "v"


def test_a_policy_in_the_working_directory_is_never_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ringfence.toml", "policy.toml", ".ringfence.toml", "offline.toml", "offline"):
        (tmp_path / name).write_text('version = 1\n[network]\nallow = "public"\n')
    monkeypatch.chdir(tmp_path)
    assert Policy.preset("offline") == Policy() == loads('version = 1\nextends = "offline"')


def test_a_file_that_is_no_policy_file_is_a_clear_error(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"version = 1\n# \xe4\n")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    reasons = {
        "none": "No such file",
        ".": "it is a directory",
        "pipe": "it is not a regular file",
        "latin": "not UTF-8 text \\(line 2\\)",
        "large": "larger than 1048576 bytes",
        "large/x": "Not a directory",
    }
    for name, reason in reasons.items():
        with pytest.raises(PolicyError, match=reason) as caught:
            load(tmp_path / name)
        assert caught.value.fix
    for wrong in ("", "\0", b"x", None, "~/x"):
        with pytest.raises(PolicyError):
            load(wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_an_unreadable_file_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "p.toml").write_text("version = 1")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PolicyError, match="Permission denied"):
        load(tmp_path / "p.toml")


@pytest.mark.parametrize(
    "text",
    [
        "a." * 400_000 + "a = 1",
        "[" + "a." * 400_000 + "a]",
        "x = {" + "a." * 400_000 + "a = 1}",
        "x = " + "[" * 400_000,
        "x = " + "{a=" * 200_000,
        '"a".' * 200_000 + "a = 1",
        "version = " + "1" * 500_000,
        "x = '" + "a" * 1_000_000,
        'x = "' + "\\\\" * 400_000,
        "\n" * 1_000_000,
        "[[a]]\n" * 100_000,
        "[a]\nb.c = 1\n" * 50_000,
        'x = """' + '\\"' * 300_000,
        "[network]\nallow = [" + '"a.com",' * 100_000 + "]",
    ],
    ids=range(14),
)
def test_no_text_makes_loading_hang(text: str) -> None:
    start = time.monotonic()
    assert check(text)
    assert time.monotonic() - start < 10


# lines

TOML = """a = 1 # x = 2
b . "c.d" = [ 1,
  [2, '''
x = 3
'''], # ]
  { e = "]", f = \"\"\"
\\\"\"\" \"\"\"\"\" },
]
[t]
k = 1979-05-27 07:32:00
[[l.m]]
n = 1
[[l.m]]
n = 2
[l.m.o]
p = 3
"""


def test_lines_are_found_through_strings_lists_and_tables() -> None:
    assert isinstance(tomllib.loads(TOML), dict)
    assert find_lines(TOML) == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c.d"): 2,
        ("b", "c.d", 0): 2,
        ("b", "c.d", 1): 3,
        ("b", "c.d", 1, 0): 3,
        ("b", "c.d", 1, 1): 3,
        ("b", "c.d", 2): 6,
        ("b", "c.d", 2, "e"): 6,
        ("b", "c.d", 2, "f"): 6,
        ("t",): 9,
        ("t", "k"): 10,
        ("l", "m"): 11,
        ("l", "m", 0): 11,
        ("l", "m", 0, "n"): 12,
        ("l", "m", 1): 13,
        ("l", "m", 1, "n"): 14,
        ("l", "m", 1, "o"): 15,
        ("l", "m", 1, "o", "p"): 16,
    }


def test_nesting_no_policy_has_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(TooDeepError) as caught:
        find_lines("a = 1\nb = " + "[" * 100)
    assert caught.value.line == 2


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "version = 1\n",
            "[limits]\n",
            "[network]\n",
            "[[mounts]]\n",
            "[[secrets]]\n",
            "[env]\n",
            "[[network.rules]]\n",
            'memory = "1G"\n',
            "cpus = ",
            "allow = [",
            '"a.com"',
            "'''",
            '"""',
            "\\",
            ",",
            "]",
            "{",
            "}",
            "=",
            ".",
            "\n",
            'source = "/x"\n',
            'host = "b.com"\n',
            "true",
            "nan",
            "1e999",
            "0x10",
            "# c\n",
            '"',
            "'",
            "\x00",
            "\ud800",
            "é",
            'name = "T"\n',
            'hosts = ["a.com"]\n',
            'from_env = "T"\n',
            "mounts",
            "limits.memory",
            "extends = 'dev'\n",
        ]
    ),
    max_size=25,
)


@given(st.one_of(st.text(max_size=200), FRAGMENTS.map("".join)))
@settings(max_examples=400, deadline=20_000)
def test_any_text_is_a_policy_or_a_list_of_policy_errors(text: str) -> None:
    errors = check(text)
    assert all(type(error) is PolicyError for error in errors)
    if not errors:
        assert isinstance(loads(text), Policy)
        return
    with pytest.raises(PolicyError):
        loads(text)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 10**20), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
KEYS = ["version", "extends", "isolation", "strict", "commands", "limits", "network", "mounts", "env", "secrets"]


@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
@settings(max_examples=300, deadline=None)
def test_any_parsed_document_is_a_policy_or_policy_errors(data: dict[str, Any]) -> None:
    from ringfence.policy.load import _PolicyReader

    reader = _PolicyReader({}, None)
    policy = reader.policy(data)
    assert (policy is None) == bool(reader.errors)


@given(FRAGMENTS.map("".join))
@settings(max_examples=300, deadline=None)
def test_lines_cover_every_key_that_tomllib_finds(text: str) -> None:
    try:
        data = tomllib.loads(text)
    except ValueError:
        return
    lines = find_lines(text)
    todo: list[tuple[tuple[str | int, ...], Any]] = [((key,), value) for key, value in data.items()]
    for path, value in todo:
        # A table named only inside a header, as `network` in [[network.rules]], has no line of its own.
        assert path in lines or (isinstance(value, dict) and any(known[: len(path)] == path for known in lines))
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        todo += [((*path, key), item) for key, item in inner]
