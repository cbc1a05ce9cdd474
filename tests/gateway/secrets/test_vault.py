"""Placeholders, scrubbing, and that a value shows nowhere."""

from __future__ import annotations

import base64
import html
import json
import pickle
import re
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import PolicyError
from ringfence.gateway.secrets import scrub
from ringfence.gateway.secrets.ca import Authority, host_bundle, java_trust_store, trust_bundle
from ringfence.gateway.secrets.scrub import Forms
from ringfence.gateway.secrets.vault import Vault
from ringfence.gateway.types import Refusal, Target
from ringfence.policy.secrets import Secret

VALUE = "sk-Canary/7+x=\"<&>'\\end"
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=8, max_size=40)


def _vault(**kwargs: object) -> Vault:
    return Vault([Secret("TOKEN", VALUE, hosts=["*.example.com", "b.test:8443"], **kwargs)])  # type: ignore[arg-type]  # of one test each


@given(VALUES, st.binary(max_size=60), st.binary(max_size=60), st.lists(st.integers(1, 7)))
def test_no_way_of_cutting_a_stream_lets_a_value_through(
    value: str, before: bytes, after: bytes, cuts: list[int]
) -> None:
    forms = Forms([value])
    whole = before + value.encode() + after
    scrubber, got, rest = forms.stream(), b"", whole
    for cut in cuts:
        got += scrubber.feed(rest[:cut])
        rest = rest[cut:]
    got += scrubber.feed(rest) + scrubber.end()
    assert len(got) == len(whole)
    assert value.encode() not in got


@given(VALUES, st.binary(max_size=7), st.binary(max_size=7))
def test_encoded_values_do_not_come_back_either(value: str, before: bytes, after: bytes) -> None:
    forms, plain = Forms([value]), before + value.encode() + after
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        masked = forms.mask(encode(plain))
        assert len(masked) == len(encode(plain))
        assert masked.count(b"*") >= len(value) - 2
    assert value.encode().hex().encode() not in forms.mask(plain.hex().encode())
    assert json.dumps(value)[1:-1].encode() not in forms.mask(json.dumps(value).encode())


def _escaped(value: str, characters: str, form: str) -> bytes:
    return re.sub(f"[{re.escape(characters)}]", lambda found: form.format(ord(found[0])), value).encode()


@pytest.mark.parametrize(
    ("encoder", "encode"),
    [
        ("quote", lambda value: quote(value, safe="").encode()),
        ("a form", lambda value: quote_plus(value).encode()),
        ("UrlEncode of .NET", lambda value: re.sub("%..", lambda m: m[0].lower(), quote(value, safe="")).encode()),
        ("encodeURIComponent", lambda value: quote(value, safe="!'()*~").encode()),
        ("encodeURI", lambda value: quote(value, safe="!'()*~;/?:@&=+$,#").encode()),
        ("json", lambda value: json.dumps(value)[1:-1].encode()),
        ("json of PHP", lambda value: json.dumps(value)[1:-1].replace("/", "\\/").encode()),
        ("System.Text.Json", lambda value: _escaped(value.replace("\\", "\\\\"), "+&<>'\"`", "\\u{:04X}")),
        ("json of Go", lambda value: _escaped(json.dumps(value)[1:-1], "<>&", "\\u{:04x}")),
        ("html", lambda value: html.escape(value).encode()),
        ("html of PHP", lambda value: html.escape(value).replace("&#x27;", "&#039;").encode()),
        ("html of Go", lambda value: html.escape(value).replace("&#x27;", "&#39;").replace("&quot;", "&#34;").encode()),
        ("repr", lambda value: repr(value)[1:-1].encode()),
    ],
)
@pytest.mark.parametrize("value", [VALUE, "AbCd+EfGh/IjKl==", "p@ss!Word9 (x)~*#", "<&>\"'`%$,;:?"])
def test_whatever_an_encoder_escapes_the_value_is_found_in_one_piece_or_in_many(
    value: str, encoder: str, encode: Callable[[str], bytes]
) -> None:
    forms, text = Forms([value]), encode(value)
    masked = b"*" * len(text)
    assert forms.mask(b"[" + text + b"]") == b"[" + masked + b"]", encoder
    for size in (1, 2, 5):
        scrubber, data = forms.stream(), b"[" + text + b"]"
        parts = [scrubber.feed(data[at : at + size]) for at in range(0, len(data), size)]
        assert b"".join([*parts, scrubber.end()]) == b"[" + masked + b"]", encoder


