"""Wrong arguments: a clear error with the fix, before anything is started, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leftovers
import ringfence
from ringfence import ImageError, Limits, Mount, Policy, PolicyError, Sandbox
from ringfence.backends.process import pool
from ringfence.backends.process import pool as templates
from ringfence.core import arguments

pytestmark = pytest.mark.everywhere

ANY: Any = ringfence


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument is refused before a zygote, a template or a sandbox exists."""
    pool.close_all()

    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("something was started for a call with a wrong argument")

    monkeypatch.setattr(templates, "Zygote", refuse)


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        ("", PolicyError, "code-empty"),
        (" \n\t ", PolicyError, "code-empty"),
        ("print(1)\0", PolicyError, "code-binary"),
        ("\x7fELF\x02\x01\x01\0", PolicyError, "code-binary"),
        ("x = '\ud800'", PolicyError, "not-unicode"),
        ("#" + "x" * 100_000_000, PolicyError, "code-too-long"),
        (b"print(1)", TypeError, None),
        (None, TypeError, None),
        (5, TypeError, None),
        (["print(1)"], TypeError, None),
        (Path("f.py"), TypeError, None),
    ],
    ids=["empty", "blank", "nul", "elf", "surrogate", "100MB", "bytes", "none", "int", "list", "path"],
)
def test_code_that_is_none(code: object, kind: type[Exception], name: str | None) -> None:
    with pytest.raises(kind) as caught:
        ANY.run(code)
    if name is not None:
        assert isinstance(caught.value, PolicyError)
        assert (caught.value.code, bool(caught.value.fix)) == (name, True)
    else:
        assert "code is a str" in str(caught.value)


def run_with(**arguments: object) -> Callable[[], object]:
    return lambda: ANY.run("1", **arguments)


def sandbox_with(**arguments: object) -> Callable[[], object]:
    return lambda: ANY.Sandbox(**arguments)


def async_sandbox_with(**arguments: object) -> Callable[[], object]:
    return lambda: ANY.AsyncSandbox(**arguments)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (run_with(language="cobol"), PolicyError, "unknown language 'cobol'"),
        (run_with(language=None), PolicyError, "unknown language None"),
        (run_with(language=[]), PolicyError, "unknown language"),
        (run_with(backend="chroot"), PolicyError, "unknown backend 'chroot'"),
        (run_with(backend=5), PolicyError, "unknown backend 5"),
        (run_with(image="ubuntu"), ImageError, "no image named 'ubuntu'"),
        (run_with(image=5), TypeError, "image is a str or an Image, not int"),
        (run_with(policy="offline"), TypeError, "policy is a Policy, not str"),
        (run_with(policy={}), TypeError, "policy is a Policy, not dict"),
        (run_with(stdin=5), TypeError, "stdin is bytes, str or None, not int"),
        (run_with(stdin="\ud800"), PolicyError, "lone surrogate"),
        (run_with(env={"A=B": "x"}), PolicyError, "A=B"),
        (run_with(env={"A": "x\0"}), PolicyError, "env"),
        (run_with(env={"": "x"}), PolicyError, "env"),
        (run_with(env={"A": 5}), PolicyError, "env"),
        (run_with(env={5: "A"}), PolicyError, "env"),
        (run_with(env=[("A", "B")]), PolicyError, "env"),
        (run_with(env="A=B"), PolicyError, "env"),
        (run_with(env=""), PolicyError, "env must be a mapping"),
        (run_with(language="wasm"), PolicyError, "not in this version"),
        (lambda: Sandbox(labels="ab"), PolicyError, "labels must be a mapping"),  # type: ignore[arg-type]  # the mistake
        (lambda: Sandbox(labels=""), PolicyError, "labels must be a mapping"),  # type: ignore[arg-type]  # the mistake
        (run_with(timeout_s=0), PolicyError, "timeout_s is 0"),
        (run_with(timeout_s=-1), PolicyError, "timeout_s is -1"),
        (run_with(timeout_s=float("nan")), PolicyError, "timeout_s is nan"),
        (run_with(timeout_s=float("inf")), PolicyError, "timeout_s is inf"),
        (run_with(timeout_s=True), PolicyError, "timeout_s is True"),
        (run_with(timeout_s="5"), PolicyError, "timeout_s is '5'"),
        (run_with(timeout_s=31, policy=Policy()), PolicyError, "more than the policy's"),
        (run_with(timeout_s=10**12), PolicyError, "timeout_s must be"),
        (sandbox_with(timeout_s=0), PolicyError, "timeout_s is 0"),
        (sandbox_with(timeout_s="5"), PolicyError, "timeout_s is '5'"),
        (sandbox_with(timeout_s=31, policy=Policy()), PolicyError, "more than the policy's"),
        *[
            row
            for make in (run_with, sandbox_with, async_sandbox_with)
            for row in (
                (make(memory="12Q"), PolicyError, "memory is '12Q', which is not a size"),
                (make(memory=0), PolicyError, "memory must be between 1 byte"),
                (make(cpus=-1), PolicyError, "cpus must be"),
                (make(cpus="2"), PolicyError, "cpus must be"),
                (make(disk=1.5), PolicyError, "disk must be a size, not float"),
                (make(allow_net="a.com"), PolicyError, "allow_net must be a list, not a bare str"),
                (make(allow_net=["http://a.com/"]), PolicyError, "allow_net[0]"),
                (make(allow_net="Public"), PolicyError, "allow_net: 'Public' is not known"),
                (make(mounts="data"), PolicyError, "mounts must be a list, not a bare str"),
                (make(mounts=["data"]), PolicyError, "mounts[0] must be a Mount, not str"),
                (make(memory="1G", policy=Policy()), PolicyError, "memory and policy were given together"),
                (make(cpus=2, policy=Policy()), PolicyError, "cpus and policy were given together"),
                (make(disk="1G", policy=Policy()), PolicyError, "disk and policy were given together"),
                (make(allow_net=[], policy=Policy()), PolicyError, "allow_net and policy were given together"),
                (make(mounts=[], policy=Policy()), PolicyError, "mounts and policy were given together"),
            )
        ],
        (sandbox_with(env={"A=B": "x"}), PolicyError, "A=B"),
        (sandbox_with(env={}, policy=Policy()), PolicyError, "env and policy were given together"),
        (lambda: Sandbox(workspace="cloud"), PolicyError, "unknown workspace 'cloud'"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Sandbox(workspace=5), PolicyError, "unknown workspace 5"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Sandbox(policy="x"), TypeError, "policy is a Policy"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Limits(memory="12Q"), PolicyError, "12Q"),
        (lambda: Limits(memory=0), PolicyError, "limits.memory"),
        (lambda: Limits(memory=-5), PolicyError, "limits.memory"),
        (lambda: Limits(processes=0), PolicyError, "limits.processes"),
        (lambda: Limits(timeout_s=0), PolicyError, "limits.timeout_s"),
        (lambda: Limits(cpus=-1), PolicyError, "limits.cpus"),
        (lambda: Policy.load("/tmp"), PolicyError, "/tmp"),
        (lambda: Policy.load("/no/such/file.toml"), (PolicyError, FileNotFoundError), "/no/such/file.toml"),
        (lambda: Policy.preset("yolo"), PolicyError, "yolo"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_a_wrong_argument_is_told_with_what_is_wrong(
    call: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...], words: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)
    if isinstance(caught.value, ringfence.RingfenceError):
        assert caught.value.fix or "must" in str(caught.value)  # the policy's own checks name what may stand there


