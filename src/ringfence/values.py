"""Frozen values: the base class of every public record, and the words that their types use.

Ringfence has a base class of its own because importing `dataclasses` costs more than starting a sandbox. Nothing here
validates what a value means; the class that declares the value does.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it as True under this name; importing typing would cost 5 ms
if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Mapping
    from dataclasses import Field
    from pathlib import PurePosixPath
    from typing import Any, ClassVar, Literal, NoReturn, Self, TypeAlias, TypeVar, dataclass_transform
    from typing import final as final  # noqa: PLC0414  # the alias makes it an export

    K = TypeVar("K")
    V = TypeVar("V")
    S = TypeVar("S", bound="Struct")

    Size: TypeAlias = int | str
    Strings: TypeAlias = list[str] | tuple[str, ...]
    Argv: TypeAlias = list[str] | tuple[str, ...]
    GuestPath: TypeAlias = str | PurePosixPath
    HostPath: TypeAlias = str | os.PathLike[str]
    Tool: TypeAlias = Callable[..., "Json"] | Callable[..., Awaitable["Json"]]
    Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

    BackendName: TypeAlias = Literal["auto", "process", "container", "gvisor"]
    SessionLanguage: TypeAlias = Literal["python", "javascript", "bash"]
    Isolation: TypeAlias = Literal["runtime", "shared-kernel", "own-kernel"]
    PresetName: TypeAlias = Literal["offline", "dev", "hostile"]
    MountMode: TypeAlias = Literal["ro", "rw", "copy"]
    OnIdle: TypeAlias = Literal["close", "pause"]
    Protocol: TypeAlias = Literal["tls", "http", "tcp"]
    Inject: TypeAlias = Literal["header", "query", "basic"]
    Workspace: TypeAlias = Literal["auto", "memory", "disk"]
    State: TypeAlias = Literal["new", "running", "paused", "closed", "lost"]
    Status: TypeAlias = Literal["ok", "error", "timeout", "oom", "limit", "killed", "lost"]
    Reason: TypeAlias = Literal[
        "done",
        "exit",
        "exception",
        "compile",
        "signal",
        "not-found",
        "not-executable",
        "wall-clock",
        "memory",
        "cpu-time",
        "caller",
        "interrupted",
        "protection-lost",
        "guest-lost",
    ]
else:

    def dataclass_transform(**_):
        return lambda cls: cls

    def final(cls):
        return cls


_put = object.__setattr__


class _Factory:
    """A default that is made anew for each value."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make


def factory(make: Callable[[], V]) -> V:
    """Declare a default that is made together with the value: `first_at: datetime = factory(now)`."""
    return _Factory(make)  # type: ignore[return-value]  # a field is declared with the type of its value


class StructMeta(type):
    """Turns annotations into slots, in order. A name with a leading underscore is a slot but not a field."""

    __fields__: tuple[str, ...]
    __defaults__: dict[str, object]
    __private__: dict[str, object]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> StructMeta:
        hints = namespace.get("__annotations__", {})
        if not hints and ("__annotate__" in namespace or "__annotate_func__" in namespace):
            raise TypeError(f"{name}: a Struct needs `from __future__ import annotations` in its module")
        own = [hint for hint in hints if not str(hints[hint]).startswith("ClassVar")]
        fields = tuple(hint for hint in own if hint[0] != "_")
        defaults = {field: namespace.pop(field) for field in fields if field in namespace}
        private = {hint: namespace.pop(hint, None) for hint in own if hint[0] == "_"}
        for base in bases:
            if isinstance(base, StructMeta):
                fields = base.__fields__ + fields
                defaults = base.__defaults__ | defaults
                private = base.__private__ | private
        namespace["__slots__"] = tuple(own)
        namespace["__fields__"] = namespace["__match_args__"] = fields
        namespace["__defaults__"] = defaults
        namespace["__private__"] = private
        return super().__new__(mcs, name, bases, namespace)

    if not TYPE_CHECKING:

        @property
        def __signature__(cls):
            """Return the signature for help() and editors; made at each access, because inspect is slow to import."""
            return _signature(cls)


class _AsDataclass:
    """An attribute for code that asks whether a Struct is a dataclass.

    The value is made at each access, because `dataclasses` is slow to import.
    """

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, _value: object, cls: StructMeta) -> object:
        import dataclasses

        return getattr(dataclasses.make_dataclass(cls.__name__, cls.__fields__, frozen=True), self._name)


