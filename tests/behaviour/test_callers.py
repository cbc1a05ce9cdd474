"""Callers with habits: they fork, ignore or reap children, block signals, close descriptors, press Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import leftovers
from behaviour.host import SOURCE, Host, belongings, wait_until_gone
from programs import read_program
from ringfence.guest.launch import fence

pytestmark = pytest.mark.everywhere


def answers(code: str, *, timeout_s: float = 40) -> list[str]:
    """Run a program in a separate process and return the lines printed. The program must end and leave nothing."""
    with Host(code) as host:
        text = host.rest(timeout_s)
    assert host.process.returncode == 0, text
    return text.splitlines()


FORK = read_program("behaviour/callers_fork.py")


@pytest.mark.parametrize("how", ["os._exit(code)", "sys.exit(code)"])
def test_a_fork_has_dead_sandboxes_may_make_its_own_and_does_not_disturb_its_parent(how: str) -> None:
    assert answers(FORK.replace("HOW", how)) == [
        *["SandboxClosedError True make a new Sandbox here"] * 4,
        "closed",
        "child 42",
        "child own",
        "status 0",
        "['up', 'still', 'here']",
        "parent 2",
    ]


def test_leaving_with_in_a_fork_does_not_end_the_parents_sandbox() -> None:
    code = """
import os, ringfence
with ringfence.Sandbox() as box:
    with box.spawn(["sleep", "60"]) as p:
        if os.fork() == 0:
            raise SystemExit(0)
        os.wait()
        print(p.running, box.run("1").value)
"""
    assert answers(code) == ["True 1"]


def test_a_fork_leaves_its_parents_manager_and_what_that_keeps_alone(tmp_path: Path) -> None:
    code = f"state = {str(tmp_path / 'state')!r}" + read_program("behaviour/callers_fork_of_a_manager.py")
    found = answers(code)
    assert sorted(found) == sorted(["True make a new SandboxManager here"] * 6 + ["'parent'"] * 2 + ["True"])


def test_multiprocessing_workers_run_sandboxes_of_their_own() -> None:
    code = """
import multiprocessing, ringfence
def work(n): return ringfence.run(f"{n} + 1").value
if __name__ == "__main__":
    print(ringfence.run("0").value)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print(pool.map(work, range(6)))
    print(ringfence.run("0").value)
"""
    assert answers(code) == ["0", "['1', '2', '3', '4', '5', '6']", "0"]


def test_a_caller_that_ignores_its_childrens_ends() -> None:
    code = """
import os, signal, ringfence
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print([ringfence.run("1").value for _ in range(3)])
print(ringfence.run("import subprocess, os\\nsubprocess.run(['sh', '-c', 'exit 3']).returncode").value)
with ringfence.Sandbox() as box: print(box.exec(["sh", "-c", "exit 4"]).exit_code)
"""
    assert answers(code) == ["['1', '1', '1']", "3", "4"]


def test_a_caller_that_reaps_whatever_it_can() -> None:
    code = read_program("behaviour/callers_reaping_everything.py")
    assert answers(code) == ["['0', '1', '2', '3', '4']", "['0', '1', '2', '3', '4']", "4"]


HANGS_UP = """
import os, socket, struct, urllib.parse
at = urllib.parse.urlparse(os.environ['HTTP_PROXY'])
for i in range(200):
    s = socket.create_connection((at.hostname, at.port))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    s.sendall(b'GET http://b.example/ HTTP/1.1\\r\\nHost: b.example\\r\\n\\r\\n' * (1 + i % 5))
    s.shutdown(socket.SHUT_WR)
    s.close()
print('done')
"""


def test_no_guest_that_hangs_up_ends_a_caller_whose_sigpipe_is_at_its_default() -> None:
    code = f"""
import signal
from ringfence import Network, Policy, Sandbox
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with Sandbox(policy=Policy(network=Network(allow=["a.example"]))) as box:
    print(box.exec(["python3", "-c", {HANGS_UP!r}]).stdout.strip())
with Sandbox() as box:
    process = box.spawn(["sleep", "60"])
    box._box.channel.shutdown(2)  # as a monitor's death between our look and our word
    process._place.link.say(op="eof", id=process._inbox.id)
print("alive")
"""
    assert answers(code) == ["done", "alive"]


def test_a_caller_without_free_descriptors_is_told_so_and_loses_none() -> None:
    code = read_program("behaviour/callers_without_descriptors.py")
    assert answers(code) == ["{'EMFILE'} 0 42"]


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_program_that_does_not_know_its_python_is_told_so(nothing: str | None) -> None:
    code = f"""
