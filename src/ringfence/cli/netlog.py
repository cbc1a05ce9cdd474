"""Owns --net-log: each connection or request that the gateway decided about, as a JSON line."""

from __future__ import annotations

import json
import os

from ringfence.cli.console import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Sandbox
    from ringfence.events import Request
    from ringfence.values import Json


def save(fd: int, box: Sandbox) -> None:
    """Write the whole log and close the file."""
    try:
        for request in box.network.log():
            write(fd, json.dumps(to_dict(request)).encode() + b"\n", name="--net-log")
    finally:
        os.close(fd)


def to_dict(request: Request) -> dict[str, Json]:
    """Named as the fields are; the time in ISO 8601."""
    fields = {name: getattr(request, name) for name in type(request).__fields__}
    return {**fields, "at": request.at.isoformat()}
