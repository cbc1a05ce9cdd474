"""The errors that Ringfence raises. A guest's failure is a Result, and a file's failure is an OSError.

RingfenceError
├── PolicyError (ValueError)         a policy or an argument is wrong; nothing was started
├── UnsupportedError                 this host or backend cannot do it; `missing` says what and the fix
├── ImageError                       unknown, not built, damaged
├── SnapshotError                    damaged, or of another policy or backend
├── SandboxError                     the sandbox failed, not the guest's code
│   ├── SandboxClosedError           not started, or closed
│   ├── SandboxLostError             engine, kernel or supervisor ended under the sandbox
│   └── StartTimeoutError (TimeoutError)
├── QuotaError                       an agent's or tenant's quota is used up; `retry_after_s`
└── GuestError                       raised by Result.check() alone; `result`

`str(error)` says what happened and to what; `fix` says what to do now and is printed after the message.
"""

from __future__ import annotations

import sys

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from ringfence.results import Result


class RingfenceError(Exception):
    """The base of all errors of Ringfence. `code` is stable and for programs; the message is for people."""

    code: str = "error"
    fix: str | None = None
    retryable: bool = False

    def __init__(
        self, message: str, *, code: str | None = None, fix: str | None = None, retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        self.fix = fix
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[RingfenceError], args: tuple[object, ...], state: dict[str, object]) -> RingfenceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class PolicyError(RingfenceError, ValueError):
    """A policy or an argument is wrong; nothing was started. `line` is set when the policy was read from a file."""

    code = "policy"
    key: str | None
    line: int | None

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        line: int | None = None,
        code: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message, code=code, fix=fix)
        self.key = key
        self.line = line


@final
class Missing(Struct):
    """Something that a backend would need, and how to get it."""

    backend: str
    what: str
    fix: str | None


class UnsupportedError(RingfenceError):
    """This host or backend cannot keep the policy, or cannot do what the caller asked for."""

    code = "unsupported"
    missing: tuple[Missing, ...]

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[Missing, ...] | list[Missing] = (),
        code: str | None = None,
        fix: str | None = None,
    ) -> None:
        first = next((part.fix for part in missing if part.fix), None)
        super().__init__(message, code=code, fix=fix if fix is not None else first)
        self.missing = tuple(missing)


def need_linux() -> None:
    """Raise UnsupportedError on another system than Linux, before a call that only Linux has fails less clearly."""
    if sys.platform != "linux":
        raise UnsupportedError(
            f"Ringfence runs on Linux, and this is {sys.platform}",
            code="system",
            fix="use a Linux machine, a virtual one too",
        )


class ImageError(RingfenceError):
    """An image is unknown, not built, or damaged."""

    code = "image"


class SnapshotError(RingfenceError):
    """A snapshot is damaged, or belongs to another policy or backend."""

    code = "snapshot"


class SandboxError(RingfenceError):
    """The sandbox failed, not the guest's code."""

    code = "sandbox"


class SandboxClosedError(SandboxError):
    """The sandbox was not started yet, or is closed."""

    code = "sandbox-closed"


class SandboxLostError(SandboxError):
    """The engine, the kernel or the supervisor ended under the sandbox. A new sandbox may work."""

    code = "sandbox-lost"
    retryable = True


class StartTimeoutError(SandboxError, TimeoutError):
    """The sandbox did not start in time; everything that had been started was removed."""

    code = "start-timeout"
    retryable = True


class QuotaError(RingfenceError):
    """An agent's or tenant's quota is used up until `retry_after_s` seconds from now."""

    code = "quota"
    retryable = True
    retry_after_s: float

    def __init__(
        self, message: str, *, retry_after_s: float = 0.0, code: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(message, code=code, fix=fix)
        self.retry_after_s = retry_after_s


class GuestError(RingfenceError):
    """The guest's code did not end well. Raised by Result.check() alone."""

    code = "guest"
    result: Result

    def __init__(self, message: str, *, result: Result, code: str | None = None, fix: str | None = None) -> None:
        super().__init__(message, code=code, fix=fix)
        self.result = result


class WeakerLimitWarning(UserWarning):
    """A weaker mechanism than the policy's default enforces a limit. Shown once in each process."""


def unknown_attribute(owner: object, name: str, renamed: Mapping[str, str]) -> AttributeError:
    """Return the error for a class's `__getattr__`; when `name` is an old name, the error says the new name."""
    kind = type(owner).__name__
    if name in renamed:
        return AttributeError(f"{kind}.{name} is now called {kind}.{renamed[name]}", name=name, obj=owner)
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def warn(message: str, kind: type[Warning]) -> None:
    """Show a warning at the line of the caller's code that led here, not at a line of this package."""
    import warnings

    frame: FrameType | None = sys._getframe()  # noqa: SLF001  # `inspect` is slow to import
    level = 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __package__:
        frame = frame.f_back
        level += 1
    warnings.warn(message, kind, stacklevel=level + 1)
