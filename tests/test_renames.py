"""An old name answers with the new one: in Python, in policy files. The command line: tests/cli/test_mistakes.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfence import AsyncSandbox, Policy, PolicyError, Sandbox


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
