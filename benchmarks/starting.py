"""Measure what one run costs: with a spare sandbox, without, with numpy preloaded, and from the shell."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import ringfence
from benchmarks import spares
from benchmarks.measuring import Row, alternate, compared, output_of, seconds
from ringfence import Image, Limits, Policy
from ringfence.plan.rootfs.interpreter import interpreter

CODE = "print('hi')"
ROOT = Path(__file__).resolve().parents[1]
_numbers = itertools.count(1)


def bare() -> float:
    return seconds(lambda: output_of([interpreter().executable, "-I", "-S", "-c", CODE]))


def one_run(policy: Policy | None = None) -> float:
    def work() -> None:
        result = ringfence.run(CODE) if policy is None else ringfence.run(CODE, policy=policy)
        assert result.stdout == "hi\n", result

    return seconds(work)


def cold_bar() -> tuple[float, str]:
    """Joining a cgroup v1 waits for an RCU grace period."""
    tree = spares.of().tree
    kind = tree.kind if tree is not None else "no cgroup"
    return (2.0 if kind == "cgroup v1" else 0.8), kind


def with_a_spare(count: int) -> Row:
    where = spares.of()
    one_run()

    def ours() -> float:
        spares.wait_for_one(where)
        return one_run()

    hits = spares.Hits(where)
    mine, theirs = alternate(count, ours, bare)
    return compared("run, a spare ready", 0.25, mine, theirs, "bare python -I -S", str(hits))


def after_a_burst(count: int) -> Row:
    where = spares.of()
    one_run()

    def ours() -> float:
        spares.wait_for_one(where)
        spares.take_all_away(where)
        return one_run()

    hits = spares.Hits(where)
    mine, theirs = alternate(count, ours, bare)
    bar, kind = cold_bar()
    return compared("run, no spare: burst", bar, mine, theirs, "bare python -I -S", str(hits), kind)


def with_a_new_policy(count: int) -> Row:
    where = spares.of()

    def ours() -> float:
        return one_run(Policy(limits=Limits(disk=(32 << 20) + 4096 * next(_numbers))))

    hits = spares.Hits(where)
    mine, theirs = alternate(count, ours, bare)
    bar, kind = cold_bar()
    return compared("run, no spare: new policy", bar, mine, theirs, "bare python -I -S", str(hits), kind)


def first_call(count: int) -> Row:
    """Measure a new process from the call to its result, imports and the zygote's start included."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import time; t = time.perf_counter()\n"
        f"import ringfence; r = ringfence.run({CODE!r}); t = time.perf_counter() - t; assert r.ok; print(t)"
    )
    argv = [interpreter().executable, "-I", "-S", "-W", "ignore", "-c", program]
    env = {name: os.environ[name] for name in ("HOME", "XDG_RUNTIME_DIR") if name in os.environ}
    mine, theirs = alternate(count, lambda: float(output_of(argv, env)), bare, warm_up=1)
    bar, kind = cold_bar()
    return compared("run, no spare: first call", bar, mine, theirs, "bare python -I -S", kind)


def with_numpy(count: int) -> Row:
    name, bar = "run with numpy, preloaded, a spare ready", 0.1
    code = "import numpy; print(numpy.arange(4).sum())"
    bare_numpy = [sys.executable, "-I", "-c", code]
    try:
        output_of(bare_numpy)
    except RuntimeError:
        return Row(name, bar, notes=(f"{sys.executable} has no numpy",))
    where = spares.of(("numpy",))
    image = Image(preload=["numpy"])

    def work() -> None:
        result = ringfence.run(code, image=image)
        assert result.stdout == "6\n", result

    def ours() -> float:
        spares.wait_for_one(where)
        return seconds(work)

    work()
    hits = spares.Hits(where)
    mine, theirs = alternate(count, ours, lambda: seconds(lambda: output_of(bare_numpy)))
    return compared(name, bar, mine, theirs, "bare python importing numpy", str(hits))


def zerobox() -> str | None:
    """Return the path of ZeroBox's binary; its Python package would start an interpreter first."""
    scripts = Path(sysconfig.get_path("scripts"), "zerobox")
    return os.environ.get("ZEROBOX_BIN") or (str(scripts) if scripts.exists() else shutil.which("zerobox"))


def from_the_shell(count: int) -> Row:
    name, bar = "ringfence exec -- /bin/true", 1.0
    peer = zerobox()
    if peer is None:
        return Row(name, bar, notes=("zerobox is not installed: requirements/bench.txt",))
    kept = ("HOME", "PATH", "XDG_RUNTIME_DIR", "PYTHONPATH", "TMPDIR")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    ours = [*command(), "exec", "--", "/bin/true"]
    theirs = [peer, "--", "/bin/true"]
    try:
        output_of(theirs, env)
    except RuntimeError as error:
        return Row(name, bar, notes=(str(error),))
    mine, other = alternate(
        count, lambda: seconds(lambda: output_of(ours, env)), lambda: seconds(lambda: output_of(theirs, env))
    )
    return compared(name, bar, mine, other, "zerobox -- /bin/true")


def command() -> list[str]:
    """Return the installed command as a shell starts it; in a copied tree, the same file by this interpreter."""
    installed = Path(sysconfig.get_path("scripts"), "ringfence")
    return [str(installed)] if installed.exists() else [sys.executable, str(ROOT / "bin" / "ringfence")]
