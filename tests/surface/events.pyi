"""Events of something that runs, and of a folder that is watched. Match them."""
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from ringfence import Result
from ringfence.types import Denial, Output

__all__ = [
    "Denied", "Display", "Event", "Exit", "FileEvent", "Gap", "Prompt", "Stderr", "Stdout",
]

@final
@dataclass(frozen=True)
class Stdout:
    data: bytes
    text: str  # decoded across chunks: joined, it is Result.stdout
    cursor: int

@final
@dataclass(frozen=True)
class Stderr:
    data: bytes
    text: str
    cursor: int

@final
@dataclass(frozen=True)
class Display:
    output: Output
    cursor: int

@final
@dataclass(frozen=True)
class Prompt:
    """The guest waits in input(); answer with Process.write()."""

    text: str
    cursor: int

@final
@dataclass(frozen=True)
class Denied:
    denial: Denial
    cursor: int

@final
@dataclass(frozen=True)
class Gap:
    """The reader came back too late: these bytes are gone."""

    lost_bytes: int
    cursor: int

@final
@dataclass(frozen=True)
class Exit:
    """Always the last event."""

    result: Result
    cursor: int

Event: TypeAlias = Stdout | Stderr | Display | Prompt | Denied | Gap | Exit

@final
@dataclass(frozen=True)
class FileEvent:
    kind: Literal["create", "write", "remove", "rename", "chmod", "overflow"]
    path: str
    source: str | None = None  # of a rename
