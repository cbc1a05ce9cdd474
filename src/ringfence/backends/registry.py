"""The backends by name: our own in a table, backends of other distributions by their entry points.

Our own are in a table because reading entry points takes longer than starting a sandbox.
"""

from __future__ import annotations

from ringfence.errors import PolicyError, UnsupportedError
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.contract import Backend
    from ringfence.values import Isolation

# A group of entry points such as `toy = "ringfence_toy:Toy"`, whose call without arguments makes the backend.
GROUP = "ringfence.backends"
_ORDER = ("runtime", "shared-kernel", "own-kernel")  # isolation, from the weakest to the strongest
_METHODS = ("facts", "plan", "launch", "doctor")


@final
class BuiltIn(Struct):
    """A backend of our own: the place of its class, and the isolation without options."""

    module: str
    cls: str
    isolation: Isolation


# In the order in which "auto" tries them: the fastest first. A new backend of ours is one line here.
BUILT_IN = {
    "process": BuiltIn("ringfence.backends.process.backend", "Process", "shared-kernel"),
    "container": BuiltIn("ringfence.backends.container.backend", "Container", "shared-kernel"),
    "gvisor": BuiltIn("ringfence.backends.gvisor.backend", "Gvisor", "own-kernel"),
}


def load_class(name: str) -> type[Backend]:
    """Return the class of a backend of our own."""
    import sys

    entry = BUILT_IN[name]
    __import__(entry.module)
    found: type[Backend] = getattr(sys.modules[entry.module], entry.cls)
    return found


def get(backend: str | Backend) -> Backend:
    """Return the backend with this name, or the given object when it keeps the contract.

    Raises PolicyError for anything else, UnsupportedError for another distribution's backend that cannot be imported.
    """
    if not isinstance(backend, str):
        return _checked(backend)
    if backend in BUILT_IN:
        return load_class(backend)()
    return _stranger(backend)


def names() -> tuple[str, ...]:
    """Return the names of our own backends, in the order in which "auto" tries them."""
    return tuple(BUILT_IN)


def stranger_names() -> tuple[str, ...]:
    """Return the names of the backends of other distributions."""
    from importlib.metadata import entry_points

    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)} - BUILT_IN.keys()))


def is_as_strong(isolation: Isolation, wanted: Isolation) -> bool:
    """Return whether an isolation is no weaker than the wanted isolation."""
    return _ORDER.index(isolation) >= _ORDER.index(wanted)


def _stranger(name: str) -> Backend:
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP, name=name)
    if not found:
        raise unknown(name)
    (entry, *_) = found
    try:
        made = entry.load()()
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"the backend {name!r} of {entry.value} cannot be loaded: {error}",
            code="backend",
            fix="reinstall the distribution that it comes with",
        ) from None
    return _checked(made)


def _checked(backend: object) -> Backend:
    name = getattr(backend, "name", None)
    lacks = [method for method in _METHODS if not callable(getattr(backend, method, None))]
    if not isinstance(name, str) or lacks or getattr(backend, "isolation", None) not in _ORDER:
        raise unknown(backend)
    return backend  # type: ignore[return-value]  # it has every member of the contract


def unknown(backend: object) -> PolicyError:
    """Return the error for a value that is neither a backend's name nor an object that keeps the contract."""
    known = ", ".join(("auto", *BUILT_IN, *stranger_names()))
    return PolicyError(
        f"unknown backend {backend!r}", key="backend", fix=f"one of: {known}; or an object as in ringfence.backends"
    )
