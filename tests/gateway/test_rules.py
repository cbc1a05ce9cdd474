"""The rules of a policy for a name and a port."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.gateway.rules import NetworkRules, Verdict, decide, intercepted
from ringfence.gateway.secrets.vault import Vault
from ringfence.gateway.types import Target
from ringfence.policy.model import Network, Rule
from ringfence.policy.secrets import Secret


def said(network: Network, name: str, port: int) -> tuple[str | None, str | None]:
    """Return the policy's entry that permits the name and port, and the code of the refusal."""
    verdict = decide(network, name, port)
    return verdict.entry, None if verdict.refusal is None else verdict.refusal.code


NETWORK = Network(allow=["a.test", "*.b.test", "c.test:8443"], deny=["no.b.test", "a.test:80"])


@pytest.mark.parametrize(
    ("name", "port", "expected"),
    [
        ("a.test", 443, ("a.test", None)),
        ("a.test", 80, (None, "net.denied")),
        ("a.test", 22, (None, "net.port")),
        ("x.b.test", 443, ("*.b.test", None)),
        ("x.y.b.test", 80, ("*.b.test", None)),
        ("b.test", 443, (None, "net.not-allowed")),  # not the apex
        ("no.b.test", 443, (None, "net.denied")),
        ("c.test", 8443, ("c.test:8443", None)),
        ("c.test", 443, (None, "net.port")),
        ("a.test.evil", 443, (None, "net.not-allowed")),
        ("evila.test", 443, (None, "net.not-allowed")),
        ("evilb.test", 443, (None, "net.not-allowed")),
        ("192.0.2.1", 443, (None, "net.not-allowed")),
    ],
)
def test_deny_wins_and_what_is_not_named_is_refused(name: str, port: int, expected: tuple[str, str]) -> None:
    assert said(NETWORK, name, port) == expected


def test_an_empty_list_allows_nothing() -> None:
    assert said(Network(), "a.test", 443) == (None, "net.not-allowed")
    assert not NetworkRules(Network()).resolves("a.test")


def test_public_is_every_name_on_the_named_ports_but_the_denied() -> None:
    network = Network(allow="public", deny=["bad.test"])
    assert said(network, "any.test", 443) == ("public", None)
    assert said(network, "any.test", 22) == (None, "net.port")
    assert said(network, "bad.test", 443) == (None, "net.denied")
    assert said(network, "8.8.8.8", 443) == (None, "net.address")  # a way around the name
    assert said(Network.open(), "8.8.8.8", 443) == ("public", None)


def test_a_rule_comes_before_an_entry_and_the_exact_one_first() -> None:
    exact = Rule("api.b.test", methods=["GET"])
    wild = Rule("*.b.test:22", protocol="tcp")
    network = Network(allow=["*.b.test"], rules=[wild, exact])
    assert decide(network, "api.b.test", 443) == Verdict(
        None, Target("api.b.test", 443, exact), "rules: api.b.test", "tls"
    )
    assert decide(network, "api.b.test", 22).target.rule == wild
    assert decide(network, "x.b.test", 443) == Verdict(None, Target("x.b.test", 443, None), "*.b.test", "any")


def test_a_denial_names_the_line_that_would_permit_it() -> None:
    refusal = decide(NETWORK, "new.test", 443).refusal
    assert refusal is not None
    assert (refusal.message, refusal.allow) == (
        "new.test:443 is not among the hosts of the policy's network",
        'network.allow = [..., "new.test:443"]',
    )


def test_names_resolve_when_a_port_is_open() -> None:
    rules = NetworkRules(NETWORK)
    names = ["a.test", "x.b.test", "c.test", "b.test", "no.b.test", "192.0.2.1", "[2001:db8::1]"]
    assert [rules.resolves(name) for name in names] == [True, True, True, False, False, False, False]


def test_requests_are_read_where_a_rule_or_a_secret_asks_for_it() -> None:
    vault = Vault([Secret("KEY", "value-of-the-key", hosts=["s.test"])])
    targets = [
        Target("s.test", 443, None),
        Target("a.test", 443, None),
        Target("a.test", 443, Rule("a.test")),
        Target("a.test", 443, Rule("a.test", paths=["/v1/"])),
        Target("s.test", 22, Rule("s.test:22", protocol="tcp")),
        Target("a.test", 80, Rule("a.test", methods=["GET"], protocol="http")),
    ]
    assert [intercepted(target, vault) for target in targets] == [True, False, False, True, False, False]


LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?", fullmatch=True).filter(lambda x: not x.startswith("xn--"))
NAME = st.lists(LABEL, min_size=1, max_size=4).map(lambda labels: ".".join([*labels, "test"]))


@given(NAME, NAME, st.booleans())
def test_no_name_is_permitted_that_a_plain_comparison_refuses(pattern: str, name: str, wildcard: bool) -> None:
    network = Network(allow=[f"*.{pattern}" if wildcard else pattern])
    labels, wanted = name.split("."), pattern.split(".")
    plain = len(labels) > len(wanted) and labels[-len(wanted) :] == wanted if wildcard else labels == wanted
    assert (decide(network, name, 443).refusal is None) == plain
