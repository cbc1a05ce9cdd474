"""Measure what a live session costs: a cell, a copy with memory, a snapshot, a transfer, and being idle."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.measuring import Row, Series, alternate, compared, seconds
from ringfence import Limits, Policy, Sandbox

ROOM = Policy(limits=Limits(memory="1G", timeout_s=120, disk="1500M"))
_MEMCPY = """
import time
source = bytearray(100 << 20)
def copy():
    begun = time.perf_counter(); bytes(source); return time.perf_counter() - begun
min(copy() for _ in range(5))
"""
_FORK = """
import os, time
def fork():
    begun = time.perf_counter()
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    return time.perf_counter() - begun
sorted(fork() for _ in range(15))[7]
"""


def cells(count: int) -> list[Row]:
    """Compare `1+1` in a live session with the same through jupyter_client and ipykernel."""
    with Sandbox() as box, _Jupyter() as jupyter:
        box.run("1+1").check()

        def ours() -> float:
            return seconds(lambda: box.run("1+1").check())

        mine, theirs = alternate(count, ours, jupyter.cell, warm_up=5)
    p50 = mine.p50 * 1e3
    return [
        Row("cell in a live session", 1.5, p50, mine.p99 * 1e3, unit="ms", ours=f"p50 {p50:.2f} ms"),
        compared("cell in a live session", 0.2, mine, theirs, "jupyter_client + ipykernel"),
    ]


class _Jupyter:
    """Start a Jupyter kernel of the same interpreter."""

    def __enter__(self) -> _Jupyter:
        from jupyter_client.manager import KernelManager  # type: ignore[import-not-found]  # installed by `make bench`

        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(extra_arguments=["--IPKernelApp.log_level=50"])
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=30)
        return self

    def cell(self) -> float:
        return seconds(lambda: self._client.execute_interactive("1+1", output_hook=_ignore, timeout=30))

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def _ignore(_: object) -> None:
    """Ignore a message of the kernel."""


def copies(count: int) -> list[Row]:
    """Measure a session with a list of 100 MB: its first copy, and further copies from one image."""
    with Sandbox(policy=ROOM) as box:
        box.run("held = [0] * (100 * 131072)").check()
        with Sandbox(policy=ROOM) as other:
            copied = float(other.run(_MEMCPY).check().value or 0)
        forked = float(box.run(_FORK).check().value or 0)
        first = Series.of([seconds(lambda: _first(box)) for _ in range(count)])
        image = box.snapshot(memory=True)
        further = Series.of([seconds(lambda: _further(image)) for _ in range(count * 2)])
        image.delete()
    shown = f"p50 {first.p50 * 1e3:.0f} ms"
    return [
        Row("first fork of 100 MB, to its first answer", 120, first.p50 * 1e3, first.p99 * 1e3, unit="ms", ours=shown),
        _ratio("first fork / memcpy of its size", 3, first, copied),
        _ratio("further copy / os.fork of the same process", 8, further, forked),
    ]


def _first(box: Sandbox) -> None:
    with box.fork() as copy:
        assert copy.run("len(held)").value == "13107200"


def _further(image: object) -> None:
    with Sandbox(policy=ROOM, snapshot=image) as copy:  # type: ignore[arg-type]  # a Snapshot
        assert copy.run("len(held)").value == "13107200"


def _ratio(name: str, bar: float, ours: Series, against: float) -> Row:
    mine, theirs = f"p50 {ours.p50 * 1e3:.1f} ms", f"against {against * 1e3:.1f} ms"
    return Row(name, bar, ours.p50 / against, ours.p99 / against, ours=mine, against=theirs)


def snapshots(count: int) -> list[Row]:
    """Measure a snapshot of a thousand files, and the next after three of them changed."""
    firsts, seconds_ = [], []
    for _ in range(count):
        with Sandbox(policy=ROOM) as box:
            box.run("for i in range(1000):\n    open(f'f{i}', 'w').write(str(i) * 2000)").check()
            box.exec(["sleep", "0.1"])
            firsts.append(seconds(lambda box=box: box.snapshot()))  # type: ignore[misc]  # bound now
            box.run("for i in range(3): open(f'f{i}', 'a').write('x')").check()
            box.exec(["sleep", "0.1"])
            seconds_.append(seconds(lambda box=box: box.snapshot()))  # type: ignore[misc]  # as above
    mine, theirs = Series.of(seconds_), Series.of(firsts)
    return [compared("snapshot after changing 3 of 1000 files", 0.1, mine, theirs, "the first")]


def transfers(megabytes: int) -> list[Row]:
    """Measure a gigabyte in and out, beside `cat` through a pipe."""
    size = megabytes << 20
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ringfence-bench-"))
    try:
        source, target = folder / "in", folder / "out"
        source.write_bytes(os.urandom(1 << 20) * megabytes)
        piped = min(seconds(lambda: _piped(source, target)) for _ in range(3))
        target.unlink()
        with Sandbox(policy=ROOM) as box:
            up, down = [], []
            for _ in range(3):
                up.append(seconds(lambda: box.files.upload(source, "f")))
                down.append(seconds(lambda: box.files.download("f", target)))
                target.unlink()
                box.files.remove("f")
    finally:
        shutil.rmtree(folder)
    rate = f"{size / piped / 1e9:.2f} GB/s piped"
    ins, outs = min(up), min(down)
    return [
        Row("upload / cp through a pipe", 0.3, piped / ins, at_least=True, ours=f"{ins:.2f} s", against=rate),
        Row("download / cp through a pipe", 0.3, piped / outs, at_least=True, ours=f"{outs:.2f} s", against=rate),
    ]


def _piped(source: Path, target: Path) -> None:
    subprocess.run(["sh", "-c", 'cat "$1" | cat > "$2"', "sh", str(source), str(target)], check=True)


def idle(count: int) -> list[Row]:
    """Measure the PSS of each of many sandboxes that have a session with state."""
    boxes = []
    try:
        for number in range(count):
            box = Sandbox(policy=Policy(limits=Limits(memory="64M", disk="10M"))).start()
            boxes.append(box)
            box.run(f"held = {number}").check()
        total = sum(_pss(box) for box in boxes)
        assert all(box.run("held").value == str(number) for number, box in enumerate(boxes))
    finally:
        for box in boxes:
            box.close()
    each = total / count / 1024
    return [Row("idle session, PSS", 6, each, unit="MiB", ours=f"{count} sessions, {total >> 10} MiB in all")]


def _pss(box: Sandbox) -> int:
    """Return the PSS in KiB of all processes in the pid namespace of a sandbox's session."""
    inbox = box.session()._inbox  # noqa: SLF001  # where the host knows its process
    assert inbox is not None
    namespace = os.readlink(f"/proc/{inbox.pid}/ns/pid")
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                rollup = Path(f"/proc/{name}/smaps_rollup").read_text()
                total += int(rollup.partition("\nPss:")[2].split()[0])
        except (OSError, IndexError, ValueError):
            continue  # it ended while we looked
    return total
