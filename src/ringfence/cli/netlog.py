"""Owns --net-log: each connection or request that the gateway decided about, as a JSON line."""

from __future__ import annotations

import json
import os

from ringfence.cli.console import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Sandbox
    from ringfence.cli.console import Console
    from ringfence.events import Request
    from ringfence.values import Json


def save(fd: int, box: Sandbox, console: Console) -> None:
    """Write the log, say how much of it is not kept any more, and close the file."""
    try:
        requests = box.network.log()
        for request in requests:
            write(fd, json.dumps(to_dict(request)).encode() + b"\n", name="--net-log")
        ended = sum(host.allowed + host.denied + host.failed for host in box.network.summary())
        if ended > len(requests):  # a guest can ask for names without end, to have an earlier line forgotten
            console.say(f"--net-log holds the last {len(requests)} connections of {ended}")
    finally:
        os.close(fd)


def to_dict(request: Request) -> dict[str, Json]:
    """Named as the fields are; the time in ISO 8601."""
    fields = {name: getattr(request, name) for name in type(request).__fields__}
    return {**fields, "at": request.at.isoformat()}
