"""Events of a running process and of a watched folder. Use `match` on them."""

from __future__ import annotations

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from ringfence.results import Denial, Output, Result

__all__ = ["Denied", "Display", "Event", "Exit", "FileEvent", "Gap", "Prompt", "Stderr", "Stdout"]


@final
class Stdout(Struct):
    """Bytes from standard output."""

    data: bytes
    text: str  # decoded across chunks: all texts joined are Result.stdout
    cursor: int


@final
class Stderr(Struct):
    """Bytes from standard error."""

    data: bytes
    text: str
    cursor: int


@final
class Display(Struct):
    """An object that the guest displayed."""

    output: Output
    cursor: int


@final
class Prompt(Struct):
    """The guest waits in input(); answer with Process.write()."""

    text: str
    cursor: int


@final
class Denied(Struct):
    """The policy refused something."""

    denial: Denial
    cursor: int


@final
class Gap(Struct):
    """Events that are lost: the reader came back too late, and `lost_bytes` were dropped."""

    lost_bytes: int
    cursor: int


@final
class Exit(Struct):
    """The end of the process. Always the last event."""

    result: Result
    cursor: int


Event: TypeAlias = Stdout | Stderr | Display | Prompt | Denied | Gap | Exit


@final
class FileEvent(Struct):
    """One change that a watch saw."""

    kind: Literal["create", "write", "remove", "rename", "chmod", "overflow"]
    path: str
    source: str | None = None  # the old path, for a rename
