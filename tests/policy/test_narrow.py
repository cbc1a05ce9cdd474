"""Narrowing: a request that fits comes back, one that does not is refused with every part named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy.strategies import policies
from ringfence.errors import PolicyError
from ringfence.policy import Limits, Mount, Network, Policy, Rule, Secret
from ringfence.policy.narrow import widenings
from ringfence.policy.secrets import deferred
from ringfence.values import replace

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def keys(ceiling: Policy, request: Policy) -> list[str]:
    """The parts that do not fit; the error must name each of them."""
    found = [key for key, _ in widenings(ceiling, request)]
    if not found:
        assert ceiling.must_allow(request) is request
        return []
    with pytest.raises(PolicyError) as caught:
        ceiling.must_allow(request)
    assert caught.value.key == found[0]
    assert all(f"{key}: " in str(caught.value) for key in found)
    return found


def net(ceiling: Network, request: Network) -> list[str]:
    return keys(Policy(network=ceiling), Policy(network=request))


@given(policies())
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
def test_a_policy_fits_itself_and_closing_it_further_always_fits(policy: Policy) -> None:
    assert policy.must_allow(policy) is policy
    closed = policy.replace(network=replace(policy.network, allow=(), rules=()), mounts=[], secrets=[], strict=True)
    assert policy.must_allow(closed) is closed


@given(policies(), st.sampled_from([name for name in Limits.__fields__ if name != "on_idle"]))
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
def test_widening_any_single_limit_is_refused_and_named(policy: Policy, name: str) -> None:
    wider = policy.replace(limits=replace(policy.limits, **{name: getattr(policy.limits, name) * 2}))
    assert keys(policy, wider) == [f"limits.{name}"]
    assert keys(wider, policy) == []


def test_every_part_that_widens_is_named_at_once() -> None:
    ceiling = Policy(
        network=Network(allow=["a.com"], deny=["x.a.com"]), commands=["git"], isolation="own-kernel", strict=True
    )
    request = Policy(
        limits=Limits(memory="1G", cpus=2, on_idle="pause"),
        network=Network(allow=["b.com"], private=["10.0.0.0/8"], connections=65, upload="101M", download="2G"),
        mounts=[Mount("/etc/x")],
        secrets=[Secret("T", "v", hosts=["b.com"])],
    )
    assert keys(ceiling, request) == [
        "limits.cpus",
        "limits.memory",
        "limits.on_idle",
        "network.connections",
        "network.upload",
        "network.download",
        "network.allow[0]",
        "network.private[0]",
        "mounts[0].source",
        "commands",
        "secrets[0].name",
        "isolation",
        "strict",
    ]


def test_what_is_no_policy_is_refused() -> None:
    anything: Any = {"limits": 3}
    with pytest.raises(PolicyError):
        Policy().must_allow(anything)


@pytest.mark.parametrize(
    ("ceiling", "request_", "named"),
    [
        (["a.com"], ["a.com"], []),
        (["a.com"], ["a.com:443"], []),
        (["a.com"], ["a.com:8443"], ["network.allow[0]"]),
        (["a.com:443"], ["a.com"], ["network.allow[0]"]),
        (["*.a.com"], ["b.a.com", "*.b.a.com"], []),
        (["*.a.com"], ["a.com"], ["network.allow[0]"]),
        (["b.a.com"], ["*.a.com"], ["network.allow[0]"]),
        (["a.com"], ["a.com.evil.com", "evila.com"], ["network.allow[0]", "network.allow[1]"]),
        (["a.com"], "public", ["network.allow"]),
        ("public", "public", []),
        ("public", ["any.com"], []),
        ("public", ["any.com:22"], ["network.allow[0]"]),
        (["a.com:443", "a.com:80"], ["a.com"], []),
    ],
)
def test_hosts_fit_by_name_and_port(ceiling: Any, request_: Any, named: list[str]) -> None:
    assert net(Network(allow=ceiling), Network(allow=request_)) == named


def test_ports_are_named_where_something_uses_them() -> None:
    ceiling = Network(allow=["a.com"], ports=[443])
    assert net(ceiling, Network(allow=["a.com"], ports=[443, 22])) == ["network.ports"]
    assert net(ceiling, Network(allow=["a.com:443"], ports=[443, 22])) == []
    assert net(ceiling, Network(ports=[22])) == []
    assert net(Network(allow=["a.com:22"], ports=[443]), Network(allow=["a.com"], ports=[22])) == []
    assert net(Network.open(), Network(allow="public", ports=[22])) == ["network.ports"]


def test_a_port_that_is_open_for_one_host_is_not_open_for_another() -> None:
    ceiling = Network(allow=["a.com", "b.com:22"], ports=[443])
    assert net(ceiling, Network(allow=["a.com"], ports=[443, 22])) == ["network.allow[0]"]


GET = Rule("api.a.com", methods=["GET", "HEAD"], paths=["/v1/"])


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (GET, True),
        (Rule("api.a.com", methods=["GET"], paths=["/v1/x/"]), True),
        (Rule("api.a.com", methods=["POST"], paths=["/v1/"]), False),
        (Rule("api.a.com", paths=["/v1/"]), False),
        (Rule("api.a.com", methods=["GET"]), False),
        (Rule("api.a.com", methods=["GET"], paths=["/v"]), False),
        (Rule("api.a.com", methods=["GET"], paths=["/v1/"], protocol="http"), False),
        (Rule("api.a.com", protocol="tcp"), False),
        (Rule("other.com", methods=["GET"], paths=["/v1/"]), False),
    ],
)
def test_a_rule_fits_when_every_request_it_permits_is_permitted(rule: Rule, fits: bool) -> None:
    assert net(Network(rules=[GET]), Network(rules=[rule])) == ([] if fits else ["network.rules[0]"])


def test_a_rule_fits_in_an_allowed_host_but_an_opaque_stream_does_not() -> None:
    assert net(Network(allow=["a.com"]), Network(rules=[Rule("a.com", methods=["GET"])])) == []
    assert net(Network(allow=["a.com"]), Network(rules=[Rule("a.com", protocol="tcp")])) == ["network.rules[0]"]


def test_a_host_permitted_by_rule_is_not_opened_by_an_entry_that_covers_it() -> None:
    ceiling = Network(allow=["*.a.com"], rules=[GET])
    assert net(ceiling, Network(allow=["*.a.com"])) == ["network.allow[0]"]
    assert net(ceiling, Network(allow=["api.a.com"])) == ["network.allow[0]"]
    assert net(ceiling, Network(allow=["*.a.com"], rules=[GET])) == []
    assert net(ceiling, Network(allow=["*.a.com"], deny=["api.a.com"])) == []
    assert net(ceiling, Network(allow=["*.a.com"], deny=["api.a.com:443"])) == ["network.allow[0]"]
    assert net(ceiling, Network(allow=["www.a.com"])) == []
    assert net(Network(rules=[GET]), Network(allow=["api.a.com"])) == ["network.allow[0]"]
    assert net(ceiling, Network.open()) == ["network.allow"]


def test_a_host_permitted_by_rule_is_not_opened_by_a_wider_rule() -> None:
    ceiling = Network(allow=["*.a.com"], rules=[GET])
    assert net(ceiling, Network(rules=[Rule("*.a.com")])) == ["network.rules[0]"]
    assert net(ceiling, Network(rules=[Rule("*.a.com"), GET])) == []
    assert net(ceiling, Network(rules=[Rule("*.a.com")], deny=["api.a.com"])) == []
    with pytest.raises(
        PolicyError, match=r"network\.rules\[0\]: api\.a\.com:80 is permitted by the rule for api\.a\.com"
    ):
        Policy(network=ceiling).must_allow(Policy(network=Network(rules=[Rule("*.a.com")])))


def test_a_port_of_one_rule_is_not_opened_for_the_public() -> None:
    ceiling = Network(allow="public", ports=[443], rules=[Rule("a.com:8443")])
    assert net(ceiling, Network(allow="public", ports=[443, 8443], rules=[Rule("a.com:8443")])) == ["network.allow"]
    assert net(ceiling, Network(allow="public", ports=[443], rules=[Rule("a.com:8443")])) == []


def test_an_address_is_no_way_around_a_denied_name() -> None:
    ceiling = Network(allow="public", deny=["a.com"])
    assert net(ceiling, Network(allow=["192.0.2.1"])) == ["network.allow[0]"]
    assert net(ceiling, Network(rules=[Rule("192.0.2.1")])) == ["network.rules[0]"]
    assert net(ceiling, Network(allow=["b.com"])) == []
    assert net(Network(allow="public", deny=["a.com:22"]), Network.open()) == ["network.deny"]


def test_long_lists_are_compared_in_reasonable_time() -> None:
    """To compare every entry with every other would take minutes."""
    hosts = [f"*.h{number}.com" for number in range(2000)]
    network = Network(allow=hosts, ports=list(range(1000, 1020)))
    assert net(network, network) == []


def test_what_is_denied_stays_denied() -> None:
    ceiling = Network(allow=["*.a.com"], deny=["x.a.com"])
    assert net(ceiling, Network(allow=["*.a.com"])) == ["network.deny"]
    assert net(ceiling, Network(allow=["*.a.com"], deny=["*.a.com"])) == []
    assert net(ceiling, Network(allow=["*.a.com"], deny=["x.a.com:443"])) == ["network.deny"]
    assert net(ceiling, Network(allow=["y.a.com"])) == []
    assert net(Network(allow="public", deny=["x.com"]), Network.open()) == ["network.deny"]


def test_private_ranges_fit_inside_one_another() -> None:
    ceiling = Network(private=["10.0.0.0/8"])
    assert net(ceiling, Network(private=["10.1.0.0/16"])) == []
    assert net(ceiling, Network(private=["10.1.0.0/16", "0.0.0.0/0", "fd12::/16"])) == [
        "network.private[1]",
        "network.private[2]",
    ]


SRV = Mount("/srv", "/data", "rw", hide=["secret"], protect=["conf/main"])


@pytest.mark.parametrize(
    ("mount", "named"),
    [
        (SRV, []),
        (Mount("/srv", "/elsewhere", "ro", hide=["secret"]), []),
        (Mount("/srv/sub", mode="rw"), []),
        (Mount("/srv2"), ["source"]),
        (Mount("/sr"), ["source"]),
        (Mount("/srv"), ["hide"]),
        (Mount("/srv/secret"), ["hide"]),
        (Mount("/srv/secret/deep"), ["hide"]),
        (Mount("/srv", mode="rw", hide=["secret"]), ["protect"]),
        (Mount("/srv", mode="rw", hide=["secret"], protect=["conf"]), []),
        (Mount("/srv/conf", mode="rw", protect=["main"]), []),
        (Mount("/srv/conf", mode="copy"), []),
        (Mount("/srv/conf/main/x", mode="rw"), ["protect"]),
        (Mount("/srv/sub", credentials=True), ["credentials"]),
    ],
    ids=repr,
)
def test_a_mount_fits_below_one_of_the_policy(mount: Mount, named: list[str]) -> None:
    assert keys(Policy(mounts=[SRV]), Policy(mounts=[mount])) == [f"mounts[0].{name}" for name in named]


@pytest.mark.parametrize(
    ("ceiling", "request_", "fits"),
    [
        ("ro", "ro", True),
        ("ro", "copy", False),
        ("ro", "rw", False),
        ("copy", "ro", True),
        ("copy", "rw", False),
        ("rw", "copy", True),
        ("rw", "rw", True),
    ],
)
def test_a_mount_mode_is_never_raised(ceiling: Any, request_: Any, fits: bool) -> None:
    named = keys(Policy(mounts=[Mount("/a", mode=ceiling)]), Policy(mounts=[Mount("/a/b", mode=request_)]))
    assert named == ([] if fits else ["mounts[0].mode"])


def test_a_mount_may_fit_any_one_of_several() -> None:
    ceiling = Policy(mounts=[Mount("/a"), Mount("/a/b", mode="rw")])
    assert keys(ceiling, Policy(mounts=[Mount("/a/b/c", mode="rw")])) == []
    assert keys(ceiling, Policy(mounts=[Mount("/a/c", mode="rw")])) == ["mounts[0].mode"]


def test_commands_are_a_subset() -> None:
    ceiling = Policy(commands=["git", "python3"])
    assert keys(ceiling, Policy(commands=["git"])) == []
    assert keys(ceiling, Policy(commands=["git", "sh", "curl"])) == ["commands[1]", "commands[2]"]
    assert keys(ceiling, Policy()) == ["commands"]
    assert keys(Policy(), ceiling) == []


def test_a_secret_keeps_its_hosts_its_places_and_where_it_is_read_from() -> None:
    network = Network(allow=["*.a.com", "b.com"])

    def policy(**parts: Any) -> Policy:
        given = {"name": "T", "hosts": ["*.a.com"], "inject": ("header",), "from_env": "T"} | parts
        return Policy(network=network, secrets=[deferred(**given)])

    assert keys(policy(), policy(hosts=["x.a.com"])) == []
    assert keys(policy(), policy(hosts=["x.a.com", "b.com"])) == ["secrets[0].hosts[1]"]
    assert keys(policy(), policy(inject=("header", "query"))) == ["secrets[0].inject[1]"]
    assert keys(policy(), policy(from_env="AWS_SECRET_ACCESS_KEY")) == ["secrets[0]"]
    assert keys(policy(), policy(name="U")) == ["secrets[0].name"]


def test_variables_widen_nothing() -> None:
    assert keys(Policy(), Policy(env={"A": "1"})) == []


def test_a_stronger_wall_and_strictness_are_always_permitted() -> None:
    assert keys(Policy(), Policy(isolation="own-kernel", strict=True)) == []
    assert keys(Policy(), Policy(isolation="runtime")) == ["isolation"]
