"""Each library process may die at any moment: sandboxes that can live on do, others are reported lost, guests die."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

import leftovers
import ringfence
from accounts import OrdinaryUser
from behaviour import host
from programs import read_program
from ringfence import Mount, Policy, Sandbox, SandboxError, SandboxLostError, UnsupportedError
from ringfence._sync.process import Process
from ringfence.backends.process import pool
from ringfence.backends.process.zygote import Template, Zygote, explain_refusal
from ringfence.core import endings
from ringfence.guest.guestd.daemon import Guestd
from ringfence.guest.launch.monitor import Monitor


@pytest.fixture(autouse=True)
def own_pool() -> Iterator[None]:
    """Start from nothing, so that there is one zygote to kill."""
    pool.close_all()
    yield
    pool.close_all()


def monitor_of(box: Sandbox) -> int:
    """The monitor is the parent of PID 1 inside."""
    init = box._box._init_pidfd  # type: ignore[union-attr]  # a started sandbox has one
    text = Path(f"/proc/self/fdinfo/{init}").read_text()
    pid = next(line.split()[1] for line in text.splitlines() if line.startswith("Pid:"))
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_soon(pid: int, delay_s: float = 0.3) -> threading.Thread:
    def work() -> None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_killed_zygote_takes_no_sandbox_along_and_the_next_one_starts_another() -> None:
    with Sandbox() as box:
        with box.spawn(["sh", "-c", "echo up; cat"]) as process:
            next(iter(process))
            zygote = host.named("rf-zygote")[0]  # what is forked from it has its name for a moment
            os.kill(zygote, signal.SIGKILL)
            time.sleep(0.1)
            process.write("alive")
            process.close_stdin()
            assert process.wait().stdout == "up\nalive"
        assert box.exec(["echo", "on"]).stdout == "on\n"
        assert [ringfence.run("1").value for _ in range(8)] == ["1"] * 8
        with Sandbox() as other:
            assert other.run("2").value == "2"
    assert zygote not in host.named("rf-zygote")


def test_a_zygote_that_was_killed_a_moment_ago_is_replaced_without_a_word(tmp_path: Path) -> None:
    """A killed zygote's socket closes before the process has ended, and every attempt met the same zygote. Here it is
    stopped instead."""
    alone = Policy(mounts=[Mount(str(tmp_path))])  # no spare serves for it
    with Sandbox(policy=alone) as box:
        zygote = box._box.template.zygote  # type: ignore[union-attr]  # a started sandbox has one
        os.kill(zygote.pid, signal.SIGSTOP)
        zygote._control.shutdown(socket.SHUT_RDWR)
        with Sandbox(policy=alone) as other:
            assert other.exec(["echo", "on"]).stdout == "on\n"
        assert box.exec(["echo", "on"]).stdout == "on\n"


def spawners_and_forkers(box: Sandbox) -> list[int]:
    monitor = monitor_of(box)
    return [one.pid for one in leftovers.descendants(monitor) if one.name in ("rf-spawner", "rf-forker")]


def test_without_what_starts_processes_a_sandbox_says_so_and_what_runs_in_it_goes_on(tmp_path: Path) -> None:
    alone = Policy(mounts=[Mount(str(tmp_path))])  # its monitor has no other sandbox, no spare either
    with Sandbox(policy=alone) as box, box.spawn(["sh", "-c", "echo up; exec cat"]) as there:
        next(iter(there))  # until then it has the spawner's name
        for pid in spawners_and_forkers(box):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        for call in (lambda: box.exec(["true"]), lambda: box.files.read("x"), lambda: box.run("1")):
            with pytest.raises(
                SandboxLostError, match="the process of Ringfence that starts others in this sandbox"
            ) as told:
                call()
            assert (told.value.code, told.value.fix) == ("helper-lost", "make a new Sandbox, which gets a new one")
        there.write(b"still here")
        there.close_stdin()
        assert there.wait().stdout == "up\nstill here"
    with Sandbox(policy=alone) as box:
        assert box.exec(["echo", "on"]).stdout == "on\n"


def test_a_run_of_which_nothing_has_run_is_run_in_another_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, refusals = Process._begin, [{"errno": errno.ESRCH}, {"errno": errno.EIO}]

    def refused_first(self: Process) -> Process:
        if refusals:
            raise endings.refused(refusals.pop())
        return begin(self)

    monkeypatch.setattr(Process, "_begin", refused_first)
    assert (ringfence.run("6 * 7").value, refusals) == ("42", [])


def test_one_that_waits_for_a_template_hears_at_once_that_it_was_closed() -> None:
    """Another thread found the zygote dead and closed the templates; this thread used to wait until the timeout."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(20)
    zygote = Zygote.__new__(Zygote)
    zygote._ready, zygote._lock, zygote._control = True, threading.Lock(), theirs  # a stand-in
    template = Template(ours, zygote, young=False)
    met: list[BaseException] = []

    def wait() -> None:
        try:
            template.wait_built()
        except SandboxLostError as error:
            met.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    template.close()
    thread.join(10)
    theirs.close()
    assert (len(met), time.monotonic() - started < 5) == (1, True)


