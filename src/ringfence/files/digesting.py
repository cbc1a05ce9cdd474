"""A thread that digests while its owner reads and writes: `hashlib` lets others run during a large piece."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from queue import SimpleQueue
    from typing import Protocol

    class Digest(Protocol):
        def update(self, data: bytes | memoryview, /) -> None: ...


_MOST_WAITING = 8  # pieces, which stay in memory that long


class Beside:
    """Updates digests in the order asked for. For one thread; close it."""

    def __init__(self) -> None:
        from queue import SimpleQueue
        from threading import Thread

        self._todo: SimpleQueue[tuple[Digest, bytes | memoryview] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._waiting = 0
        self._thread = Thread(target=_work, args=(self._todo, self._done), name="ringfence-digest", daemon=True)
        self._thread.start()

    def update(self, digest: Digest, piece: bytes | memoryview) -> None:
        """Soon. The piece must not change."""
        self._todo.put((digest, piece))
        self._waiting += 1
        if self._waiting > _MOST_WAITING:
            self._settle(1)

    def settle(self) -> None:
        """Return when every update is done."""
        self._settle(self._waiting)

    def _settle(self, count: int) -> None:
        for _ in range(count):
            self._done.get()
            self._waiting -= 1

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()


def _work(todo: SimpleQueue[tuple[Digest, bytes | memoryview] | None], done: SimpleQueue[None]) -> None:
    while (job := todo.get()) is not None:
        job[0].update(job[1])
        done.put(None)
