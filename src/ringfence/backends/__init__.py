"""How a sandbox is isolated. A name takes the defaults; an object says more. Public.

    Sandbox(backend="gvisor")
    Sandbox(backend=backends.Container(engine="podman"))

`Backend` is the contract that each keeps; `ringfence.backends.contract` explains it to whoever adds one.
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
    """Load a backend when it is used: most programs need one."""
    if name == "Backend":
        from ringfence.backends.contract import Backend

        return Backend
    for backend, entry in BUILT_IN.items():
        if entry.cls == name:
            return load_class(backend)
    raise AttributeError(f"module 'ringfence.backends' has no attribute {name!r}")
