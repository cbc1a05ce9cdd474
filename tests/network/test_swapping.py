"""Placeholders, scrubbing, and that a value shows nowhere."""

from __future__ import annotations

import base64
import json
import pickle
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import PolicyError
from ringfence.network.authority import Authority, host_bundle, java_trust_store, trust_bundle
from ringfence.network.scrubbing import Forms
from ringfence.network.swapping import Vault
from ringfence.network.targets import Refusal, Target
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


@given(st.binary(max_size=200))
def test_other_bytes_pass_as_they_are_and_nothing_is_held_back_at_the_end(data: bytes) -> None:
    scrubber = Forms(["never-in-there-0123456789"]).stream()
    assert scrubber.feed(data) + scrubber.end() == data


def test_a_stream_is_held_back_only_where_a_value_may_begin() -> None:
    scrubber = Forms(["secret-value"]).stream()
    assert scrubber.feed(b"data: {}\n\n") == b"data: {}\n\n"
    assert scrubber.feed(b"data: secr") == b"data: "
    assert scrubber.feed(b"ets\n") == b"secrets\n"


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
