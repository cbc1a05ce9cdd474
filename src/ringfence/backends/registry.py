"""Finds backends by name: our own in the table here, those of other distributions by their entry points.

Our own are a table because reading entry points takes longer than starting a sandbox does.

What another distribution brings may be wrong in any way: it cannot be imported, raises, or keeps half of the contract.
Whoever asks for that backend gets an error that names the distribution and the fix. Nothing else notices.
"""

from __future__ import annotations

from ringfence.errors import PolicyError, UnsupportedError
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint
    from typing import TypeVar

    from ringfence.backends.contract import Backend, Box
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import FoundImage, SandboxPlan
    from ringfence.policy.model import Policy
    from ringfence.values import Isolation

    T = TypeVar("T")

# A group of entry points such as `toy = "ringfence_toy:Toy"`, whose call without arguments makes the backend.
GROUP = "ringfence.backends"
_ORDER = ("runtime", "shared-kernel", "own-kernel")  # isolation, from the weakest to the strongest
_METHODS = ("facts", "plan", "launch", "doctor")
_BOX = (
    *("channel", "listeners", "outlet", "env", "is_unprotected", "backend", "enforcement", "python", "generation"),
    *("memory_bytes", "owns", "give_image", "can_freeze", "freeze", "thaw", "how_it_ended", "usage", "kill", "close"),
    *("wait_destroyed", "findings"),
)
_AUTO = "auto"
_MOST_SAID = 200


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

    Raises PolicyError for anything else, UnsupportedError for a backend of another distribution that cannot be used.
    """
    if not isinstance(backend, str):
        lacks = _lacks(backend)
        if lacks is not None:
            raise unknown(backend, lacks)
        return backend
    if backend in BUILT_IN:
        return load_class(backend)()
    return _of_another_distribution(backend)


def names() -> tuple[str, ...]:
    """Return the names of our own backends, in the order in which "auto" tries them."""
    return tuple(BUILT_IN)


def stranger_names() -> tuple[str, ...]:
    """Return the names of backends that other distributions have brought. "auto" takes none of them."""
    return tuple(sorted({entry.name for entry in _entries()} - _reserved()))


def misnamed() -> dict[str, UnsupportedError]:
    """Return why each backend of another distribution is not used that has the name of our own, by distribution."""
    found = {}
    for entry in _entries():
        if entry.name in _reserved():
            text = f"{_origin(entry)} brings a backend named {entry.name!r}, a name of Ringfence's own: it is not used"
            found[_origin(entry)] = _unusable(text, f"uninstall {_origin(entry)}, or have its backend renamed")
    return found


def is_as_strong(isolation: Isolation, wanted: Isolation) -> bool:
    """Return whether an isolation is no weaker than the wanted isolation."""
    return _ORDER.index(isolation) >= _ORDER.index(wanted)


def _reserved() -> frozenset[str]:
    return frozenset((_AUTO, *BUILT_IN))


def _entries() -> list[EntryPoint]:
    """Return what other distributions name as backends; not from folders that a guest can write (L12).

    Of two distributions with one name the first on the path counts, as everywhere in Python.
    """
    from importlib.metadata import distributions

    from ringfence.host import import_path

    first: dict[str, tuple[EntryPoint, ...]] = {}
    for found in distributions(path=import_path.places()):
        entries = tuple(entry for entry in found.entry_points if entry.group == GROUP)
        if entries:
            first.setdefault((found.name or "").lower().replace("_", "-"), entries)
    return [entry for entries in first.values() for entry in entries]


def _of_another_distribution(name: str) -> Backend:
    entries = [entry for entry in _entries() if entry.name == name]
    if not entries or name == _AUTO:
        raise unknown(name)
    entry, *others = entries
    origin = _origin(entry)
    if others:
        origins = " and ".join(map(_origin, entries))
        text = f"the backend {name!r} comes from {origins}: which of them is meant is not known"
        raise _unusable(text, f"uninstall {origin}, or another of them")
    reinstall = f"reinstall {origin}, or report it to its makers"
    factory = _tried(entry.load, f"the backend {name!r} of {origin} ({entry.value}) cannot be loaded", reinstall)
    made: object = _tried(factory, f"the backend {name!r} of {origin} cannot be made", reinstall)
    lacks = _lacks(made, name)
    if lacks is not None:
        raise _unusable(f"the backend {name!r} of {origin} does not keep the contract: {lacks}", reinstall)
    return made  # type: ignore[return-value]  # it has what the contract asks for


def _tried(act: Callable[[], object], what: str, fix: str) -> Callable[[], object]:
    """Return what `act` returns. Whatever it raises is an UnsupportedError; so is an exit."""
    try:
        return act()  # type: ignore[return-value]  # what is no callable raises when it is called
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # another distribution's code
        raise _unusable(f"{what}: {said(error)}", fix) from error


def said(error: BaseException) -> str:
    """Return an error of another distribution in a few words. Its own text may raise too."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # another distribution's code
        return kind
    return f"{kind}: {text}"[:_MOST_SAID] if text else kind


