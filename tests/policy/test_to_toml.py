"""A policy printed as TOML is the same policy when it is read again."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from policy.strategies import policies
from ringfence.errors import PolicyError
from ringfence.policy import Mount, Network, Policy, Secret
from ringfence.policy.load import loads
from ringfence.policy.secrets import origin


@given(policies())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_every_policy_survives_the_round_trip(policy: Policy) -> None:
    again = loads(policy.to_toml())
    assert again == policy
    assert again.digest == policy.digest
    assert [origin(secret) for secret in again.secrets] == [origin(secret) for secret in policy.secrets]


@pytest.mark.parametrize("name", ["offline", "dev", "hostile"])
def test_presets_survive_the_round_trip(name: str) -> None:
    policy = Policy.preset(name)  # type: ignore[arg-type]  # the three names, as plain strings
    assert Policy.loads(policy.to_toml()) == policy


def test_text_that_toml_must_escape_survives() -> None:
    policy = Policy(
        env={"A.B C": 'quote " back \\ tab \t line \n del \x7f nel \x85 \U0001f600', "LONG": "x" * 1000},
        mounts=[Mount('/srv/a"b\\c\nd', "/x\ty")],
    )
    assert Policy.loads(policy.to_toml()) == policy


def test_a_secret_that_holds_its_value_is_not_printed() -> None:
    policy = Policy(network=Network(allow=["a.com"]), secrets=[Secret("T", "hunter2", hosts=["a.com"])])
    with pytest.raises(PolicyError) as caught:
        policy.to_toml()
    assert caught.value.key == "secrets.value"
    assert "hunter2" not in f"{caught.value} {caught.value.fix}"
