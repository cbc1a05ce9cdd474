"""Ringfence: run code that nobody vouched for.

    r = ringfence.run("print(6 * 7)")      # a fresh sandbox: no network, no host files
    print(r.status, r.stdout, r.enforcement.memory)

Names are imported when they are used: the launch path loads nothing it does not need.
"""

# Nothing is imported here, __future__ neither: `python -m ringfence` still has the working directory in its path (L12).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import backends as backends
    from ringfence._async.environment import AsyncEnvironment
    from ringfence._async.files import AsyncFiles, AsyncWatch
    from ringfence._async.gateway import AsyncGateway
    from ringfence._async.manager import AsyncSandboxManager
    from ringfence._async.ports import AsyncAddress
    from ringfence._async.process import AsyncProcess, AsyncPty
    from ringfence._async.run import run_async
    from ringfence._async.sandbox import AsyncSandbox
    from ringfence._async.session import AsyncSession
    from ringfence._sync.environment import Environment
    from ringfence._sync.files import Files, Watch
    from ringfence._sync.gateway import Gateway
    from ringfence._sync.manager import SandboxManager
    from ringfence._sync.ports import Address
    from ringfence._sync.process import Process, Pty
    from ringfence._sync.run import run
    from ringfence._sync.sandbox import Sandbox
    from ringfence._sync.session import Session
    from ringfence.errors import (
        GuestError,
        ImageError,
        Missing,
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
    from ringfence.events import (
        Change,
        Denied,
        DiskUsage,
        Display,
        Event,
        Exit,
        FileEvent,
        FileInfo,
        Gap,
        HostSummary,
        Match,
        ProcessInfo,
        Prompt,
        Request,
        SandboxInfo,
        Stderr,
        Stdout,
    )
    from ringfence.plan.model import Plan
    from ringfence.policy import Image, Limits, Mount, Network, Policy, Quota, Rule, Secret
    from ringfence.results import Control, Denial, Enforcement, GuestException, Output, Result, Usage
    from ringfence.snapshots.model import Snapshot

__version__ = "0.1.0"

_HOMES = {
    "_async.ports": "AsyncAddress",
    "_async.files": "AsyncFiles AsyncWatch",
    "_async.gateway": "AsyncGateway",
    "_async.environment": "AsyncEnvironment",
    "_async.manager": "AsyncSandboxManager",
    "_async.run": "run_async",
    "_async.process": "AsyncProcess AsyncPty",
    "_async.sandbox": "AsyncSandbox",
    "_async.session": "AsyncSession",
    "_sync.ports": "Address",
    "_sync.files": "Files Watch",
    "_sync.gateway": "Gateway",
    "_sync.environment": "Environment",
    "_sync.manager": "SandboxManager",
    "_sync.run": "run",
    "_sync.process": "Process Pty",
    "_sync.sandbox": "Sandbox",
    "_sync.session": "Session",
    "errors": "GuestError ImageError Missing PolicyError QuotaError RingfenceError SandboxClosedError "
    "SandboxError SandboxLostError SnapshotError StartTimeoutError UnsupportedError WeakerLimitWarning",
    "events": "Change Denied DiskUsage Display Event Exit FileEvent FileInfo Gap HostSummary Match ProcessInfo Prompt "
    "Request SandboxInfo Stderr Stdout",
    "plan.model": "Plan",
    "policy.image": "Image",
    "policy.model": "Limits Mount Network Policy Quota Rule",
    "policy.secrets": "Secret",
    "results": "Control Denial Enforcement GuestException Output Result Usage",
    "snapshots.model": "Snapshot",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Address",
    "AsyncAddress",
    "AsyncEnvironment",
    "AsyncFiles",
    "AsyncGateway",
    "AsyncProcess",
    "AsyncPty",
    "AsyncSandbox",
    "AsyncSandboxManager",
    "AsyncSession",
    "AsyncWatch",
    "Change",
    "Control",
    "Denial",
    "Denied",
    "DiskUsage",
    "Display",
    "Enforcement",
    "Environment",
    "Event",
    "Exit",
    "FileEvent",
    "FileInfo",
    "Files",
    "Gap",
    "Gateway",
    "GuestError",
    "GuestException",
    "HostSummary",
    "Image",
    "ImageError",
    "Limits",
    "Match",
    "Missing",
    "Mount",
    "Network",
    "Output",
    "Plan",
    "Policy",
    "PolicyError",
    "Process",
    "ProcessInfo",
    "Prompt",
    "Pty",
    "Quota",
    "QuotaError",
    "Request",
    "Result",
    "RingfenceError",
    "Rule",
    "Sandbox",
    "SandboxClosedError",
    "SandboxError",
    "SandboxInfo",
    "SandboxLostError",
    "SandboxManager",
    "Secret",
    "Session",
    "Snapshot",
    "SnapshotError",
    "StartTimeoutError",
    "Stderr",
    "Stdout",
    "UnsupportedError",
    "Usage",
    "Watch",
    "WeakerLimitWarning",
    "__version__",
    "run",
    "run_async",
]  # fmt: skip  # the surface's own order


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        if name == "backends":
            return _load("ringfence.backends")
        raise AttributeError(f"module 'ringfence' has no attribute {name!r}")
    value: object = getattr(_load(f"ringfence.{module}"), name)
    globals()[name] = value
    return value


def _load(module: str) -> object:
    import sys

    __import__(module)
    return sys.modules[module]


def __dir__() -> list[str]:
    return sorted([*__all__, "backends"])
