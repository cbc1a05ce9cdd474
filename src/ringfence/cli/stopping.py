"""Owns what a signal does to the verbs that make things on this machine: they put away what they made, and then end."""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ringfence.cli.console import Console

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # Ctrl-C is Python's own


class Stopped(BaseException):
    """A signal told us to end. Not an Exception: nothing on the way up may take it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def tidily(verb: Callable[[list[str], Console], int], words: list[str], console: Console) -> int:
    """The verb's exit code, or 128 and the number of the signal that ended it. A second signal does not wait."""
    mine = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores one
    for number in mine:
        signal.signal(number, _stop)
    try:
        return verb(words, console)
    except Stopped as stopped:
        from ringfence.cli.console import OutputClosed, Problem

        try:
            console.fail(f"stopped by {signal.Signals(stopped.number).name}", code="stopped", fix=None)
        except (OutputClosed, Problem):
            pass  # the terminal went with the signal; the exit code still tells
        return 128 + stopped.number
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _: FrameType | None) -> None:
    for each in _SIGNALS:
        if signal.getsignal(each) is _stop:
            signal.signal(each, signal.SIG_DFL)
    raise Stopped(number)