import sys, ringfence
sys.executable, sys._base_executable, known = {nothing!r}, {nothing!r}, sys.executable
try: ringfence.run("1", backend="process")
except ringfence.UnsupportedError as error: print(error)
sys.executable = known
print(ringfence.run("6 * 7").value)
"""
    said = f"this program does not say which Python it runs: sys.executable is {nothing!r}"
    assert answers(code) == [said, "42"]


def test_a_guest_inherits_no_blocked_or_ignored_signal() -> None:
    code = """
import signal, ringfence
for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT): signal.signal(n, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
show = "print(*[l.split()[1] for l in open('/proc/self/status') if l.startswith(('SigBlk', 'SigIgn'))])"
print(ringfence.run(show).stdout.strip())
command = ["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]
with ringfence.Sandbox() as box: print(*box.exec(command).stdout.split()[1::2])
"""
    seen = [
        [int(word, 16) & 0x7FFFFFFF for word in line.split()] for line in answers(code)
    ]  # 32 and up are glibc's own
    assert seen == [[0, 1 << 12 | 1 << 24], [0, 0]]  # Python itself ignores SIGPIPE and SIGXFSZ


def test_a_caller_that_closes_every_descriptor_gets_an_error_or_a_result_and_can_go_on() -> None:
    code = read_program("behaviour/callers_closing_descriptors.py")
    lines = answers(code)
    assert lines[0] in ("sandbox error", "sandbox lost")
    assert lines[1] == "1"


def test_a_caller_in_another_directory_with_another_umask_makes_no_difference() -> None:
    code = """
import os, ringfence
os.chdir("/tmp"); os.umask(0o777)
r = ringfence.run("import os\\nopen('f', 'w').close()\\n(os.getcwd(), oct(os.stat('f').st_mode), oct(os.umask(0)))")
print(r.value)
"""
    assert answers(code) == ["('/workspace', '0o100644', '0o22')"]


@pytest.mark.everywhere(container="the engine starts it, with its own priority", gvisor="its priorities are its own")
@pytest.mark.skipif(os.geteuid() != 0, reason="nobody else may have such a priority")
@pytest.mark.parametrize(
    ("mine", "its"),
    [
        ("os.setpriority(os.PRIO_PROCESS, 0, 0); os.sched_setscheduler(0, 1, os.sched_param(1))", "0 0 0"),
        ("os.setpriority(os.PRIO_PROCESS, 0, -5); libc.syscall(251, 1, 0, 1 << 13)", "0 0 0"),
        ("os.setpriority(os.PRIO_PROCESS, 0, 5); libc.syscall(251, 1, 0, 2 << 13 | 7)", "0 5 16391"),
    ],
    ids=["real-time", "raised", "lowered"],
)
def test_a_guest_inherits_no_priority_over_the_hosts_programs(mine: str, its: str) -> None:
    code = f"""
import ctypes, os, ringfence
libc = ctypes.CDLL(None)
{mine}
show = "import ctypes, os; print(os.sched_getscheduler(0), os.nice(0), ctypes.CDLL(None).syscall(252, 1, 0))"
print(ringfence.run(show).stdout.strip())
with ringfence.Sandbox() as box: print(box.exec(["python3", "-c", show]).stdout.strip())
"""
    assert answers(code) == [its, its]


@pytest.mark.parametrize(("mine", "its"), [("-1000", "0"), ("0", "0"), ("300", "300")])
def test_a_guest_is_not_spared_when_memory_runs_out_though_its_caller_is(tmp_path: Path, mine: str, its: str) -> None:
    """Uses a stand-in for /proc: to lower the score takes a right that root of a container does not have."""
    (tmp_path / "self").mkdir()
    told = tmp_path / "self" / "oom_score_adj"
    told.write_text(f"{mine}\n")
    proc = os.open(tmp_path, os.O_PATH)
    try:
        fence.stand_back(proc)
    finally:
        os.close(proc)
    assert told.read_text().splitlines()[0] == its


HIDDEN = """
import ringfence
with ringfence.Sandbox() as box:
    print(box.exec(["sh", "-c", "kill -9 $$"]).status, box.exec(["echo", "goes on"]).stdout.strip())
print(ringfence.run("import os; os.kill(os.getpid(), 9)").status)
"""


@pytest.mark.everywhere(container="the engine looks at its PID 1", gvisor="its PID 1 is its own kernel's")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a /proc needs root")
def test_a_killed_command_loses_no_sandbox_where_the_host_hides_processes() -> None:
    """With hidepid PID 1 cannot be seen in /proc, which does not mean that it has ended."""
    hidden = 'mount --make-rprivate / && mount -t proc -o hidepid=4 proc /proc && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-c", HIDDEN]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (["error goes on", "error"], "")


INTERRUPTED = read_program("behaviour/callers_interrupted.py")


@pytest.mark.parametrize(
    ("what", "call", "then", "said"),
    [
        ("", "ringfence.run('import time; time.sleep(60)')", "print(ringfence.run('1').value)", ["1"]),
        (
            "box = ringfence.Sandbox().start()",
            "box.exec(['sh', '-c', 'setsid sleep 4545 & sleep 4545'])",
            "print(box.run('import os\\nsum(p.isdigit() for p in os.listdir(\"/proc\"))').value); box.close()",
            ["3"],
        ),
        (
            "box = ringfence.Sandbox().start()",
            "with box.spawn(['sleep', '60']) as p: p.wait()",
            "print(p.wait().status); box.close()",
            ["killed"],
        ),
    ],
)
def test_ctrl_c_kills_the_guest_and_the_program_can_go_on(what: str, call: str, then: str, said: list[str]) -> None:
    code = INTERRUPTED.replace("WHAT", what).replace("CALL", call).replace("THEN", then)
    with Host(code) as host:
        assert host.line() == "go"
        time.sleep(0.4)
        os.kill(host.pid, signal.SIGINT)
        assert host.rest().splitlines() == ["interrupted True", *said]


@pytest.mark.parametrize("delay_ms", [5, 40, 80, 110, 140])
def test_ctrl_c_while_a_sandbox_starts_leaves_nothing(delay_ms: int) -> None:
    code = "import ringfence\nprint('go', flush=True)\nringfence.run('import time; time.sleep(60)')"
    with Host(code) as host:
        assert host.line() == "go"
        time.sleep(delay_ms / 1000)
        mine = belongings(host.pid)
        os.kill(host.pid, signal.SIGINT)
        text = host.rest()
        assert text.endswith("KeyboardInterrupt\n"), text
    assert wait_until_gone(mine, within_s=1) == []
    assert [path for path in leftovers.cgroups_of_the_dead() if f"/{host.pid}-" in path] == []


def test_a_sigterm_with_its_default_kills_the_program_and_all_its_guests() -> None:
    code = """
import ringfence
box = ringfence.Sandbox().start()
p = box.spawn(["sh", "-c", "setsid sleep 600 & echo up; sleep 600"])
next(iter(p))
print("go", flush=True)
p.wait()
"""
    with Host(code) as host:
        assert host.line() == "go"
        mine = belongings(host.pid)
        host.process.terminate()
        host.process.wait()
    assert wait_until_gone(mine) == []


_FORK_UNDER_A_LOCK = read_program("behaviour/callers_fork_under_a_lock.py")


def test_a_fork_of_the_caller_waits_for_no_lock_of_a_thread_it_has_not() -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", _FORK_UNDER_A_LOCK], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "ended\n"


def test_threads_that_begin_at_once_share_one_template() -> None:
    """Runs in a separate process: this process has a plan already."""
    code = read_program("behaviour/callers_threads_at_once.py")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    assert (ran.stdout, ran.stderr) == ("1 1 1\n", "")


def test_policies_that_differ_in_limits_share_a_template_of_a_python_below_tmp() -> None:
    """Mounts below the guest's own /tmp are bound for each sandbox anew, from sources that the template keeps."""
    code = """
import ringfence
from ringfence import Limits, Policy
from ringfence.backends.process import pool
for size in ("40M", "41M"):
    assert ringfence.run("1", policy=Policy(limits=Limits(disk=size))).value == "1"
[kept] = pool._pools.values()
print(len(kept._templates._of_view), len(kept._shelves))
"""
    with tempfile.TemporaryDirectory(prefix="rf-tests-", dir="/tmp") as folder:
        subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder], check=True)
        environment = {**os.environ, "PYTHONPATH": SOURCE}
        ran = subprocess.run(
            [f"{folder}/bin/python", "-W", "ignore", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert (ran.stdout, ran.stderr) == ("1 2\n", "")
