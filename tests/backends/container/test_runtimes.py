"""Containers of another runtime: `Container(runtime="runsc")`, whose kernel is not the host's."""

from __future__ import annotations

import shutil

import pytest

from backends_declared import DECLARED, missing
from ringfence import Policy, Sandbox, UnsupportedError
from ringfence.backends import Container
from ringfence.values import replace


@pytest.fixture(scope="module")
def docker() -> Container:
    reason = missing("container")
    if reason is not None:
        pytest.skip(reason)
    backend = DECLARED["container"].backend()
    assert isinstance(backend, Container)
    with Sandbox(backend=backend):
        return backend


@pytest.fixture
def under_runsc(docker: Container) -> Container:
    if shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    return replace(docker, runtime="runsc")


def test_a_container_under_runsc_has_a_kernel_of_its_own_and_says_so(under_runsc: Container, docker: Container) -> None:
    with Sandbox(backend=docker) as box:
        hosts = box.exec(["cat", "/proc/version"]).stdout
    with Sandbox(backend=under_runsc, policy=Policy(isolation="own-kernel")) as box:
        assert box.exec(["cat", "/proc/version"]).stdout not in ("", hosts)
        assert (box.run("6 * 7").value, box.backend) == ("42", "container")
        much = bytes(range(256)) * (1 << 12)
        assert box.exec(["wc", "-c"], stdin=much).stdout == f"{len(much)}\n"
        held = box.enforcement
    assert held.syscalls.mechanism.endswith("with runsc: a kernel of its own")
    assert held.weaker == ("processes", "cpu", "disk")


def test_a_policy_for_a_kernel_of_its_own_is_refused_without_one(docker: Container) -> None:
    with pytest.raises(UnsupportedError, match="the container backend shares the host's"):
        Sandbox(backend=docker, policy=Policy(isolation="own-kernel"))


def test_a_runtime_that_is_not_known_is_not_told_as_a_kernel_of_its_own(docker: Container) -> None:
    """An unknown runtime may be runc under another name, as NVIDIA's is, which many hosts have as the default."""
    renamed = replace(docker, runtime="renamed")
    with Sandbox(backend=renamed) as box:
        assert box.run("6 * 7").value == "42"
        held = box.enforcement
    assert held.syscalls.mechanism.endswith("with renamed: its seccomp profile, and our allow-list inside")
    assert held.weaker == ("processes", "cpu", "disk")
    with pytest.raises(UnsupportedError, match="the container backend shares the host's"):
        Sandbox(backend=renamed, policy=Policy(isolation="own-kernel"))


def test_a_runtime_that_the_engine_has_not_is_refused_before_anything_starts(docker: Container) -> None:
    with pytest.raises(UnsupportedError, match=r"docker has no runtime 'nope'; it has .*runc") as caught:
        Sandbox(backend=replace(docker, runtime="nope")).plan()
    assert (caught.value.code, "--add-runtime nope=" in str(caught.value.fix)) == ("runtime", True)


@pytest.fixture(scope="module")
def podman() -> Container:
    reason = missing("podman")
    if reason is not None:
        pytest.skip(reason)
    backend = DECLARED["podman"].backend()
    assert isinstance(backend, Container)
    return backend


def test_podman_takes_no_runtime_for_one_container_and_says_so(podman: Container) -> None:
    with pytest.raises(UnsupportedError, match="Podman's API takes no runtime"):
        Sandbox(backend=replace(podman, runtime="runsc")).plan()
