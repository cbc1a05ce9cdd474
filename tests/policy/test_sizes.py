"""Sizes have a single grammar, and any other text is a PolicyError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import PolicyError
from ringfence.policy.checks import LARGEST, UNITS, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("4K", 4096), ("512M", 536_870_912), ("2G", 2_147_483_648), (7, 7), (LARGEST, LARGEST)]
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "12Q",
        "M",
        "1.5G",
        "-1",
        "+1",
        " 1",
        "1 M",
        "1m",
        "1MB",
        "1_000",
        "0",
        0,
        -1,
        True,
        1.5,
        None,
        b"1M",
        [1],
        "٣M",
        "9" * 30,
        "9" * 5000 + "G",
        "1\x00",
        "\ud800",
        LARGEST + 1,
        10**5000,
        float("nan"),
    ],
    ids=lambda value: ascii(value)[:20] if not isinstance(value, int) or abs(value) < 1 << 70 else "huge",
)
def test_anything_else_is_an_error_that_names_the_key(wrong: object) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_size(wrong, "limits.memory")
    assert caught.value.key == "limits.memory"
    assert caught.value.fix
    assert len(str(caught.value)) < 300


@given(st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.none(), st.from_regex(r"[0-9]{1,30}[A-Z]?")))
def test_parsing_gives_a_size_or_a_policy_error(value: object) -> None:
    try:
        size = parse_size(value)
    except PolicyError:
        return
    assert type(size) is int
    assert 0 < size <= LARGEST


@given(st.integers(min_value=1, max_value=LARGEST))
def test_formatting_is_exact(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(min_value=1, max_value=1023), st.sampled_from(sorted(UNITS)))
def test_formatting_keeps_the_unit(number: int, unit: str) -> None:
    assert format_size(parse_size(f"{number}{unit}")) == f"{number}{unit}"