def test_the_base64_of_a_value_is_found_when_it_is_itself_escaped() -> None:
    text = base64.b64encode(b"user:~~~???>>>").decode()
    assert "+" in text or "/" in text
    assert forms_left("~~~???>>>", quote(text, safe="")) <= 2 + len(quote(base64.b64encode(b"user:")))
    assert forms_left("~~~???>>>", text.replace("/", "\\/")) <= 2 + len(base64.b64encode(b"user:"))


def forms_left(value: str, text: str) -> int:
    """Return how many characters of the value are not overwritten."""
    return len(text) - Forms([value]).mask(text.encode()).count(b"*")


def test_a_value_of_many_backslashes_is_searched_for_in_reasonable_time() -> None:
    forms = Forms(["\\" * 40 + "end"])
    assert forms.mask(b"\\" * 79 + b"x") == b"\\" * 79 + b"x"
    assert forms.mask(b"\\" * 80 + b"end") == b"*" * 83


def test_a_long_value_of_many_odd_characters_is_made_ready_in_reasonable_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway's loop prepares the value while every sandbox waits. Measured in bytes to read, not in seconds."""
    sizes: list[int] = []

    def compiled(source: bytes, flags: int = 0) -> re.Pattern[bytes]:
        sizes.append(len(source))
        return re.compile(source, flags)

    monkeypatch.setattr(scrub, "re", SimpleNamespace(compile=compiled, escape=re.escape, IGNORECASE=re.IGNORECASE))
    value = '{"type": "service_account", "key": "a/b+c="}, ' * 40
    forms = Forms([value])
    assert forms.mask(b"[" + value.encode() + b"]") == b"[" + b"*" * len(value) + b"]"
    assert forms.mask(quote(value).encode()) == b"*" * len(quote(value))
    assert sum(sizes) < 150 * len(value)


def test_hosts_below_a_wildcard_share_what_is_searched_for() -> None:
    secrets = [Secret("ONE", "value-one", hosts=["*.a.com"]), Secret("TWO", "value-two", hosts=["b.a.com"])]
    vault = Vault(secrets)
    one, other, both = (vault.forms(Target(name, 443, None)) for name in ("x.a.com", "y.a.com", "b.a.com"))
    assert one is other
    assert (one.mask(b"value-two"), both.mask(b"value-two value-one")) == (b"value-two", b"********* *********")


def test_a_value_is_taken_out_of_the_name_of_a_header_in_any_case() -> None:
    forms = Forms(["tokenABCDEF12345"])
    assert forms.mask_name(b"x-tokenabcdef12345") == b"x-" + b"*" * 16
    assert forms.mask_name(b"tokenABCDEF12345") == b"*" * 16
    assert forms.mask_name(b"content-type") == b"content-type"
    assert Forms([]).mask_name(b"content-type") == b"content-type"


@given(st.binary(max_size=200))
def test_other_bytes_pass_as_they_are_and_nothing_is_held_back_at_the_end(data: bytes) -> None:
    scrubber = Forms(["never-in-there-0123456789"]).stream()
    assert scrubber.feed(data) + scrubber.end() == data


def test_the_lines_of_a_stream_are_not_held_back() -> None:
    scrubber = Forms(["secret-value"]).stream()
    assert scrubber.feed(b"data: {}\n\n") == b"data: {}\n\n"
    assert scrubber.feed(b"data\nsecr") == b"data\n"
    assert scrubber.feed(b"ets\n") == b"secrets\n"


@given(st.text(st.sampled_from("secrt-valu%&*\n"), max_size=60))
def test_what_is_held_back_tells_nothing_about_the_value(said: str) -> None:
    """A server sends back the guest's bytes: a part that came late told the guest the characters of the secret."""
    data = said.encode()
    mine, other = Forms(["secret-value"]).stream().feed(data), Forms(["0123456789ab"]).stream().feed(data)
    assert len(mine) == len(other)


