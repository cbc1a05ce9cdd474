"""Host patterns have one spelling each; tricks that make two programs disagree are refused (G04, G14)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence.errors import PolicyError
from ringfence.policy.hosts import HostPattern, parse_pattern
from ringfence.policy.http import cidr, cidr_within, method, path_prefix, reachable_host


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("a.com", HostPattern("a.com")),
        ("A.COM.", HostPattern("a.com")),
        ("a.com:8443", HostPattern("a.com", port=8443)),
        ("*.a.com", HostPattern("a.com", wildcard=True)),
        ("*.A.com:80", HostPattern("a.com", True, 80)),
        ("db", HostPattern("db")),
        ("xn--bcher-kva.example", HostPattern("xn--bcher-kva.example")),
        ("bücher.example", HostPattern("xn--bcher-kva.example")),
        ("192.0.2.1:443", HostPattern("192.0.2.1", port=443)),
        ("[2001:DB8::0:1]:443", HostPattern("[2001:db8::1]", port=443)),
    ],
)
def test_a_pattern_has_one_canonical_form(text: str, pattern: HostPattern) -> None:
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        ".",
        "..",
        "a..com",
        ".a.com",
        "a.com..",
        "-a.com",
        "a-.com",
        "a_b.com",
        "a b.com",
        "a.com\n",
        " a.com",
        "http://a.com",
        "a.com/",
        "a.com/x",
        "a.com?x",
        "a.com#x",
        "user@a.com",
        "a.com@evil",
        "a\\b.com",
        "%61.com",
        "*",
        "*.",
        "*a.com",
        "a.*.com",
        "a.com*",
        "**.a.com",
        "*.*.com",
        "*.192.0.2.1",
        "*:443",
        "a.com:",
        "a.com:0",
        "a.com:65536",
        "a.com:080",
        "a.com:+80",
        "a.com:\uff18\uff10",
        "a.com:1:2",
        "a.com:-1",
        "a.com:443x",
        "0",
        "127.1",
        "0x7f.1",
        "2130706433",
        "017700000001",
        "0x7f000001",
        "127.0.0.01",
        "256.0.0.1",
        "1.2.3.4.5",
        "1.2.3.4.",
        "a.0x1",
        "a.1",
        "::1",
        "[::1",
        "[::1]x",
        "[::1%lo]",
        "[::ffff:127.0.0.1]",
        "[g::1]",
        "[]",
        "a" * 64 + ".com",
        ".".join(["a" * 60] * 5),
        "xn--a.com",
        "xn--.com",
        "xn--zzzzzzzzzz99999.com",
        "straße.de",
        "evil\x00.allowed.com",
        "\ud800.com",
        "a.com\u202e",
        "\uff41.com",
        "a。com",
    ],
)
def test_every_other_spelling_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_pattern(wrong)


def test_a_wildcard_means_hosts_below_and_not_the_host_itself() -> None:
    wild = parse_pattern("*.a.com")
    assert wild.matches("b.a.com")
    assert wild.matches("c.b.a.com")
    assert not wild.matches("a.com")
    assert not wild.matches("evila.com")
    assert not wild.matches("a.com.evil")


def test_covering_is_by_whole_labels() -> None:
    wild, deep, one = parse_pattern("*.a.com"), parse_pattern("*.b.a.com"), parse_pattern("b.a.com")
    assert (wild.covers(deep), wild.covers(one), deep.covers(wild), one.covers(deep)) == (True, True, False, False)
    assert wild.overlaps(one)
    assert not parse_pattern("*.ba.com").overlaps(wild)


@pytest.mark.parametrize("text", ["localhost", "LOCALHOST.", "a.localhost", "*.localhost:80"])
def test_localhost_cannot_be_permitted(text: str) -> None:
    with pytest.raises(PolicyError, match="cannot be permitted"):
        reachable_host(text, "network.allow")


@given(st.text(max_size=80))
@example("xn--" + "9" * 59)
@example("*.xn--0.com")
@example("[fe80::1%eth0]")
def test_parsing_gives_a_stable_pattern_or_a_value_error(text: str) -> None:
    try:
        pattern = parse_pattern(text)
    except ValueError:
        return
    assert parse_pattern(str(pattern)) == pattern
    assert str(pattern).isascii()
    assert str(pattern) == str(pattern).lower()


@given(st.from_regex(r"(\*\.)?[a-z0-9xn-]{1,12}(\.[a-z0-9xn-]{1,12}){0,3}(:[0-9]{1,6})?", fullmatch=True))
def test_names_near_the_grammar_are_stable_too(text: str) -> None:
    try:
        pattern = parse_pattern(text)
    except ValueError:
        return
    assert parse_pattern(str(pattern)) == pattern
    assert pattern.covers(pattern)


@pytest.mark.parametrize("wrong", ["get", "", "GET ", "GET\n", "CONNECT", "TRACE", "G3T", "-GET", "Ä"])
def test_methods_are_upper_case_words_that_make_no_tunnel(wrong: str) -> None:
    with pytest.raises(PolicyError, match=r"network\.rules"):
        method(wrong, "network.rules.methods")


@pytest.mark.parametrize("good", ["/", "/v1/", "/a%20b", "/a;b=c", "/x.json"])
def test_canonical_path_prefixes_are_kept(good: str) -> None:
    assert path_prefix(good, "k") == good


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "v1",
        "/a//b",
        "//",
        "/../a",
        "/a/.",
        "/a?x",
        "/a#x",
        "/%2e%2e/",
        "/%2E",
        "/%2F",
        "/%5C",
        "/%",
        "/%4",
        "/%zz",
        "/%00",
        "/%41",
        "/a b",
        "/ä",
        "/a\\b",
        "/\n",
        "/%2f",
        "/%25",
    ],
)
def test_path_prefixes_no_canonical_path_has_are_refused(wrong: str) -> None:
    with pytest.raises(PolicyError, match="not a path prefix"):
        path_prefix(wrong, "k")


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "10.0.0.1",
        "10.0.0.1/8",
        "10.0.0.0/255.0.0.0",
        "10.0.0.0/33",
        "x/8",
        "FD00::/8",
        "169.254.169.254/32",
        "168.63.129.16/32",
        "::1/128",
        "169.254.0.0/16",
        "fd00:ec2::254/128",
        "10.0.0.0/08",
        "fe80::%1/64",
    ],
)
def test_address_ranges_are_canonical_and_never_metadata(wrong: str) -> None:
    with pytest.raises(PolicyError, match=r"^k"):
        cidr(wrong, "k")


def test_address_ranges_hold_one_another() -> None:
    assert cidr("10.0.0.0/8", "k") == "10.0.0.0/8"
    assert cidr_within("10.1.0.0/16", "10.0.0.0/8")
    assert not cidr_within("10.0.0.0/8", "10.1.0.0/16")
    assert not cidr_within("fd00::/8", "10.0.0.0/8")
