"""Limits of one-shot runs, and the smallest that work. What holds for every backend is in the conformance table."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any, Literal, NoReturn

import pytest

import ringfence
import weaker
from programs import read_program
from ringfence import Limits, Policy, Result, Sandbox
from ringfence.backends import linux
from ringfence.backends.process import pool
from ringfence.core import arguments
from ringfence.wire.inbox import Switchboard

pytestmark = pytest.mark.everywhere


def limited(**limits: Any) -> Policy:
    return Policy(limits=Limits(**limits))


def verdict(result: Result) -> tuple[str, str]:
    return result.status, result.reason


# ── time ─────────────────────────────────────────────────────────────────────────────────────────

STUBBORN = read_program("behaviour/limits_stubborn.py")


def test_a_timeout_takes_daemons_that_ignore_signals_and_is_answered() -> None:
    started = time.monotonic()
    result = ringfence.run(STUBBORN, timeout_s=0.6)
    assert time.monotonic() - started < 15
    assert (*verdict(result), result.exit_code, result.stdout) == ("timeout", "wall-clock", None, "up\n")


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "code",
    [
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nos.fork(); os.fork()\nx = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1",
    ],
)
@pytest.mark.everywhere(gvisor="its kernel's memory is counted too", container="guestd's memory is counted too")
@weaker.needs_cgroup
def test_more_memory_than_the_limit_is_oom(code: str) -> None:
    policy = limited(memory="64M", disk="1M")
    result = ringfence.run(code, policy=policy)
    assert verdict(result) == ("oom", "memory"), result.render()
    assert result.usage.memory_peak_bytes is not None
    assert result.usage.memory_peak_bytes <= (64 << 20) + 2 * (1 << 20) + (32 << 20) + 4096


HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"


@weaker.needs_cgroup
def test_each_call_that_the_memory_limit_ended_is_told_so_and_no_other() -> None:
    """The kernel keeps a single count for a sandbox: the first call that read the count reset it for the rest."""
    with Sandbox(policy=limited(memory="64M", disk="1M"), backend="process") as box:
        hogs = [box.spawn(["python3", "-c", HOG]) for _ in range(2)]
        ended = [hog.wait() for hog in hogs[:1]]
        while hogs[1].running:
            time.sleep(0.01)
        box.usage()
        ended.append(hogs[1].wait())
        assert [verdict(result) for result in ended] == [("oom", "memory")] * 2
        assert verdict(box.exec(["sh", "-c", "kill -9 $$"])) == ("error", "signal")
        daemon = box.spawn(["sh", "-c", f"(python3 -c '{HOG}'; echo gone) & echo begun"])
        daemon.wait()
        box.exec(["sh", "-c", "while pidof python3; do sleep 0.05; done"])
        assert verdict(box.exec(["sh", "-c", "kill -9 $$"])) == ("error", "signal"), "what died before it is not its"


@weaker.needs_cgroup
def test_cpu_time_in_a_result_is_the_calls_and_not_the_sandboxs() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with Sandbox(backend="process") as box:
        used = [box.exec(["python3", "-c", burn]), box.exec(["true"]), box.run(burn), box.run("1")]
        spent = [result.usage.cpu_s or 0.0 for result in used]
        assert [seconds >= 0.29 for seconds in spent] == [True, False, True, False], spent
        assert (box.usage().cpu_s or 0.0) >= sum(spent)


def test_who_ignores_sigxcpu_is_told_as_out_of_cpu_time() -> None:
    """Without a cgroup RLIMIT_CPU enforces the limit; its hard limit kills with a signal that has no reason."""
    call = arguments.Call({"kind": "exec"}, ("x",), 30.0, 1.0)
    end = {"ev": "exit", "why": None, "code": None, "signal": signal.SIGKILL}
    told = [arguments._verdict(call, {**end, "cpu_s": spent}, oom=False, raised=False) for spent in (2.6, 0.4)]
    assert told == [("limit", "cpu-time"), ("error", "signal")]


def test_a_guest_that_kills_itself_as_a_limit_would_has_met_none() -> None:
    with Sandbox(backend="process") as box:
        assert verdict(box.exec(["sh", "-c", "kill -XCPU $$"])) == ("error", "signal")
        assert verdict(box.run("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)")) == ("error", "signal")


def test_limits_of_years_are_kept_as_others_are() -> None:
    """The kernel's waits end at 24 days."""
    years = 9 * 365 * 86_400.0
    limits = Limits(timeout_s=years, cpu_time_s=years, lifetime_s=years, idle_s=years)
    with Sandbox(policy=Policy(limits=limits)) as box:
        assert (box.run("6 * 7").value, box.spawn(["echo", "x"]).wait().stdout) == ("42", "x\n")
        time.sleep(0.2)  # nothing runs: the monitor waits for years
        box.files.write("f", "x")
        assert ([match.line for match in box.files.search("x")], box.state) == ([1], "running")
    assert ringfence.run("print(1)", policy=Policy(limits=limits)).ok


def test_what_other_cells_of_a_session_spent_is_not_the_limit_of_one_that_is_killed() -> None:
    burn = "import time\nend = time.process_time() + 0.7\nwhile time.process_time() < end: pass"
    with Sandbox(backend="process", policy=Policy(limits=Limits(cpu_time_s=1))) as box:
        assert [box.run(burn).status for _ in range(2)] == ["ok", "ok"]
        assert verdict(box.run("import os; os.kill(os.getpid(), 9)")) == ("error", "signal")


# ── processes and descriptors ────────────────────────────────────────────────────────────────────

