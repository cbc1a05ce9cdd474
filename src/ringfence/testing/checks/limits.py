"""Checks of limits: each is exact, and the result names the limit that was reached."""

from __future__ import annotations

import time
from typing import Any

from ringfence import Limits, Policy, PolicyError, Result, Sandbox, SandboxClosedError
from ringfence.testing.model import MakeSandbox, in_box, python, raises, with_maker


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
ALIVE = """
import os
found = 0
for p in filter(str.isdigit, os.listdir("/proc")):
    try: found += "SIG_" + "IGN" in open(f"/proc/{p}/cmdline").read()
    except OSError: pass
print(found)
"""
ENDLESS = (
    "while True: pass",
    "import time; time.sleep(60)",
    "while True: print('x' * 1000)",
    "import os\nwhile True:\n    try:\n        if os.fork() == 0: pass\n    except OSError: pass",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
)


def a_timeout_takes_daemons_that_ignore_signals_and_leaves_the_sandbox(box: Sandbox) -> None:
    started = time.monotonic()
    result = box.exec(["python3", "-c", STUBBORN], timeout_s=1.5)
    assert time.monotonic() - started < 15, "the answer came late"
    assert (*verdict(result), result.exit_code, result.stdout) == ("timeout", "wall-clock", None, "up\n")
    assert box.exec(["python3", "-c", ALIVE]).stdout == "0\n", "some live on"


def whatever_a_program_does_its_timeout_comes(make: MakeSandbox) -> None:
    for code in ENDLESS:
        result = python(make, code, policy=limited(processes=30), timeout_s=0.5)
        assert verdict(result) == ("timeout", "wall-clock"), code


def a_timeout_of_a_call_narrows_the_policy_and_never_widens_it(make: MakeSandbox) -> None:
    policy = limited(timeout_s=0.4)
    assert verdict(python(make, "while True: pass", policy=policy)) == ("timeout", "wall-clock")
    with raises(PolicyError, match=r"timeout_s=5 is more than the policy's limits.timeout_s=0.4"):
        python(make, "1", policy=policy, timeout_s=5)


def cpu_time_is_counted_over_children_and_ends_as_a_limit(make: MakeSandbox) -> None:
    code = "import os\nfor _ in range(3):\n    if os.fork() == 0: break\nwhile True: pass"
    result = python(make, code, policy=limited(cpu_time_s=0.5, timeout_s=20))
    assert verdict(result) == ("limit", "cpu-time")


def cpu_time_of_processes_that_each_use_little_is_counted(make: MakeSandbox) -> None:
    """The kernel's own limit is for each process, and no process here comes near that limit."""
    work = "[sys.executable, '-Ic', 'for _ in range(3000000): pass']"
    code = f"import subprocess, sys\nfor _ in range(200): subprocess.run({work})"
    result = python(make, code, policy=limited(cpu_time_s=1.5, timeout_s=60))
    assert verdict(result) == ("limit", "cpu-time")


def sleeping_costs_no_cpu_time(make: MakeSandbox) -> None:
    assert python(make, "import time; time.sleep(0.8)", policy=limited(cpu_time_s=0.6)).ok


def cpu_time_is_for_each_call(make: MakeSandbox) -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with make(policy=limited(cpu_time_s=0.7)) as box:
        assert [box.exec(["python3", "-c", burn]).status for _ in range(3)] == ["ok", "ok", "ok"]


def cpu_time_is_for_each_cell(make: MakeSandbox) -> None:
    """The cells use whole seconds: the kernel's own limit, over the life of the session's process, would end a cell."""
    burn = "import time\nend = time.process_time() + 0.7\nwhile time.process_time() < end: pass"
    with make(policy=limited(cpu_time_s=2)) as box:
        assert [box.run(burn).status for _ in range(6)] == ["ok"] * 6
        ended = box.run("while True: pass")
        assert (*verdict(ended), ended.state_kept) == ("limit", "cpu-time", True)


def a_share_of_a_cpu_is_all_a_guest_gets(make: MakeSandbox) -> None:
    code = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    assert float(python(make, code, policy=limited(cpus=0.25)).check().stdout) < 0.6


# ── memory ───────────────────────────────────────────────────────────────────────────────────────

HUNGRY = (
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import os\nos.fork(); os.fork()\nx = []\nwhile True: x.append(bytearray(1 << 20))",
    "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1",
)


def more_memory_than_the_limit_is_oom_and_the_sandbox_survives(make: MakeSandbox) -> None:
    with make(policy=limited(memory="64M", disk="1M")) as box:
        for code in HUNGRY:
            assert verdict(box.exec(["python3", "-c", code])) == ("oom", "memory"), code
        assert box.exec(["echo", "on"]).stdout == "on\n"
        assert verdict(box.exec(["sh", "-c", "kill -9 $$"])) == ("error", "signal"), "its own signal is no oom"


def memory_within_the_limit_is_fine(make: MakeSandbox) -> None:
    assert python(make, "x = b'x' * (40 << 20)", policy=limited(memory="64M", disk="1M")).ok


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
print((n, reason), flush=True)
signal.pause()
"""
THREADS = """
import threading
stop, n = threading.Event(), 1
try:
    while True:
        threading.Thread(target=stop.wait, daemon=True).start(); n += 1
except RuntimeError: pass
print(n)
"""
OPEN = """
import os
fds = []
try:
    while True: fds.append(os.open("/dev/null", os.O_RDONLY))
