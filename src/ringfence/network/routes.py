"""Where the requests of one connection go, and the connection to a server that is kept for the next of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ringfence.network.streams import Stream
    from ringfence.network.targets import Context, Entry, Refusal, Target


class Route:
    """Where requests of one connection go. `choose` gives a request's target and its target in origin form."""

    def __init__(
        self,
        context: Context,
        choose: Callable[[str, list[str]], tuple[Target, str]],
        connect: Callable[[Target], Awaitable[Stream]],
        *,
        verified: bool,
    ) -> None:
        self.context = context
        self.choose = choose  # called with the request target and every Host; raises Refusal
        self.connect = connect  # raises Refusal
        self.verified = verified  # it is TLS whose certificate was checked


class Begun:
    """An exchange that was begun elsewhere: a request without a body, where it went, and how far it came."""

    def __init__(
        self, head: bytes, target: Target, entry: Entry | None, stream: Stream | None, refusal: Refusal | None
    ) -> None:
        """Without an entry it is over, and its stream is for the next. A refusal is still to be told."""
        self.head = head
        self.target = target
        self.entry = entry
        self.stream = stream
        self.refusal = refusal


class Server:
    """The connection to the server, kept for the next request to the same target."""

    def __init__(self, route: Route, begun: Begun | None) -> None:
        self._route = route
        self._target = None if begun is None else begun.target
        self._stream = None if begun is None else begun.stream
        self.is_reused = False

    async def get(self, target: Target) -> Stream:
        """Raises Refusal."""
        stream = self._stream
        if stream is not None and self._target == target and not stream.is_stale():
            self.is_reused = True
            return stream
        self.close()
        self._stream = stream = await self._route.connect(target)
        self._target = target
        self.is_reused = False
        return stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None