COUNT = """
import os, signal
n = 1
while True:
    try: pid = os.fork()
    except OSError as e:
        reason = e.strerror
        break
    if pid == 0: signal.pause()
    n += 1
(n, reason)
"""


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_exactly_so_many_processes_run_at_once(limit: int) -> None:
    result = ringfence.run(COUNT, policy=limited(processes=limit))
    assert result.value == f"({limit}, 'Resource temporarily unavailable')", result.render()


@pytest.mark.everywhere(container="a new interpreter needs five")
def test_a_guest_with_few_descriptors_is_still_served() -> None:
    with Sandbox(policy=limited(open_files=4)) as box:
        box.files.write("d/f", "x")
        assert [info.path for info in box.files.list(recursive=True)] == ["d", "d/f"]
        assert box.exec(["sh", "-c", "ulimit -n; ulimit -Hn"]).stdout == "4\n4\n"
        assert box.run("1").value == "1"
    assert ringfence.run("1", policy=limited(open_files=1)).value == "1"


@pytest.mark.parametrize(
    "policy",
    [
        limited(cpus=0.01),
        limited(disk=1, disk_files=1),
        limited(output=1),
        limited(memory="8M" if weaker.HAS_CGROUP else "16M"),  # without one, all that a process maps is counted
        limited(processes=1, open_files=3),
    ],
)
def test_the_smallest_limits_still_run(policy: Policy) -> None:
    assert ringfence.run("1 + 1", policy=policy, backend="process").value == "2"


@pytest.mark.parametrize("backend", ["process", "auto"])
def test_too_little_memory_to_start_says_so(backend: Literal["process", "auto"]) -> None:
    """Holds for "auto" too, which used to take gVisor, whose own 160M the guest could use."""
    with pytest.raises(ringfence.UnsupportedError, match=r"limits\.memory is too small") as refused:
        ringfence.run("1", policy=limited(memory="64K", disk="4K"), backend=backend)
    assert (refused.value.code, refused.value.fix) == ("memory", "a larger limits.memory")


def test_the_largest_number_of_processes_runs() -> None:
    assert ringfence.run("1 + 1", policy=limited(processes=4_194_304), backend="process").value == "2"


@weaker.needs_cgroup
def test_a_cgroup_that_cannot_be_made_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdir fails with EAGAIN at cgroup.max.descendants of a delegated group."""

    def full(*_: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), "/sys/fs/cgroup/x")

    monkeypatch.setattr(pool.pool(linux.interpreter(), ()).tree, "create", full)
    with pytest.raises(ringfence.SandboxError, match=r"no cgroup could be made .*/sys/fs/cgroup/x") as refused:
        ringfence.run("1", policy=limited(processes=77), backend="auto")  # no fact of this host: no other wall is taken
    assert (refused.value.code, "cgroup.max.descendants" in str(refused.value.fix)) == ("cgroup", True)


# ── output ───────────────────────────────────────────────────────────────────────────────────────


def test_a_flood_of_output_does_not_grow_the_host() -> None:
    import resource

    ringfence.run("print(1)")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = ringfence.run("import sys\nfor _ in range(300): sys.stdout.write('x' * 1_000_000)")
    assert (result.status, result.usage.output_bytes) == ("ok", 300_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


# ── files ──────────────────────────────────────────────────────────────────────────────────────────


def test_shared_memory_has_a_size_of_its_own() -> None:
    code = """
import os
fd = os.open("/dev/shm/f", os.O_WRONLY | os.O_CREAT)
n = 0
try:
    while True: n += os.write(fd, b"x" * (1 << 20))
except OSError as e: reason = e.strerror
(n, reason)
"""
    assert ringfence.run(code).value == f"({64 << 20}, 'No space left on device')"


FLOOD = "for number in range(25_000): display(number)"


def test_a_host_that_reads_more_slowly_than_its_guest_wrote_gets_the_whole_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All processes inside have ended by then, and the monitor has the rest of the result."""
    feed, waits = Switchboard.feed, [2.0]

    def slowly(self: Switchboard, data: bytes) -> None:
        time.sleep(waits.pop() if waits else 0)
        feed(self, data)

    monkeypatch.setattr(Switchboard, "feed", slowly)
    one_by_one = "import os\nfor number in range(10_000): display(number); os.sched_yield()"
    result = ringfence.run(one_by_one)
    assert (result.status, len(result.outputs)) == ("ok", 10_000)


def test_more_displays_than_a_call_may_have_are_printed_and_nothing_is_lost() -> None:
    patient = Policy(limits=Limits(timeout_s=50, cpu_time_s=50))
    with Sandbox(policy=patient) as box:
        box.run("x = 1").check()
        for result in (ringfence.run(FLOOD, policy=patient), box.run(FLOOD)):
            shown = [output.text for output in result.outputs]
            assert (result.status, result.state_kept, shown == [str(n) for n in range(len(shown))]) == (
                "ok",
                True,
                True,
            )
            assert result.stdout.split() == [str(number) for number in range(len(shown), 25_000)]
            assert 0 < len(shown) <= 20_000
        assert box.run("x").value == "1"


EMPTY = """
import json, os, struct
for number in range(5000):
    mimes = [[f"{kind}-{number}-" + "x" * 80, 0] for kind in range(32)]
    text = json.dumps({"m": "display", "value": False, "mimes": mimes}).encode()
    os.write(3, struct.pack("<II", len(text), 0) + text)
"""


def test_displays_of_many_names_and_no_bytes_are_counted_too() -> None:
    """Each name takes the host's memory as well."""
    with Sandbox() as box:
        result = box.run(EMPTY).check()
        assert (len(result.outputs), result.truncated) == ((1 << 24) // (32 * 256), True)
