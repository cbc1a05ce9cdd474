"""Paths of requests: one canonical form, and no reading that a server may have slips past a rule."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence.errors import PolicyError
from ringfence.gateway.http.request import canonical_path, permitted, readings, split_target
from ringfence.policy.model import Rule

PIECES = ["a", "v1", "public", "admin", "/", "//", ".", "..", "%2e", "%2E", "%2f", "%5c", "\\", "%25", ";", "~", "%7e"]
PIECES += ["%20", "%", "%2", "%00", "!", "*", "%21", "%C3%A9", "%252e", "%255c", ":", "@", "&"]
PATHS = st.lists(st.sampled_from(PIECES), max_size=12).map(lambda parts: "/" + "".join(parts))


def _servers(path: str) -> set[str]:
    """Return the forms that servers make of a path. Servers decode, cut parameters, take backslashes for slashes and
    resolve dots, or some of these, in any order."""
    steps: list[Callable[[str], str]] = [
        lambda text: unquote(text, encoding="latin-1"),
        lambda text: "/".join(part.partition(";")[0] for part in text.split("/")),
        lambda text: text.replace("\\", "/"),
        _resolved,
    ]
    found = fresh = {path}
    for _ in range(5):
        fresh = {step(text) for step in steps for text in fresh} - found
        found = found | fresh
    return {_resolved(text) for text in found}


def _resolved(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))


@given(PATHS)
@example("/v1/public/..%252fadmin")
@example("/v1/public/..;/admin")
@example("/v1/public/p%5Cq%2F..%2F..%2Fsecret")
@example("/v1/public/a/b/..;%2Fc/..;%2Fd/..;%2Fe/secret")
def test_no_server_reads_a_permitted_path_as_one_outside_the_rule(path: str) -> None:
    try:
        fits = permitted(path, ["/v1/public/"])
    except ValueError:
        return
    if fits:
        sent = canonical_path(path)
        assert all(f"{reading}/".startswith("/v1/public/") for reading in _servers(sent)), _servers(sent)


@given(PATHS)
def test_the_canonical_form_is_its_own_canonical_form_and_a_possible_rule(path: str) -> None:
    try:
        once = canonical_path(path)
    except ValueError:
        return
    assert canonical_path(once) == once
    assert once.startswith("/")
    assert readings(path)[0] == once
    try:
        Rule("a.com", paths=[once])
    except PolicyError:
        assert any(escape in once for escape in ("%2F", "%5C", "%25")), "only what has several readings is no prefix"


@given(st.text(max_size=40))
def test_any_text_is_a_target_or_a_value_error(text: str) -> None:
    try:
        path, query = split_target("/" + text)
        assert path + query == "/" + text
        canonical_path(path)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/a//b/", "/a/b/"),
        ("/a/./b/../c", "/a/c"),
        ("/%61%2e%7e%2d", "/a.~-"),
        ("/a%2fb", "/a%2Fb"),
        ("/%c3%a9", "/%C3%A9"),
        ("/../../etc/passwd", "/etc/passwd"),
        ("/a/..", "/"),
        ("/a/b/..", "/a/"),
        ("/a|b", "/a%7Cb"),
    ],
)
def test_canonical_forms(path: str, canonical: str) -> None:
    assert canonical_path(path) == canonical


@pytest.mark.parametrize("path", ["/%", "/%g0", "/%00", "/a%0a", "/a%7f", "/%" + "25" * 20 + "41"])
def test_broken_escapes_control_characters_and_towers_of_escapes_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"path|percent"):
        readings(path)


def test_an_encoded_slash_passes_where_both_readings_fit() -> None:
    assert permitted("/@types%2fnode", ["/@types"])
    assert permitted("/a%2fb", ["/"])
    assert not permitted("/@types%2fnode", ["/@types/"])


@pytest.mark.parametrize(
    "path",
    [
        "/public/p%5Cq%2F..%2F..%2Fsecret",  # nginx: a backslash is a character like others
        "/public/a/b/..;%2Fc/..;%2Fd/..;%2Fe/secret",  # Tomcat: parameters go before anything is decoded
        "/public/..%3F",  # a proxy that passes on what it decoded
        "/public/a%255C..",
        "/public/a%2F..%2Fb",  # harmless in each reading we know of
        "/public/%C0%AE%C0%AE/secret",  # overlong UTF-8, as old Java and IIS take it
        "/public/.%E0%80%AE/secret",
        "/public/..%C0%AF..%C1%9Csecret",
        "/public/.%C0%2E/secret",
        "/public/%25C0%25AE./secret",
        "/public/%E2%80%A5/secret",  # a two-dot leader, for a server that folds compatible characters
        "/public/%EF%BC%8E%EF%BC%8E%EF%BC%8Fsecret",
        "/public/..%20/secret",  # .NET: spaces around a name are not of it
    ],
)
def test_a_path_that_climbs_in_the_eyes_of_some_servers_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"as \.\."):
        permitted(path, ["/public/"])


@pytest.mark.parametrize(
    "path",
    [
        "/public/a/../b",
        "/public/a%2e%2e",
        "/public/...;x",
        "/public/a..b%5Cc",
        "/public/%C3%80%20a%E2%80%A6",
        "/public/%E9..",
    ],
)
def test_dots_that_every_server_reads_alike_pass(path: str) -> None:
    assert permitted(path, ["/public/"])


@pytest.mark.parametrize(
    "target", ["a", "", "*", "http://a/", "/" + "a" * 16_384, "/a b", "/a#b", "/\u00e9", "/\n", "/\0"]
)
def test_a_target_that_no_request_has_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="path"):
        split_target(target)


def test_the_longest_target_is_taken_whole() -> None:
    longest = "/" + "a" * 16_381 + "?b"
    assert split_target(longest) == (longest[:-2], "?b")