def test_a_killed_spawner_is_no_word_about_the_memory_of_the_policy() -> None:
    said = "the spawner ended while it fenced itself: killed by signal 9"
    refused = explain_refusal(said, None)
    assert (type(refused), refused.code, refused.retryable) == (SandboxError, "start", True)
    refused = explain_refusal(said, None, out_of_memory=True)
    assert (type(refused), refused.code, refused.fix) == (UnsupportedError, "memory", "a larger limits.memory")


def test_whatever_sandboxes_are_forked_from_is_replaced_when_killed() -> None:
    ringfence.run("1")
    for maker in host.named("rf-template") + host.named("rf-forker"):
        os.kill(maker, signal.SIGKILL)
    assert [ringfence.run("1").value for _ in range(8)] == ["1"] * 8


def test_a_spare_whose_maker_died_while_it_was_built_is_no_refusal_of_the_host() -> None:
    for milliseconds in range(1, 13):
        ringfence.run("1")
        time.sleep(milliseconds / 1000)  # in some of these moments the next spare is under way
        for maker in host.named("rf-forker")[:1]:  # what it has just cloned has its name for a moment
            try:
                os.kill(maker, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert ringfence.run("1").value == "1"


def test_all_our_processes_killed_at_once_and_the_next_run_works() -> None:
    ringfence.run("1")
    time.sleep(0.2)
    for process in leftovers.descendants():
        if process.name.startswith("rf-"):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    time.sleep(0.1)
    assert ringfence.run("1").value == "1"


def test_a_killed_monitor_is_a_lost_run_and_the_guests_die() -> None:
    with Sandbox() as box:
        box.exec(["sh", "-c", "setsid sleep 600 & setsid sleep 600 &"])
        guests = host.Belongings(leftovers.descendants(monitor_of(box)), frozenset(), frozenset())
        thread = kill_soon(monitor_of(box))
        result = box.exec(["sleep", "600"], timeout_s=20)
        thread.join()
        assert (result.status, result.reason, result.exit_code) == ("lost", "guest-lost", None)
        assert host.wait_until_gone(guests, within_s=2) == []
        assert box.state == "lost"
        with pytest.raises(SandboxLostError, match="its monitor is gone"):
            box.run("1")
        with pytest.raises(SandboxLostError):
            box.files.read("x")


def test_a_monitor_killed_during_a_file_operation_is_an_error() -> None:
    with Sandbox() as box:
        box.files.write("f", "x")
        os.kill(monitor_of(box), signal.SIGKILL)
        with pytest.raises(SandboxError):
            box.files.read("f")


def test_a_monitor_killed_between_two_snapshots_is_an_error_of_the_second() -> None:
    with Sandbox() as box:
        box.files.write("f", "1")
        first = box.snapshot()
        place = box._running_place()
        os.kill(monitor_of(box), signal.SIGKILL)
        with pytest.raises(SandboxLostError):
            box._trees["kept"].take(place)  # as if the caller had looked just before
        with pytest.raises(SandboxLostError):
            box.snapshot()
    first.delete()


def result_after_killing(name: str) -> tuple[str, str]:
    """Return how a one-shot run ends when every library process of that name is killed while the code runs."""
    results: list[ringfence.Result] = []
    code = "open('/proc/self/comm', 'w').write('rf-test-runs')\nimport time\ntime.sleep(60)"
    thread = threading.Thread(target=lambda: results.append(ringfence.run(code, timeout_s=30)))
    thread.start()
    deadline = time.monotonic() + 25
    while not host.named("rf-test-runs") and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in host.named(name):
        os.kill(pid, signal.SIGKILL)
    thread.join()
    return results[0].status, results[0].reason


def test_a_one_shot_run_whose_monitor_is_killed_is_lost() -> None:
    assert result_after_killing("rf-monitor") == ("lost", "guest-lost")


def test_a_killed_pid_1_is_lost_and_not_a_signal_of_the_guest() -> None:
    with Sandbox() as box:
        init = box._box._init_pidfd  # type: ignore[union-attr]  # a started sandbox has one
        thread = threading.Timer(0.3, lambda: signal.pidfd_send_signal(init, signal.SIGKILL))
        thread.start()
        result = box.exec(["sleep", "600"], timeout_s=20)
        thread.join()
        assert (result.status, result.reason) == ("lost", "guest-lost")
        with pytest.raises(SandboxLostError):
            box.run("1")


def test_a_one_shot_run_whose_pid_1_is_killed_is_lost() -> None:
    assert result_after_killing("rf-init") == ("lost", "guest-lost")


def test_a_stopped_monitor_does_not_hold_the_caller_beyond_its_timeout() -> None:
    with Sandbox() as box:
        monitor = monitor_of(box)
        thread = threading.Timer(0.2, lambda: os.kill(monitor, signal.SIGSTOP))
        thread.start()
        started = time.monotonic()
        result = box.exec(["sleep", "600"], timeout_s=0.5)
        took = time.monotonic() - started
        thread.join()
        os.kill(monitor, signal.SIGCONT)
        assert (result.status, took < 15) == ("timeout", True)


def test_a_monitor_that_crashes_says_why_and_its_sandboxes_are_lost() -> None:
    with Sandbox() as box:
        one = next(iter(pool._pools.values()))
        template = box._box.template  # type: ignore[union-attr]  # a started sandbox has one
        thread = threading.Timer(0.3, lambda: template._control.send(b"no request of ours"))
        thread.start()
        result = box.exec(["sleep", "600"], timeout_s=20)
        thread.join()
        assert (result.status, result.reason, result.exit_code) == ("lost", "guest-lost", None)
        with pytest.raises(SandboxLostError, match=r"is lost: its monitor crashed: [A-Z][A-Za-z]+"):
            box.run("1")
        assert one._templates._zygote is not None
        said = os.pread(one._templates._zygote._errors, 1 << 16, 0).decode()
        assert (said.count("Traceback"), "monitor.py" in said) == (1, True)
        time.sleep(0.1)
        assert ringfence.run("1").value == "1"


def test_a_fault_of_ours_in_one_sandbox_is_the_end_of_that_one_alone() -> None:
    with Sandbox() as other, Sandbox() as box:
        kept = other.spawn(["cat"])
        assert monitor_of(box) == monitor_of(other)
        thread = threading.Timer(0.3, lambda: box._place.link.say(op="no request of ours"))  # type: ignore[union-attr]  # it is started
        thread.start()
        result = box.exec(["sleep", "600"], timeout_s=20)
        thread.join()
        assert (result.status, result.reason) == ("lost", "guest-lost")
        with pytest.raises(SandboxLostError, match=r"is lost: its monitor crashed: [A-Z][A-Za-z]+"):
            box.run("1")
        kept.write("still here\n")
        kept.close_stdin()
        assert (kept.wait().stdout, other.run("1 + 1").value) == ("still here\n", "2")


def test_a_fault_in_a_sandbox_whose_host_has_gone_is_no_further_one() -> None:
    """The channel is closed by then; a write there was another fault, which ended the monitor with all sandboxes."""
    ours, theirs = socket.socketpair()
    monitor, inside = Mock(), Mock(ready=True, gone=True)
    box = Guestd(monitor, 1, ours, {}, owner=None, inside=lambda *_: inside)  # type: ignore[arg-type]  # a stand-in
    theirs.close()
    box.crashed("a fault")
    assert ours.fileno() == -1
    monitor.gone.assert_called_once_with(1)


def test_a_sandbox_that_does_not_end_after_a_fault_takes_its_monitor_along() -> None:
    one = Monitor.__new__(Monitor)
    one._boxes = {5: Mock()}
    one._faulty = {4: 1.0, 5: 3.0}
    one._check_faulty(2.0)
    assert one._faulty == {5: 3.0}
    with pytest.raises(RuntimeError):
        one._check_faulty(4.0)


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process lead to, without their numbers."""
    folder = f"/proc/{pid}/fd"
    return sorted(re.sub(r"\d+", "", os.readlink(f"{folder}/{number}")) for number in os.listdir(folder))


def test_a_monitor_without_a_free_descriptor_refuses_what_is_new_and_keeps_the_rest(tmp_path: Path) -> None:
    alone = Policy(mounts=[Mount(str(tmp_path))])  # its monitor has no other sandbox, no spare either
    with Sandbox(policy=alone) as box, box.spawn(["cat"]) as there:
        assert box.exec(["true"]).ok  # what both need is open by now
        monitor = monitor_of(box)
        limits = resource.prlimit(monitor, resource.RLIMIT_NOFILE)
        open_before = open_files(monitor)
        before = {int(name) for name in os.listdir(f"/proc/{monitor}/fd")}
        free = [number for number in range(max(before) + 20) if number not in before]
        outcomes: list[str] = []
        for first_refused in free[:16]:  # it runs out at each of the descriptors of a command in turn
            resource.prlimit(monitor, resource.RLIMIT_NOFILE, (first_refused, limits[1]))
            try:
                outcomes.append(box.exec(["true"]).status)
            except OSError as error:
                outcomes.append(str(error.strerror))
        resource.prlimit(monitor, resource.RLIMIT_NOFILE, limits)
        refused = outcomes.index("ok")
        full = f"{os.strerror(errno.EMFILE)}: the sandbox cannot start another process"
        assert refused > 3
        assert outcomes == [full] * refused + ["ok"] * (16 - refused)
        assert open_files(monitor) == open_before
        there.write(b"still here")
        there.close_stdin()
        assert there.wait().stdout == "still here"


@pytest.mark.parametrize(("answer", "arrived", "known"), [({"box": 5, "spawner": True}, 1, 0), ({"box": 5}, 2, 1)])
def test_a_spawner_whose_descriptors_did_not_arrive_is_a_refusal_and_no_fault(
    answer: dict[str, object], arrived: int, known: int
) -> None:
    """The monitor had run out of descriptors: the monitor crashed, and its sandboxes ended."""
    fds = [os.dup(0) for _ in range(arrived)]
    box = Mock()
    one = Monitor.__new__(Monitor)
    one._boxes = {5: box}
    one._answers = Mock(receive=lambda: (json.dumps(answer).encode(), [*fds]))
    one._on_maker(0)
    box.failed.assert_called_once_with(os.strerror(errno.EMFILE), errno.EMFILE, fds[:known])
    for fd in fds[:known]:
        os.close(fd)
    assert [os.path.exists(f"/proc/self/fd/{fd}") for fd in fds] == [False] * arrived


_STOP = """
import os, signal
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in (1, os.getpid()):
        try: os.kill(int(name), signal.SIGSTOP)
        except OSError: pass  # gone, or of the domain of a spawner before
"""


def test_a_spawner_that_a_guest_stopped_is_replaced_at_once() -> None:
    with Sandbox() as box:
        for _ in range(3):
            assert box.run(_STOP).ok
            started = time.monotonic()
            assert box.exec(["echo", "on"], timeout_s=10).stdout == "on\n"
            assert time.monotonic() - started < 4.5, "it was waited for like one that is slow"


_STRAYS = read_program("behaviour/death_of_our_processes_strays.py")


def test_an_orphan_of_one_sandbox_is_reaped_while_another_one_starts() -> None:
    """An orphan that is not reaped keeps PID 1, and so uid and cgroup; on a busy view some sandbox always starts."""
    done = subprocess.run(
        [sys.executable, "-c", _STRAYS], env={"PYTHONPATH": host.SOURCE}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["False True", "False False"]


_UNDER_FIRE = read_program("behaviour/death_of_our_processes_under_fire.py")


@pytest.mark.parametrize("who", ["this user", "an ordinary user"])
def test_whichever_of_our_processes_is_killed_no_error_says_what_is_not_so(
    ordinary_user: OrdinaryUser, who: str, tmp_path: Path
) -> None:
    """Processes are killed at random: no EIO, no ENOENT, no limits.memory, no other backend, and later runs work."""
    if who == "this user":
        done = subprocess.run(
            [sys.executable, "-P", "-c", _UNDER_FIRE, str(Path(leftovers.__file__).parent)],
            env={"PYTHONPATH": host.SOURCE, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=55,
            check=False,
        )
    else:
        shared = ordinary_user.source.parent / "leftovers"
        shared.mkdir(exist_ok=True)
        shutil.copy(leftovers.__file__, shared)
        shared.chmod(0o755)
        done = ordinary_user.run(_UNDER_FIRE, str(shared))
    assert done.returncode == 0, done.stderr
    told, walls, kills, after = json.loads(done.stdout.splitlines()[-1])
    assert {kind: said for kind, said in told.items() if said[:3] != [True, True, False]} == {}
    assert (walls, kills > 10, after) == (["process"], True, "42")
