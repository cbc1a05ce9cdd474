"""Each limit holds at its number, and the result says which one it was."""

from __future__ import annotations

import time
from typing import Any

import pytest

import ringfence
from ringfence import Limits, Policy, PolicyError, Result, Sandbox, SandboxClosedError


def limited(**limits: Any) -> Policy:
    return Policy(limits=Limits(**limits))


def verdict(result: Result) -> tuple[str, str]:
    return result.status, result.reason


# ── time ─────────────────────────────────────────────────────────────────────────────────────────

STUBBORN = """
import os, signal, time
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except OSError: pass
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in (0, 1, 2): os.close(fd)
        while True: time.sleep(1)
print("up", flush=True)
while True: time.sleep(1)
"""


def test_a_timeout_takes_daemons_that_ignore_signals_and_answers_within_a_second() -> None:
    started = time.monotonic()
    result = ringfence.run(STUBBORN, timeout_s=0.6)
    assert time.monotonic() - started < 1.6
    assert (*verdict(result), result.exit_code, result.stdout) == ("timeout", "wall-clock", None, "up\n")


def test_a_timeout_in_a_sandbox_takes_the_tree_and_leaves_the_sandbox(box: Sandbox) -> None:
    started = time.monotonic()
    result = box.exec(["python3", "-c", STUBBORN], timeout_s=0.8)
    assert time.monotonic() - started < 1.8
    assert verdict(result) == ("timeout", "wall-clock")
    assert box.run("import os\nsum(p.isdigit() for p in os.listdir('/proc'))").value == "3"  # PID 1, spawner, itself


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal; signal.pause()",
        "while True: print('x' * 1000)",
        "import os\nwhile True:\n    try:\n        if os.fork() == 0: pass\n    except OSError: pass",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "input()",
    ],
)
def test_whatever_a_program_does_its_timeout_comes(code: str) -> None:
    started = time.monotonic()
    result = ringfence.run(code, timeout_s=0.5, policy=limited(processes=30))
    took = time.monotonic() - started
    if code == "input()":
        assert verdict(result) == ("error", "exception")
    else:
        assert (verdict(result), took < 1.5) == (("timeout", "wall-clock"), True)


def test_a_timeout_of_a_call_narrows_the_policy_and_never_widens_it() -> None:
    policy = limited(timeout_s=0.4)
    assert verdict(ringfence.run("while True: pass", policy=policy)) == ("timeout", "wall-clock")
    with pytest.raises(PolicyError, match=r"timeout_s=5 is more than the policy's limits.timeout_s=0.4") as caught:
        ringfence.run("1", policy=policy, timeout_s=5)
    assert (caught.value.key, caught.value.fix) == ("timeout_s", "Policy(limits=Limits(timeout_s=5))")


def test_cpu_time_is_counted_over_children_and_ends_as_a_limit() -> None:
    code = "import os\nfor _ in range(3):\n    if os.fork() == 0: break\nwhile True: pass"
    result = ringfence.run(code, policy=limited(cpu_time_s=0.5, timeout_s=20))
    assert verdict(result) == ("limit", "cpu-time")
    assert result.usage.cpu_s is not None
    assert 0.4 < result.usage.cpu_s < 1.0


def test_sleeping_costs_no_cpu_time() -> None:
    assert ringfence.run("import time; time.sleep(0.6)", policy=limited(cpu_time_s=0.5)).ok


def test_cpu_time_is_for_each_call(box: Sandbox) -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with Sandbox(policy=limited(cpu_time_s=0.6)) as small:
        assert [small.run(burn).status for _ in range(3)] == ["ok", "ok", "ok"]


def test_a_share_of_a_cpu_is_all_a_guest_gets() -> None:
    code = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass\ntime.process_time()"
    result = ringfence.run(code, policy=limited(cpus=0.25))
    assert result.value is not None
    assert float(result.value) < 0.4


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "code",
    [
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nos.fork(); os.fork()\nx = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1",
    ],
)
def test_more_memory_than_the_limit_is_oom(code: str) -> None:
    policy = limited(memory="64M", disk="1M")
    result = ringfence.run(code, policy=policy)
    assert verdict(result) == ("oom", "memory"), result.render()
    assert result.usage.memory_peak_bytes is not None
    assert result.usage.memory_peak_bytes <= (64 << 20) + 2 * (1 << 20) + (32 << 20) + 4096


def test_memory_within_the_limit_is_fine() -> None:
    assert ringfence.run("x = bytearray(40 << 20)", policy=limited(memory="64M")).ok