except OSError as e: reason = e.strerror
print((max(fds) + 1, reason))
"""


def exactly_so_many_processes_run_at_once_and_the_files_still_work(make: MakeSandbox) -> None:
    for limit in (1, 2, 7, 40):
        with make(policy=limited(processes=limit)) as box, box.spawn(["python3", "-c", COUNT]) as process:
            event = next(iter(process))
            assert getattr(event, "text", "") == f"({limit}, 'Resource temporarily unavailable')\n"
            box.files.write("f", "still served")
            assert box.files.read_text("f") == "still served"


def threads_count_as_processes(make: MakeSandbox) -> None:
    assert python(make, THREADS, policy=limited(processes=9)).stdout == "9\n"


def processes_that_ended_make_room_again(make: MakeSandbox) -> None:
    code = "import subprocess\nfor _ in range(50): subprocess.run(['true'], check=True)"
    assert python(make, code, policy=limited(processes=3)).ok


def exactly_so_many_files_are_open(make: MakeSandbox) -> None:
    assert python(make, OPEN, policy=limited(open_files=50)).stdout == "(50, 'Too many open files')\n"


# ── output ───────────────────────────────────────────────────────────────────────────────────────


def output_over_its_cap_is_cut_in_the_middle_and_flagged(make: MakeSandbox) -> None:
    code = "import sys\nsys.stdout.write('a' * 1000 + 'b' * 1000)\nsys.stderr.write('e' * 100)"
    result = python(make, code, policy=limited(output="200"))
    assert result.stdout == "a" * 100 + "\n[... 1800 bytes cut ...]\n" + "b" * 100
    assert (result.stderr, result.truncated, result.usage.output_bytes) == ("e" * 100, True, 2100)


def output_of_exactly_the_cap_is_whole(make: MakeSandbox) -> None:
    result = python(make, "print('x' * 199)", policy=limited(output="200"))
    assert (len(result.stdout), result.truncated) == (200, False)


def a_flood_of_output_is_counted_and_not_kept(make: MakeSandbox) -> None:
    result = python(make, "import sys\nfor _ in range(50): sys.stdout.write('x' * 1_000_000)")
    assert (result.status, result.usage.output_bytes, result.truncated) == ("ok", 50_000_000, True)
    assert len(result.stdout_bytes) < 1_100_000


# ── the sandbox's own clocks ─────────────────────────────────────────────────────────────────────


def ended(box: Sandbox, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while box.state == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    return box.state == "closed"


def a_lifetime_ends_a_sandbox_that_works(make: MakeSandbox) -> None:
    with make(policy=limited(lifetime_s=1)) as box:
        assert box.exec(["sleep", "30"]).status == "limit"
        assert box.state == "closed"
        with raises(SandboxClosedError, match=r"limits.lifetime_s"):
            box.exec(["true"])


def idleness_ends_a_sandbox_that_does_nothing_and_only_that(make: MakeSandbox) -> None:
    with make(policy=limited(idle_s=0.7)) as box:
        assert box.exec(["sleep", "1.2"]).ok
        for _ in range(3):
            time.sleep(0.4)
            box.files.exists("x")
        assert box.state == "running", "calls put it off"
        assert ended(box, 5)
        with raises(SandboxClosedError, match=r"limits.idle_s"):
            box.files.read("x")


def extend_starts_the_lifetime_anew_within_the_policy(make: MakeSandbox) -> None:
    with make(policy=limited(lifetime_s=2)) as box:
        time.sleep(1.2)
        box.set_lifetime(2)
        time.sleep(1.2)
        assert box.exec(["true"]).ok
        with raises(PolicyError, match=r"lifetime_s=5 is more than the policy's"):
            box.set_lifetime(5)


def usage_grows_with_what_is_used(box: Sandbox) -> None:
    before = box.usage()
    burn = "import time\nx = b'x' * (50 << 20)\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    result = box.exec(["python3", "-c", burn]).check()
    after = box.usage()
    assert before.cpu_s is not None
    assert after.cpu_s is not None
    assert after.memory_peak_bytes is not None
    # The clock that a guest's process reads runs up to twice as fast as the host's count, in gVisor on a busy machine.
    assert after.cpu_s - before.cpu_s >= 0.1
    assert after.memory_peak_bytes > 50 << 20
    assert result.usage.cpu_s is not None


CHECKS = (
    in_box(a_timeout_takes_daemons_that_ignore_signals_and_leaves_the_sandbox),
    with_maker(whatever_a_program_does_its_timeout_comes),
    with_maker(a_timeout_of_a_call_narrows_the_policy_and_never_widens_it),
    with_maker(cpu_time_is_counted_over_children_and_ends_as_a_limit, "cpu-time"),
    with_maker(cpu_time_of_processes_that_each_use_little_is_counted, "cpu-time"),
    with_maker(sleeping_costs_no_cpu_time, "cpu-time"),
    with_maker(cpu_time_is_for_each_call, "cpu-time"),
    with_maker(cpu_time_is_for_each_cell, "cpu-time"),
    with_maker(a_share_of_a_cpu_is_all_a_guest_gets, "cpu-share"),
    with_maker(more_memory_than_the_limit_is_oom_and_the_sandbox_survives, "memory-limit"),
    with_maker(memory_within_the_limit_is_fine),
    with_maker(exactly_so_many_processes_run_at_once_and_the_files_still_work, "process-limit"),
    with_maker(threads_count_as_processes, "process-limit"),
    with_maker(processes_that_ended_make_room_again, "process-limit"),
    with_maker(exactly_so_many_files_are_open, "open-files"),
    with_maker(output_over_its_cap_is_cut_in_the_middle_and_flagged),
    with_maker(output_of_exactly_the_cap_is_whole),
    with_maker(a_flood_of_output_is_counted_and_not_kept),
    with_maker(a_lifetime_ends_a_sandbox_that_works),
    with_maker(idleness_ends_a_sandbox_that_does_nothing_and_only_that),
    with_maker(extend_starts_the_lifetime_anew_within_the_policy),
    in_box(usage_grows_with_what_is_used, "usage"),
)
