"""Ringfence: run untrusted code in sandboxes.

    r = ringfence.run("print(6 * 7)")      # a fresh sandbox: no network, no host files
    print(r.status, r.stdout, r.enforcement.memory)

This module has the names that a program starts with. Events are in `ringfence.events`, and the types that calls return
in `ringfence.types`. A name is imported when it is first used: the launch path loads nothing that it does not need.
"""

# No module is imported here, not even __future__: `python -m ringfence` still has the working directory in its path
# (L12).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from ringfence import backends as backends
    from ringfence import events as events
    from ringfence import types as types
    from ringfence._async.manager import AsyncSandboxManager
    from ringfence._async.run import run_async
    from ringfence._async.sandbox import AsyncSandbox
    from ringfence._sync.manager import SandboxManager
    from ringfence._sync.run import run
    from ringfence._sync.sandbox import Sandbox
    from ringfence.errors import (
        GuestError,
        ImageError,
        PolicyError,
        QuotaError,
        RingfenceError,
        SandboxClosedError,
        SandboxError,
        SandboxLostError,
        SnapshotError,
        StartTimeoutError,
        UnsupportedError,
        WeakerLimitWarning,
    )
    from ringfence.policy import Image, Limits, Mount, Network, Policy, Quota, Rule, Secret
    from ringfence.results import Result
    from ringfence.snapshots.model import Snapshot

__version__ = "0.1.0"

_HOMES = {
    "_async.manager": "AsyncSandboxManager",
    "_async.run": "run_async",
    "_async.sandbox": "AsyncSandbox",
    "_sync.manager": "SandboxManager",
    "_sync.run": "run",
    "_sync.sandbox": "Sandbox",
    "errors": "GuestError ImageError PolicyError QuotaError RingfenceError SandboxClosedError SandboxError "
    "SandboxLostError SnapshotError StartTimeoutError UnsupportedError WeakerLimitWarning",
    "policy.image": "Image",
    "policy.model": "Limits Mount Network Policy Quota Rule",
    "policy.secrets": "Secret",
    "results": "Result",
    "snapshots.model": "Snapshot",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = ("backends", "events", "types")  # public modules that `import ringfence` is enough for
_MOVED = {  # names that this module had before, by the public module that has them now
    "events": "Denied Display Event Exit FileEvent Gap Prompt Stderr Stdout",
    "types": "Address AsyncAddress AsyncEnvironment AsyncFiles AsyncGateway AsyncProcess AsyncPty AsyncSession "
    "AsyncWatch Change Control Denial DiskUsage Enforcement Environment FileInfo Files Gateway "
    "GuestException HostSummary Match Missing Output Plan Process ProcessInfo Pty Request SandboxInfo "
    "Session Usage Watch",
}

__all__ = [
    "AsyncSandbox",
    "AsyncSandboxManager",
    "GuestError",
    "Image",
    "ImageError",
    "Limits",
    "Mount",
    "Network",
    "Policy",
    "PolicyError",
    "Quota",
    "QuotaError",
    "Result",
    "RingfenceError",
    "Rule",
    "Sandbox",
    "SandboxClosedError",
    "SandboxError",
    "SandboxLostError",
    "SandboxManager",
    "Secret",
    "Snapshot",
    "SnapshotError",
    "StartTimeoutError",
    "UnsupportedError",
    "WeakerLimitWarning",
    "__version__",
    "run",
    "run_async",
]


if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept every name

    def __getattr__(name: str) -> object:
        module = _MODULE_OF.get(name)
        if module is None:
            if name in _MODULES:
                return _load(f"ringfence.{name}")
            _refuse(name)
        value: object = getattr(_load(f"ringfence.{module}"), name)
        globals()[name] = value
        return value


def _load(module: str) -> object:
    import sys

    __import__(module)
    return sys.modules[module]


def _refuse(name: str) -> "NoReturn":
    """Raise AttributeError; for a name that was moved, the message says where the name is now.

    For `from ringfence import NAME` the error is an ImportError: Python would replace an AttributeError's message by
    "cannot import name". The function of importlib that asks is two frames above.
    """
    for home, names in _MOVED.items():
        if name in names.split():
            import sys

            message = f"ringfence.{name} is now ringfence.{home}.{name}"
            if sys._getframe(2).f_code.co_name == "_handle_fromlist":  # noqa: SLF001  # `inspect` is slow to import
                raise ImportError(f"{message}: write `from ringfence.{home} import {name}`", name="ringfence")
            raise AttributeError(message)
    raise AttributeError(f"module 'ringfence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
