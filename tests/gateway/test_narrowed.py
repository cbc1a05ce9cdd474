"""A narrowed network permits nothing that its ceiling refuses, judged by the gateway's own rules."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ringfence.errors import PolicyError
from ringfence.gateway.http.request import permitted
from ringfence.gateway.rules import NetworkRules
from ringfence.policy import Network, Policy, Rule

PORTS = [443, 8443]
NAMES = ["a.com", "x.a.com", "y.x.a.com", "z.a.com", "192.0.2.1", "192.0.2.2", "other.net"]
METHODS = ["GET", "POST"]
PATHS = ["/v1", "/v1/x", "/other"]

# Few hosts and ports, so that entries often meet.
hosts = st.builds(
    "{}{}".format,
    st.sampled_from(["a.com", "x.a.com", "*.a.com", "*.x.a.com", "192.0.2.1"]),
    st.sampled_from(["", "", ":443", ":8443"]),
)
rules = st.one_of(
    st.builds(
        Rule,
        hosts,
        methods=st.sampled_from([[], ["GET"]]),
        paths=st.sampled_from([[], [], ["/v1"], ["/v1/x"]]),
        protocol=st.sampled_from(["tls", "http"]),
    ),
    st.builds(Rule, hosts, protocol=st.just("tcp")),
)


@st.composite
def networks(draw: st.DrawFn, like: Network | None = None) -> Network:
    """Draw a network. With `like`, parts may be taken from that network: two networks drawn apart seldom fit."""

    def part(name: str, fresh: st.SearchStrategy[Any]) -> Any:
        return draw(fresh if like is None else st.one_of(st.just(getattr(like, name)), fresh))

    try:
        return Network(
            allow=part("allow", st.one_of(st.just("public"), st.lists(hosts, max_size=2, unique=True))),
            rules=part("rules", st.lists(rules, max_size=2)),
            deny=part("deny", st.lists(hosts, max_size=1)),
            ports=part("ports", st.lists(st.sampled_from(PORTS), min_size=1, unique=True)),
        )
    except PolicyError:
        assume(False)  # a host named twice
        raise


PAIRS = networks().flatmap(lambda ceiling: st.tuples(st.just(ceiling), networks(like=ceiling)))


def reached(network: Network) -> set[tuple[object, ...]]:
    """Every probe that the gateway lets pass: host, port, protocol, method and path."""
    judge = NetworkRules(network)
    found: set[tuple[object, ...]] = set()
    for name, port in product(NAMES, PORTS):
        verdict = judge.decide(name, port)
        if verdict.refusal is not None:
            continue
        if verdict.protocol == "tcp":
            found.add((name, port, "tcp"))
            continue
        rule = verdict.target.rule
        for protocol in ("tls", "http") if verdict.protocol == "any" else (verdict.protocol,):
            found |= {
                (name, port, protocol, *request) for request in product(METHODS, PATHS) if _passes(rule, *request)
            }
    return found


def _passes(rule: Rule | None, method: str, path: str) -> bool:
    if rule is None:
        return True
    return (not rule.methods or method in rule.methods) and (not rule.paths or permitted(path, rule.paths))


@given(PAIRS)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@example((Network(allow=["*.a.com"], rules=[Rule("x.a.com", methods=["GET"])]), Network(rules=[Rule("*.a.com")])))
@example((Network(allow="public", ports=[443], rules=[Rule("a.com:8443")]), Network(allow="public", ports=PORTS)))
@example((Network(allow="public", deny=["a.com"]), Network(allow=["192.0.2.1"])))
def test_what_narrow_accepts_reaches_nothing_more(pair: tuple[Network, Network]) -> None:
    ceiling, request = pair
    try:
        Policy(network=ceiling).must_allow(Policy(network=request))
    except PolicyError:
        return  # a refusal is always safe
    assert reached(request) <= reached(ceiling)
