"""Engines with settings that open something closed by Ringfence, or on a host that cannot enforce a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import engines
from ringfence import Limits, Policy, Sandbox, SandboxLostError, UnsupportedError
from ringfence.backends import Container
from ringfence.backends.container import api as clients
from ringfence.backends.container import backend as container
from ringfence.values import replace

Start = Callable[..., Container]


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts Podman with given settings."""
    reason = engines.missing("podman")
    if reason is not None:
        pytest.skip(reason)
    engine = engines.make("podman")

    def start(settings: str = "", *options: str) -> Container:
        (tmp_path / "containers.conf").write_text(f"[containers]\n{settings}\n")
        monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
        engine._command[1:1] = options
        assert engine.start() is None
        return Container(engine="podman", socket=engine.socket)

    yield start
    engine.end()


def test_an_engine_without_settings_of_its_own_makes_sandboxes(podman: Start) -> None:
    with Sandbox(backend=podman()) as box:
        assert box.run("6 * 7").value == "42"


@pytest.mark.parametrize("by_guestd", [False, True])
def test_a_folder_of_the_host_that_an_engine_shows_in_every_container_is_refused(
    podman: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_guestd: bool
) -> None:
    """Podman's account of the container does not name the mount: guestd finds it, or, as root, the host does."""
    backend = podman(f'volumes = ["{tmp_path}:/shown:ro"]')
    if by_guestd:
        monkeypatch.setattr(container, "_may_look", lambda _: False)
    refusal = SandboxLostError if by_guestd else UnsupportedError
    with pytest.raises(refusal, match="/shown is a mount that was not requested"), Sandbox(backend=backend):
        pass


def test_a_device_that_an_engine_gives_to_every_container_is_refused(podman: Start) -> None:
    backend = podman('devices = ["/dev/full:/dev/more:rwm"]')
    with (
        pytest.raises(UnsupportedError, match="did not make the container as it was asked to: it has Devices"),
        Sandbox(backend=backend),
    ):
        pass


def test_secrets_of_the_host_that_mounts_conf_shows_are_not_shown(podman: Start, tmp_path: Path) -> None:
    """The file that comes with Podman on Red Hat's systems has it show the host's subscription there."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "key").write_text("private")
    (tmp_path / "mounts.conf").write_text(f"{secrets}:/run/secrets\n")
    with Sandbox(backend=podman("", f"--default-mounts-file={tmp_path}/mounts.conf")) as box:
        assert box.exec(["ls", "-A", "/run/secrets"]).stdout == ""
        assert not box.exec(["touch", "/run/secrets/mine"]).ok


@pytest.fixture
def unlimited(contained: Container, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    """Return an engine that reports a host without controllers of memory and processes, and without swap accounting.

    Such an engine leaves the limits out with a warning.
    """
    api = type(clients.find(contained.engine, contained.socket).api)
    told = api.info

    def info(self: Any) -> dict[str, Any]:
        return {**told(self), "MemoryLimit": False, "PidsLimit": False, "SwapLimit": False}

    monkeypatch.setattr(api, "info", info)
    monkeypatch.setattr(clients, "_found", {})
    yield contained
    clients.forget(clients.find(contained.engine, contained.socket))


def test_a_limit_that_an_engine_cannot_hold_is_not_claimed(unlimited: Container) -> None:
    with Sandbox(backend=unlimited, policy=Policy(limits=Limits(memory="256M"))) as box:
        held = box.enforcement
        assert box.exec(["sh", "-c", "ulimit -d"]).stdout.strip() == str(256 << 10)
    assert (held.memory.mechanism, held.memory.level) == ("RLIMIT_DATA", "weaker")
    assert held.processes.mechanism.endswith(": RLIMIT_NPROC")
    with pytest.raises(UnsupportedError, match="a weaker mechanism would enforce"):
        Sandbox(backend=unlimited, policy=Policy(strict=True)).plan()


def test_swap_that_an_engine_does_not_count_is_said(contained: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Sandbox(backend=contained).plan().enforcement.memory.mechanism
    found = clients.find(contained.engine, contained.socket)
    monkeypatch.setattr(clients, "find", lambda *_, **__: replace(found, counts_swap=False))
    uncounted = Sandbox(backend=contained).plan().enforcement.memory.mechanism
    assert (counted.rpartition(": ")[2], uncounted.rpartition(": ")[2]) == (
        "memory limit, no swap",
        "memory limit (swap is not counted)",
    )
