"""How a sandbox is isolated. A name takes a backend's defaults; an object has options. Public.

    Sandbox(backend="gvisor")
    Sandbox(backend=backends.Container(engine="podman"))

`Backend` is the contract of every backend; `ringfence.backends.contract` explains it to the author of a new one.
"""

from __future__ import annotations

from ringfence.backends.registry import BUILT_IN, load_class

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.container.backend import Container
    from ringfence.backends.contract import Backend
    from ringfence.backends.gvisor.backend import Gvisor
    from ringfence.backends.process.backend import Process

__all__ = ["Backend", "Container", "Gvisor", "Process"]


def __getattr__(name: str) -> object:
    """Load a backend when it is first used: most programs need a single backend."""
    if name == "Backend":
        from ringfence.backends.contract import Backend

        return Backend
    for backend, entry in BUILT_IN.items():
        if entry.cls == name:
            return load_class(backend)
    raise AttributeError(f"module 'ringfence.backends' has no attribute {name!r}")