def test_a_sandbox_survives_a_command_that_ran_out_of_memory() -> None:
    with Sandbox(policy=limited(memory="64M", disk="1M")) as box:
        assert verdict(box.run("x = []\nwhile True: x.append(bytearray(1 << 20))")) == ("oom", "memory")
        assert box.run("1").value == "1"
        assert verdict(box.exec(["sh", "-c", "kill -9 $$"])) == ("error", "signal")


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


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_exactly_so_many_processes_in_a_sandbox_and_the_files_still_work(limit: int) -> None:
    with Sandbox(policy=limited(processes=limit)) as box:
        with box.spawn(["python3", "-c", COUNT + "\nprint((n, reason), flush=True)\nsignal.pause()"]) as process:
            event = next(iter(process))
            assert getattr(event, "text", "") == f"({limit}, 'Resource temporarily unavailable')\n"
            box.files.write("f", "still served")
            assert box.files.read_text("f") == "still served"


def test_threads_count_as_processes() -> None:
    code = """
import threading
stop, n = threading.Event(), 1
try:
    while True:
        threading.Thread(target=stop.wait, daemon=True).start(); n += 1
except RuntimeError: pass
n
"""
    assert ringfence.run(code, policy=limited(processes=9)).value == "9"


def test_processes_that_ended_make_room_again() -> None:
    code = "import subprocess\nfor _ in range(50): subprocess.run(['true'], check=True)"
    assert ringfence.run(code, policy=limited(processes=3)).ok


def test_exactly_so_many_files_are_open() -> None:
    code = """
import os
fds = []
try:
    while True: fds.append(os.open("/dev/null", os.O_RDONLY))
except OSError as e: reason = e.strerror
(max(fds) + 1, reason)
"""
    assert ringfence.run(code, policy=limited(open_files=50)).value == "(50, 'Too many open files')"


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
        limited(memory="8M"),
        limited(processes=1, open_files=3),
    ],
)
def test_the_smallest_limits_still_run(policy: Policy) -> None:
    assert ringfence.run("1 + 1", policy=policy).value == "2"


def test_too_little_memory_to_start_says_so() -> None:
    with pytest.raises(ringfence.UnsupportedError, match=r"limits\.memory is too small"):
        ringfence.run("1", policy=limited(memory="64K", disk="4K"))


# ── output ───────────────────────────────────────────────────────────────────────────────────────


def test_output_over_its_cap_is_cut_in_the_middle_and_flagged() -> None:
    code = "import sys\nsys.stdout.write('a' * 1000 + 'b' * 1000)\nsys.stderr.write('e' * 100)"
    result = ringfence.run(code, policy=limited(output="200"))
    assert result.stdout == "a" * 100 + "\n[... 1800 bytes cut ...]\n" + "b" * 100
    assert (result.stderr, result.truncated, result.usage.output_bytes) == ("e" * 100, True, 2100)


def test_output_of_exactly_the_cap_is_whole() -> None:
    result = ringfence.run("print('x' * 199)", policy=limited(output="200"))
    assert (len(result.stdout), result.truncated) == (200, False)


def test_a_flood_of_output_does_not_grow_the_host() -> None:
    import resource

    ringfence.run("print(1)")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = ringfence.run("import sys\nfor _ in range(300): sys.stdout.write('x' * 1_000_000)")
    assert (result.status, result.usage.output_bytes) == ("ok", 300_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


# ── the sandbox's own clocks ─────────────────────────────────────────────────────────────────────


def ended(box: Sandbox, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while box.state == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    return box.state == "closed"


def test_a_lifetime_ends_a_sandbox_that_works() -> None:
    with Sandbox(policy=limited(lifetime_s=0.6)) as box:
        result = box.exec(["sleep", "30"])
        assert (result.status, result.duration_s < 2) == ("limit", True)
        assert box.state == "closed"
        with pytest.raises(SandboxClosedError, match=r"its limits.lifetime_s are over"):
            box.run("1")


def test_idleness_ends_a_sandbox_that_does_nothing_and_only_that() -> None:
    with Sandbox(policy=limited(idle_s=0.5)) as box:
        assert box.exec(["sleep", "0.9"]).ok
        assert box.state == "running"
        assert ended(box, 3)
        with pytest.raises(SandboxClosedError, match=r"it was idle for limits.idle_s"):
            box.files.read("x")


def test_calls_put_idleness_off() -> None:
    with Sandbox(policy=limited(idle_s=0.8)) as box:
        for _ in range(4):
            time.sleep(0.4)
            box.files.exists("x")
        assert box.state == "running"


def test_extend_starts_the_lifetime_anew_within_the_policy() -> None:
    with Sandbox(policy=limited(lifetime_s=1.0)) as box:
        time.sleep(0.6)
        box.extend(1.0)
        time.sleep(0.6)
        assert box.run("1").ok
        with pytest.raises(PolicyError, match=r"lifetime_s=5 is more than the policy's limits.lifetime_s=1"):
            box.extend(5)
