"""The choice of "auto" where the process backend cannot serve, on hosts that refuse an ordinary user something."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engines
from accounts import OrdinaryUser
from backends.container import equipped
from programs import read_program

SITUATIONS = (Path(__file__).parents[2] / "doctor" / "situations.py").read_text()
PROBE = read_program("backends/auto_probe.py")
FILTER = "a filter around this process (a container's, mostly) refuses it"


@pytest.fixture(scope="module")
def engine() -> engines.Started:
    equipped.skip_unless_root()
    found = engines.running("docker")
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def docker(ordinary_user: OrdinaryUser, engine: engines.Started) -> Iterator[str]:
    """Return the tests' engine, which the ordinary user may use during the test."""
    mode = os.stat(engine.socket).st_mode
    os.chown(engine.socket, ordinary_user.uid, -1)
    os.chmod(engine.socket, 0o600)
    yield f"unix://{engine.socket}"
    os.chown(engine.socket, 0, -1)
    os.chmod(engine.socket, mode)


def probe(
    user: OrdinaryUser, situation: str, host: str, *, options: str = "", policy: str = "", path: str = "/usr/bin:/bin"
) -> dict[str, Any]:
    given = (
        f"SDK, HOST, PATH = {(str(equipped.sdk(user)), host, path)!r}\n"
        f"def options(): return dict({options})\n"
        f"def policy(): return Policy({policy})\n"
    )
    code = given + PROBE
    done = user.run(SITUATIONS, situation, code, timeout_s=120)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("situation", ["container_filter", "no_user_namespaces", "masked_proc"])
def test_a_container_is_taken_where_the_host_refuses_the_process_backend(
    ordinary_user: OrdinaryUser, docker: str, situation: str
) -> None:
    said = probe(ordinary_user, situation, docker)
    assert said["run"] == ["container", "user\n", "42\n"]
    backend, rejected = said["plan after"]
    assert (backend, sorted(rejected)) == ("container", ["gvisor", "process"])
    assert "refuse" in rejected["process"] or "switched off" in rejected["process"]
    assert said["doctor"][0] == "container"
    assert sorted(said["doctor"][1]) == ["gvisor", "process"]
    if situation != "masked_proc":  # which nothing but a start can tell
        assert said["plan"] == said["plan after"]


def test_on_an_open_host_the_process_backend_is_taken_though_there_is_an_engine(
    ordinary_user: OrdinaryUser, docker: str
) -> None:
    said = probe(ordinary_user, "open_host", docker)
    assert said["run"] == ["process", "user\n", "42\n"]
    assert said["plan"] == said["plan after"]
    assert (said["plan"][0], said["doctor"][0]) == ("process", "process")
    assert sorted(said["plan"][1]) == ["container", "gvisor"]


def test_without_an_engine_and_without_gvisor_the_refusal_is_the_process_backends_and_names_the_others(
    ordinary_user: OrdinaryUser,
) -> None:
    equipped.skip_unless_root()
    said = probe(ordinary_user, "container_filter", "unix:///nowhere", path="/nowhere")
    kind, code, message, _ = said["run"]
    assert (kind, code) == ("UnsupportedError", "userns-restricted")
    assert FILTER in message
    assert "container: no container engine" in message
    assert "gvisor: " in message
    assert said["doctor"][0] is None
    assert sorted(said["doctor"][1]) == ["container", "gvisor", "process"]


def test_a_strict_policy_that_no_cgroup_of_this_user_holds_is_kept_by_a_container(
    ordinary_user: OrdinaryUser, docker: str
) -> None:
    said = probe(ordinary_user, "open_host", docker, options="policy=Policy(strict=True)", policy="strict=True")
    if said["plan"][0] == "process":
        pytest.skip("this user has a cgroup of its own")
    assert said["run"] == ["container", "user\n", "42\n"]
    assert "the policy is strict, and a weaker mechanism would enforce" in said["plan"][1]["process"]
    assert said["doctor"] == said["plan"]


def test_a_policy_that_asks_for_a_kernel_of_its_own_gets_no_container(ordinary_user: OrdinaryUser, docker: str) -> None:
    options = 'policy=Policy(isolation="own-kernel")'
    said = probe(ordinary_user, "container_filter", docker, options=options, policy='isolation="own-kernel"')
    assert said["run"][0] in ("gvisor", "UnsupportedError")  # whether gVisor runs here is for its own tests
    assert said["doctor"][1]["container"] == "it shares the host's kernel"
    assert said["doctor"][0] in ("gvisor", None)