@given(st.lists(st.integers(1, 12), max_size=9), st.sampled_from([b"", b"to", b"x" * 300]))
def test_messages_of_grpc_pass_whole_and_without_the_value_however_they_are_cut(cuts: list[int], before: bytes) -> None:
    """A client that waits for the end of a message would wait for ever if the last characters were kept back."""
    scrubber, value = Forms(["token-0123456789"]).messages(), b"token-0123456789"
    sent, masked = (_grpc(before + one + b" token-01") + _grpc(b"") for one in (value, b"*" * len(value)))
    got, rest = b"", sent
    for cut in cuts:
        got += scrubber.feed(rest[:cut])
        rest = rest[cut:]
    assert got + scrubber.feed(rest) == masked
    assert scrubber.feed(sent) + scrubber.end() == masked


def _grpc(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize("first", [b"\1", b"[", b"\0\0\0\0\0["])
def test_what_only_calls_itself_grpc_is_read_as_a_stream(first: bytes) -> None:
    scrubber = Forms(["token-0123456789"]).messages()
    passed = scrubber.feed(first + b"to") + scrubber.feed(b"ken-0123") + scrubber.feed(b"456789") + scrubber.end()
    assert passed == first + b"*" * 16


@pytest.mark.parametrize(
    ("name", "port", "served"),
    [("a.example.com", 443, True), ("example.com", 443, False), ("b.test", 8443, True), ("b.test", 443, False)],
)
def test_a_secret_is_for_its_hosts_and_ports_alone(name: str, port: int, served: bool) -> None:
    vault = _vault()
    headers = [(b"authorization", vault.environment["TOKEN"].encode())]
    assert vault.serves(name, port) is served
    if served:
        assert vault.swap(Target(name, port, None), "/", headers, verified=True)[1][0][1] == VALUE.encode()
    else:
        with pytest.raises(Refusal) as caught:
            vault.swap(Target(name, port, None), "/", headers, verified=True)
        assert (caught.value.code, caught.value.kind) == ("secret.other-host", "secret")


def test_placeholders_name_the_secret_and_differ_in_every_sandbox() -> None:
    first, second = _vault().environment["TOKEN"], _vault().environment["TOKEN"]
    assert first != second
    assert first.startswith("rf-secret-TOKEN-")
    assert len(first) == len("rf-secret-TOKEN-") + 32


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_header_is_swapped_or_left_without_a_crash(name: bytes, value: bytes) -> None:
    vault = _vault(inject=("header", "query", "basic"))
    target = Target("a.example.com", 443, None)
    assert vault.swap(target, "/?", [(name, value), (b"Authorization", b"Basic " + value)], verified=True) == (
        "/?",
        [(name, value), (b"Authorization", b"Basic " + value)],
    )


def test_the_value_is_in_no_repr_pickle_or_traceback() -> None:
    vault = _vault()
    forms = vault.forms(Target("a.example.com", 443, None))
    shown = [repr(vault), str(vault), repr(forms), repr(vault._secrets)]
    for thing in (vault, forms, Authority()):
        with pytest.raises(TypeError, match="process"):
            pickle.dumps(thing)
    try:
        vault.swap(Target("x.test", 443, None), "/", [(b"a", vault.environment["TOKEN"].encode())], verified=True)
    except Refusal as refusal:
        shown.append("".join(traceback.format_exception(refusal)))
    assert [text for text in shown if VALUE in text or VALUE[3:12] in text] == []


def test_a_value_too_short_to_be_recognised_is_refused_before_anything_starts() -> None:
    with pytest.raises(PolicyError, match="TOKEN has fewer than 8 characters") as caught:
        Vault([Secret("TOKEN", "hunter2", hosts=["a.com"])])
    assert "hunter2" not in str(caught.value)


def test_the_trust_bundle_holds_the_hosts_roots_and_the_sandboxs_own_certificate_but_no_key() -> None:
    authority = Authority()
    bundle = trust_bundle(authority, host_bundle())
    assert bundle.endswith(authority.certificate)
    assert host_bundle().strip() in bundle
    assert b"PRIVATE" not in bundle
    assert len(java_trust_store(authority, host_bundle())) > 300


def test_two_sandboxes_do_not_share_an_authority() -> None:
    assert Authority().certificate != Authority().certificate
