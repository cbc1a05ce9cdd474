"""The types that calls of Ringfence return: records, and the objects that a sandbox or a manager makes.

Use these names for annotations and isinstance(); callers make none of the objects. A name is imported when it is first
used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence._async.environment import AsyncEnvironment
    from ringfence._async.files import AsyncFiles, AsyncWatch
    from ringfence._async.ports import AsyncAddress
    from ringfence._async.process import AsyncProcess, AsyncPty
    from ringfence._async.sandbox import AsyncGateway
    from ringfence._async.session import AsyncSession
    from ringfence._sync.environment import Environment
    from ringfence._sync.files import Files, Watch
    from ringfence._sync.ports import Address
    from ringfence._sync.process import Process, Pty
    from ringfence._sync.sandbox import Gateway
    from ringfence._sync.session import Session
    from ringfence.errors import Missing
    from ringfence.plan.model import Plan
    from ringfence.records import Change, DiskUsage, FileInfo, HostSummary, Match, ProcessInfo, Request, SandboxInfo
    from ringfence.results import Control, Denial, Enforcement, GuestException, Output, Usage

_HOMES = {
    "_async.environment": "AsyncEnvironment",
    "_async.files": "AsyncFiles AsyncWatch",
    "_async.ports": "AsyncAddress",
    "_async.process": "AsyncProcess AsyncPty",
    "_async.sandbox": "AsyncGateway",
    "_async.session": "AsyncSession",
    "_sync.environment": "Environment",
    "_sync.files": "Files Watch",
    "_sync.ports": "Address",
    "_sync.process": "Process Pty",
    "_sync.sandbox": "Gateway",
    "_sync.session": "Session",
    "errors": "Missing",
    "plan.model": "Plan",
    "records": "Change DiskUsage FileInfo HostSummary Match ProcessInfo Request SandboxInfo",
    "results": "Control Denial Enforcement GuestException Output Usage",
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
    "AsyncSession",
    "AsyncWatch",
    "Change",
    "Control",
    "Denial",
    "DiskUsage",
    "Enforcement",
    "Environment",
    "FileInfo",
    "Files",
    "Gateway",
    "GuestException",
    "HostSummary",
    "Match",
    "Missing",
    "Output",
    "Plan",
    "Process",
    "ProcessInfo",
    "Pty",
    "Request",
    "SandboxInfo",
    "Session",
    "Usage",
    "Watch",
]


if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept every name

    def __getattr__(name: str) -> object:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'ringfence.types' has no attribute {name!r}")
        __import__(f"ringfence.{module}")
        value = getattr(sys.modules[f"ringfence.{module}"], name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return list(__all__)
