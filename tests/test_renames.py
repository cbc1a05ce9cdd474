"""An old name answers with the new one: in Python, in policy files. The command line: tests/cli/test_mistakes.py."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

import ringfence
from ringfence import AsyncSandbox, Policy, PolicyError, Sandbox, events, types


@pytest.mark.parametrize(
    ("owner", "old", "new"),
    [
        (Policy(), "narrow", "Policy.must_allow"),
        (Sandbox(), "extend", "Sandbox.set_lifetime"),
        (AsyncSandbox(), "extend", "AsyncSandbox.set_lifetime"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_an_old_method_names_the_new_one(owner: object, old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"is now called {new}"):
        getattr(owner, old)
    assert not hasattr(owner, old)


@pytest.mark.parametrize("owner", [Policy(), Sandbox(), AsyncSandbox()], ids=lambda owner: type(owner).__name__)
def test_a_name_that_never_was_is_an_ordinary_attribute_error(owner: object) -> None:
    with pytest.raises(AttributeError, match=f"^'{type(owner).__name__}' object has no attribute 'frobnicate'$"):
        owner.frobnicate  # type: ignore[attr-defined]  # noqa: B018  # that it raises is the test


@pytest.mark.parametrize(
    ("name", "home"), [*((name, events) for name in events.__all__), *((name, types) for name in types.__all__)]
)
def test_a_name_that_was_in_the_package_itself_names_its_new_place(name: str, home: ModuleType) -> None:
    assert getattr(home, name).__name__ if name != "Event" else home.Event
    with pytest.raises(AttributeError, match=f"^ringfence.{name} is now {home.__name__}.{name}$"):
        getattr(ringfence, name)
    with pytest.raises(ImportError, match=f"write `from {home.__name__} import {name}`"):
        exec(f"from ringfence import {name}")
    assert not hasattr(ringfence, name)


def test_a_name_that_never_was_in_the_package_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'ringfence' has no attribute 'Frobnicate'$"):
        ringfence.Frobnicate  # type: ignore[attr-defined]  # noqa: B018  # that it raises is the test
    with pytest.raises(ImportError, match=r"cannot import name 'Frobnicate' from 'ringfence'"):
        exec("from ringfence import Frobnicate")
    with pytest.raises(AttributeError, match=r"^module 'ringfence\.types' has no attribute 'Frobnicate'$"):
        types.Frobnicate  # type: ignore[attr-defined]  # noqa: B018  # that it raises is the test


@pytest.mark.parametrize(
    "write",
    [
        lambda: Policy(isolation="kernel"),  # type: ignore[arg-type]  # the old word
        lambda: Policy.loads('version = 1\nisolation = "kernel"\n'),
    ],
    ids=["Python", "TOML"],
)
def test_the_old_word_for_a_shared_kernel_names_the_new_one(write: Callable[[], Policy]) -> None:
    with pytest.raises(PolicyError, match='"kernel" is now called "shared-kernel"') as caught:
        write()
    assert (caught.value.key, caught.value.fix) == ("isolation", 'isolation = "shared-kernel"')