@pytest.mark.parametrize(
    "mount",
    [
        lambda: Mount("/no/such/directory"),
        lambda: Mount("/tmp", target="/"),
        lambda: Mount("/tmp", "/a/../.."),
        lambda: Mount(""),
    ],
)
def test_a_mount_that_cannot_be_is_refused_before_anything_starts(mount: Callable[[], Mount]) -> None:
    with pytest.raises((PolicyError, ringfence.UnsupportedError)) as caught:
        ringfence.run("1", policy=Policy(mounts=[mount()]))
    assert caught.value.fix or "must" in str(caught.value)


def test_a_hundred_wrong_calls_leave_nothing() -> None:
    before = leftovers.count()
    for call in (run_with(language="x"), run_with(backend="x"), run_with(image="x"), run_with(timeout_s=-1)):
        for _ in range(25):
            with pytest.raises(ringfence.RingfenceError):
                call()
    assert leftovers.difference(before, leftovers.count()) == []
    assert os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is None if leftovers.descendants() else True


def test_beside_a_policy_the_fix_of_a_long_time_is_in_the_policy_alone() -> None:
    """The short form would be refused again there."""
    for call in (run_with(timeout_s=31, policy=Policy()), sandbox_with(timeout_s=31, policy=Policy())):
        with pytest.raises(PolicyError) as caught:
            call()
        assert caught.value.fix == "Policy(limits=Limits(timeout_s=31))"


def test_a_process_that_is_to_outlive_its_sandbox_is_told_of_the_lifetime() -> None:
    with pytest.raises(PolicyError, match=r"policy's limits\.lifetime_s=3600") as caught:
        arguments.check_lifetime(3601, Limits())
    assert caught.value.fix == "Sandbox(timeout_s=3601) or Policy(limits=Limits(lifetime_s=3601))"


def test_the_fix_for_public_in_a_list_has_the_name_that_was_written() -> None:
    with pytest.raises(PolicyError) as caught:
        sandbox_with(allow_net=["public"])()
    assert caught.value.fix == 'for every public host, without a list: allow_net = "public"'