def asked(backend: Backend, method: str, act: Callable[[], T]) -> T:
    """Return what `act`, a call of the backend's `method`, returns.

    What a backend of another distribution raises besides an error of ours is an UnsupportedError that names it; so is
    an exit, which would end the caller as if the guest's code had run.
    """
    from ringfence.errors import RingfenceError

    if _is_own(backend, backend_name(backend)):
        return act()
    try:
        return act()
    except (RingfenceError, KeyboardInterrupt, Warning):  # a warning that the caller made an error
        raise
    except BaseException as error:  # another distribution's code
        raise broken(backend, f"{method} raised {said(error)}") from error


def broken(backend: Backend, what: str) -> UnsupportedError:
    """Return the error for a backend of another distribution that does not do what the contract says."""
    origin = type(backend).__module__.partition(".")[0]
    text = f"the backend {backend_name(backend)!r} does not keep the contract: {what}"
    return _unusable(text, f"report it to the makers of {origin}")


def backend_name(backend: Backend) -> str:
    """Return the backend's name, or its class's where a look at it raises."""
    try:
        return backend.name
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # another distribution's code
        return type(backend).__name__


def planned(backend: Backend, policy: Policy, found: FoundImage) -> SandboxPlan:
    """Return the backend's plan for a policy."""
    from ringfence.plan.model import SandboxPlan

    facts: object = asked(backend, "facts()", backend.facts)
    made: object = asked(backend, "plan()", lambda: backend.plan(policy, found, facts))
    if not isinstance(made, SandboxPlan):
        raise broken(backend, f"plan() returned {_kind(made)}, not a SandboxPlan")
    return made


def launched(backend: Backend, plan: SandboxPlan, controls: Controls) -> Box:
    """Return a new box of the backend. One that lacks a part of the contract is closed, as far as it can be."""
    box = asked(backend, "launch()", lambda: backend.launch(plan, controls=controls))
    if _is_own(backend, backend_name(backend)):
        return box
    lacking = asked(backend, "launch()", lambda: [part for part in _BOX if not hasattr(box, part)])
    if not lacking and not hasattr(box.channel, "setblocking"):
        lacking = ["a socket as its channel"]
    if lacking:
        for end in ("kill", "close"):
            if hasattr(box, end):
                asked(backend, f"{end}()", getattr(box, end))
        raise broken(backend, f"launch() returned {_kind(box)}, without {', '.join(lacking)}")
    return box


def _kind(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"


def _origin(entry: EntryPoint) -> str:
    """Return the name of the distribution that brings it."""
    name = entry.dist.name if entry.dist is not None else None
    return name or entry.value


def _unusable(text: str, fix: str) -> UnsupportedError:
    return UnsupportedError(text, code="backend", fix=fix)


def _lacks(backend: object, name: str | None = None) -> str | None:
    """Return what an object lacks to keep the contract; None when it keeps it, as far as a look can say.

    `name` is what its entry point calls it.
    """
    if isinstance(backend, type):
        return f"{backend.__name__} is a class, not an object"
    try:
        own, isolation = getattr(backend, "name", None), getattr(backend, "isolation", None)
        lacking = [method for method in _METHODS if not callable(getattr(backend, method, None))]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a property of another distribution's
        return f"a look at it raised {said(error)}"
    if lacking:
        return f"it has no method {', '.join(lacking)}"
    if not isinstance(own, str) or name not in (None, own):
        return f"its name is {own!r}, not {name!r}" if name is not None else f"its name is {own!r}"
    if own in _reserved() and not _is_own(backend, own):
        return f"its name {own!r} is one of Ringfence's own"
    if isolation not in _ORDER:
        return f"its isolation is {isolation!r}, not one of {', '.join(_ORDER)}"
    return None


def _is_own(backend: object, name: str) -> bool:
    entry = BUILT_IN.get(name)
    return entry is not None and (type(backend).__module__, type(backend).__name__) == (entry.module, entry.cls)


def unknown(backend: object, lacks: str = "") -> PolicyError:
    """Return the error for what is neither the name of a backend nor an object that keeps the contract."""
    known = ", ".join((_AUTO, *BUILT_IN, *stranger_names()))
    why = f": {lacks}" if lacks else ""
    return PolicyError(
        f"unknown backend {backend!r}{why}",
        key="backend",
        fix=f"one of: {known}; or an object as in ringfence.backends",
    )
