"""Struct and FrozenMap: frozen, equal by content, and cheap to import."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import pickle
import pprint
import subprocess
import sys
from typing import Any

import pytest

import ringfence.values
from ringfence import Policy
from ringfence.errors import Missing, PolicyError, QuotaError, RingfenceError, StartTimeoutError
from ringfence.values import FrozenMap, Struct, StructMeta, astuple, factory, frozen_map, put, replace


class Point(Struct):
    x: int
    y: int = 0
    tags: tuple[str, ...] = factory(tuple)
    _note: str | None = None


class Point3(Point):
    z: int = 9


class Even(Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("odd")
        put(self, "number", int(self.number))


def test_fields_are_positional_or_keyword_with_defaults() -> None:
    assert Point(1) == Point(x=1, y=0, tags=()) == Point(1, tags=())
    assert repr(Point(1, y=2)) == "Point(x=1, y=2, tags=())"


def test_a_subclass_adds_its_fields_and_is_never_equal_to_its_base() -> None:
    assert astuple(Point3(1, 2)) == (1, 2, (), 9)
    assert Point3(1, 2) != Point(1, 2)


@pytest.mark.parametrize("wrong", [{}, {"x": 1, "q": 2}, {"y": 1}])
def test_missing_and_unknown_arguments_are_type_errors(wrong: dict[str, int]) -> None:
    make: Any = Point
    with pytest.raises(TypeError, match=r"Point\(\)"):
        make(**wrong)


def test_too_many_and_doubled_arguments_are_type_errors() -> None:
    make: Any = Point
    with pytest.raises(TypeError, match="takes at most 3 arguments, 4 were given"):
        make(1, 2, (), 4)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        make(1, x=2)


def test_values_cannot_be_set_deleted_or_extended() -> None:
    point: Any = Point(1)
    for name in ("x", "other"):
        with pytest.raises(AttributeError, match="frozen"):
            setattr(point, name, 2)
    with pytest.raises(AttributeError, match="frozen"):
        del point.x
    assert point == Point(1)
    assert not hasattr(point, "__dict__")


def test_equal_values_have_equal_hashes_and_private_slots_do_not_count() -> None:
    noted = Point(1)
    put(noted, "_note", "seen")
    assert noted == Point(1)
    assert {noted: "a"}[Point(1)] == "a"
    assert repr(noted) == repr(Point(1))
    assert pickle.loads(pickle.dumps(noted))._note is None


def test_copies_and_pickles_are_equal() -> None:
    point = Point(1, 2, ("a",))
    assert copy.copy(point) is point
    assert copy.deepcopy(point) is point
    assert pickle.loads(pickle.dumps(point)) == point


def test_replace_checks_the_whole_value_again() -> None:
    assert replace(Point(1), y=5) == Point(1, 5)
    with pytest.raises(ValueError, match="odd"):
        replace(Even(2), number=3)
    with pytest.raises(TypeError, match="'nope'"):
        replace(Point(1), nope=1)


def test_values_are_dataclasses_to_those_who_ask() -> None:
    """The public types say so."""
    point = Point(1, tags=("a",))
    assert [field.name for field in dataclasses.fields(point)] == ["x", "y", "tags"]
    assert dataclasses.replace(point, y=5) == Point(1, 5, ("a",))
    assert dataclasses.asdict(point) == {"x": 1, "y": 0, "tags": ("a",)}
    assert pprint.pformat(point) == repr(point)
    assert point.__replace__(y=2).y == 2
    assert dataclasses.replace(Policy.preset("dev").limits, memory=1 << 30).memory == 1 << 30
    with pytest.raises(ValueError, match="odd"):
        dataclasses.replace(Even(2), number=3)
    assert dataclasses.is_dataclass(Point)


def test_values_match_by_position_and_by_name() -> None:
    match Point(1, 2):
        case Point(x, y=y):
            assert (x, y) == (1, 2)


def test_the_signature_is_what_the_annotations_say() -> None:
    assert str(inspect.signature(Point)) == "(x, y=0, tags=Ellipsis)"


def test_annotations_that_were_not_kept_as_text_are_refused() -> None:
    with pytest.raises(TypeError, match="from __future__ import annotations"):
        StructMeta("Lazy", (Struct,), {"__annotate__": None})


def test_a_frozen_map_refuses_every_change_and_hashes_by_content() -> None:
    frozen: Any = frozen_map({"a": 1})
    changes = [
        lambda: frozen.update(b=2),
        lambda: frozen.pop("a"),
        frozen.popitem,
        frozen.clear,
        lambda: frozen.setdefault("b", 2),
        lambda: frozen.__setitem__("b", 2),
        lambda: frozen.__delitem__("a"),
        lambda: frozen.__ior__({"b": 2}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert frozen == {"a": 1}
    assert hash(FrozenMap(a=1, b=2)) == hash(FrozenMap(b=2, a=1))
    assert pickle.loads(pickle.dumps(frozen)) == frozen
    assert type(copy.deepcopy(frozen)) is FrozenMap


def test_frozen_map_copies_what_it_is_given() -> None:
    given = {"a": 1}
    frozen = frozen_map(given)
    given["b"] = 2
    assert frozen == {"a": 1}


@pytest.mark.parametrize(
    "error",
    [
        PolicyError("bad", key="limits.memory", line=3, fix="less"),
        QuotaError("later", retry_after_s=2.5),
        StartTimeoutError("slow", fix="wait"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling_with_all_they_say(error: RingfenceError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))
    assert (twin.code, twin.retryable) == (error.code, error.retryable)


def test_errors_are_also_the_builtin_ones_their_names_promise() -> None:
    assert isinstance(PolicyError("x"), ValueError)
    assert isinstance(StartTimeoutError("x"), TimeoutError)
    assert StartTimeoutError("x").retryable
    assert Missing("vm", "qemu", "apt install qemu") == Missing(backend="vm", what="qemu", fix="apt install qemu")


HEAVY = {
    "asyncio",
    "collections",
    "dataclasses",
    "inspect",
    "typing",
    "re",
    "json",
    "datetime",
    "hashlib",
    "enum",
    "tomllib",
    "pathlib",
}


def test_importing_values_results_events_and_policy_loads_nothing_heavy() -> None:
    code = (
        "import sys; from ringfence import events, results; import ringfence.policy, ringfence.backends;"
        "ringfence.policy.Policy().digest; print(' '.join(sys.modules))"
    )
    source = os.path.dirname(os.path.dirname(ringfence.values.__file__))
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True
    )
    assert HEAVY & set(done.stdout.split()) == set()
