"""Events of something that runs, and of a folder that is watched. Match them."""

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
    text: str  # decoded across chunks: joined, it is Result.stdout
    cursor: int


@final
class Stderr(Struct):
    """Bytes from standard error."""

    data: bytes
    text: str
    cursor: int


@final
class Display(Struct):
    """An object the guest displayed."""

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
    """The reader came back too late: these bytes are gone."""

    lost_bytes: int
    cursor: int


@final
class Exit(Struct):
    """Always the last event."""

    result: Result
    cursor: int


Event: TypeAlias = Stdout | Stderr | Display | Prompt | Denied | Gap | Exit


@final
class FileEvent(Struct):
    """One change a watch saw."""

    kind: Literal["create", "write", "remove", "rename", "chmod", "overflow"]
    path: str
    source: str | None = None  # of a rename