@dataclass_transform(frozen_default=True)
class Struct(metaclass=StructMeta):
    """A frozen record declared by annotations: positional or keyword, equal and hashed by content.

    A class may check and normalise in `__post_init__` with `put`, or write an `__init__` that ends in `fill`.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _AsDataclass()
        __dataclass_params__ = _AsDataclass()

        def __init__(self, *args, **kwargs):
            cls = type(self)
            fields = cls.__fields__
            if len(args) > len(fields):
                raise TypeError(f"{cls.__name__}() takes at most {len(fields)} arguments, {len(args)} were given")
            values = dict(zip(fields, args, strict=False))
            for field in kwargs:
                if field in values:
                    raise TypeError(f"{cls.__name__}() got multiple values for argument {field!r}")
                if field not in fields:
                    raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {field!r}")
            values.update(kwargs)
            if len(values) < len(fields):
                _add_defaults(cls, values)
            fill(self, values)
            self.__post_init__()

    def __post_init__(self) -> None:
        """Check or normalise the fields, which are all set. An override raises to refuse the value."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: the value is frozen; make a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted: the value is frozen")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return astuple(self) == astuple(other)

    def __hash__(self) -> int:
        return hash((type(self), *astuple(self)))

    def __repr__(self) -> str:
        cls = type(self)
        return f"{cls.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in cls.__fields__)})"

    def __replace__(self, /, **changes: object) -> Self:
        return replace(self, **changes)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), astuple(self))


def astuple(value: Struct) -> tuple[Any, ...]:
    """Return the fields of one value, in order. Values in fields are not converted."""
    return tuple([getattr(value, name) for name in type(value).__fields__])


def put(value: Struct, name: str, content: object) -> None:
    """Set a field of a value that is still being made. For `__post_init__` and private slots only."""
    _put(value, name, content)


def fill(value: Struct, contents: Mapping[str, object]) -> None:
    """Set every field of a new value from `contents`, and the private slots to the defaults."""
    cls = type(value)
    for name, default in cls.__private__.items():
        _put(value, name, default)
    for name in cls.__fields__:
        _put(value, name, contents[name])


def replace(value: S, **changes: object) -> S:
    """Return a copy with some fields changed, checked like a new value. Raises TypeError for an unknown field."""
    cls = type(value)
    contents = dict(zip(cls.__fields__, astuple(value), strict=True))
    return cls(**(contents | changes))


def _add_defaults(cls: StructMeta, values: dict[str, object]) -> None:
    missing = []
    for name in cls.__fields__:
        if name in values:
            continue
        if name not in cls.__defaults__:
            missing.append(name)
            continue
        default = cls.__defaults__[name]
        values[name] = default.make() if type(default) is _Factory else default
    if missing:
        raise TypeError(f"{cls.__name__}() is missing: {', '.join(missing)}")


def _rebuild(cls: type[Struct], contents: tuple[object, ...]) -> Struct:
    value = cls.__new__(cls)
    fill(value, dict(zip(cls.__fields__, contents, strict=True)))
    return value


def _signature(cls: StructMeta) -> object:
    import inspect

    if cls.__init__ is not Struct.__init__:  # type: ignore[misc]  # comparing functions, calling neither
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]  # as above
        return whole.replace(parameters=list(whole.parameters.values())[1:])
    parameters = []
    for name in cls.__fields__:
        default = cls.__defaults__.get(name, inspect.Parameter.empty)
        shown = ... if type(default) is _Factory else default
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=shown))
    return inspect.Signature(parameters)


class FrozenMap(dict["Any", "Any"]):
    """A dict that cannot be changed, hashed by content, so that a value that holds such a dict is frozen too."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping is part of a frozen value; make a new one")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse
    __ior__ = _refuse  # every method that changes a dict refuses, whatever its signature

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has None here; a FrozenMap does not change
        return hash(frozenset(self.items()))

    def __copy__(self) -> FrozenMap:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> FrozenMap:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return FrozenMap, (dict(self),)


def frozen_map(items: Mapping[K, V]) -> Mapping[K, V]:
    """Return a frozen copy of `items`."""
    return items if type(items) is FrozenMap else FrozenMap(items)
