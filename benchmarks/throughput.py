"""Compare runs per second, four at once, with bubblewrap around a bare Python."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable

import ringfence
from benchmarks import spares
from benchmarks.measuring import TIMES, Row, Series, alternate, output_of, seconds
from benchmarks.starting import CODE
from ringfence.plan.rootfs.interpreter import interpreter

THREADS = 4
BAR = 1.8
NAME = f"runs per second, {THREADS} at once"


def at_once(rounds: int, runs: int) -> Row:
    """Do `runs` runs by each side in turns, `rounds` times. The bar is for the median round; the worst is p99."""
    program = shutil.which("bwrap")
    if program is None:
        return Row(NAME, BAR, at_least=True, notes=("bwrap is not installed",))
    where = spares.of()
    hits = spares.Hits(where)
    argv = bubblewrap(program)
    mine, theirs = alternate(
        rounds, lambda: runs / _all(runs, _ours), lambda: runs / _all(runs, lambda: _theirs(argv)), warm_up=1
    )
    worst = mine.samples[0] / theirs.samples[-1]
    per_second = (_rate(mine), f"bwrap python -I -S: {_rate(theirs)}")
    return Row(NAME, BAR, mine.p50 / theirs.p50, worst, True, TIMES, *per_second, notes=(str(hits),))


def bubblewrap(program: str) -> list[str]:
    """Return bubblewrap's command: all namespaces, /usr read-only, a fresh /proc, /dev, /tmp; no filter, no limits."""
    python = interpreter()
    shown = [path for root in ("/usr", *python.roots) for path in ("--ro-bind", root, root)]
    links = [word for name in ("lib", "lib64", "bin") for word in _like_the_host(name)]
    fresh = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    alone = ["--unshare-all", "--die-with-parent"]
    return [program, *alone, *links, *fresh, *shown, python.executable, "-I", "-S", "-c", CODE]


def _like_the_host(name: str) -> list[str]:
    if os.path.islink(f"/{name}"):
        return ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    return ["--ro-bind", f"/{name}", f"/{name}"] if os.path.isdir(f"/{name}") else []


def _ours() -> None:
    assert ringfence.run(CODE).stdout == "hi\n"


def _theirs(argv: list[str]) -> None:
    assert output_of(argv) == b"hi\n"


def _all(runs: int, work: Callable[[], None]) -> float:
    """Return the seconds that `runs` runs by THREADS threads take."""
    left = iter(range(runs))
    lock = threading.Lock()
    failed: list[BaseException] = []

    def take_turns() -> None:
        while not failed:
            with lock:
                if next(left, None) is None:
                    return
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # raised below, in the thread that counts
                failed.append(error)
                return

    def together() -> None:
        threads = [threading.Thread(target=take_turns) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    took = seconds(together)
    if failed:
        raise failed[0]
    return took


def _rate(series: Series) -> str:
    return f"{series.p50:.0f} /s"
