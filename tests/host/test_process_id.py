"""A process's name shows whether the process still lives."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest

from accounts import OrdinaryUser
from backends.process.children import Say, child
from ringfence.host import process_id


def _say_name(say: Say) -> None:
    say(process_id.name())
    time.sleep(60)


def test_a_name_holds_pid_start_time_and_pid_namespace() -> None:
    assert process_id.parse(process_id.name()) == (
        os.getpid(),
        process_id.start_time(os.getpid()),
        process_id.pid_namespace(),
    )


def test_without_a_proc_of_its_own_nobody_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new pid namespace, without its /proc, a process took itself for a process of the host, and all other
    libraries for dead: their cgroups were swept."""
    gone = f"{2**22 - 1}-1-{process_id.pid_namespace()}"
    assert process_id.is_dead(gone)
    real = os.stat

    def blind(path: object, **how: object) -> os.stat_result:
        if path == "/proc/self/ns/pid":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real(path, **how)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(os, "stat", blind)
    assert not process_id.is_dead(gone)
    assert not process_id.is_dead(f"{2**22 - 1}-1-0")


def test_without_a_free_descriptor_there_is_no_name_rather_than_a_dead_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    known = process_id.name()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        assert process_id.name() == known  # as at the end of a process that found it out in time
        patched.setattr(process_id, "_started", {})
        with pytest.raises(OSError, match="Too many open files"):
            process_id.name()


def test_a_process_is_dead_when_it_is_gone_or_a_zombie() -> None:
    with child(_say_name) as other:
        name = other.hear()
        assert not process_id.is_dead(name)
        os.kill(other.pid, 9)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert process_id.is_dead(name)
        other.wait()
        assert process_id.is_dead(name)


def test_the_same_pid_with_another_start_time_is_dead() -> None:
    pid, start, namespace = process_id.parse(process_id.name()) or (0, 0, 0)
    assert process_id.is_dead(f"{pid}-{start + 1}-{namespace}")


def test_what_we_cannot_judge_is_not_dead() -> None:
    assert [process_id.is_dead(name) for name in ("", "docker", "1-2", "999999-1-1", "a-b-c", "-1-2-3", "1-2-3-4")] == [
        False
    ] * 7


def test_a_fork_has_a_name_of_its_own() -> None:
    with child(_say_name) as other:
        assert other.hear() != process_id.name()


HIDING = """
mount -t proc -o hidepid=2 proc /proc || exit 77
exec setpriv --reuid=1500 --regid=1500 --clear-groups "$@"
"""


def test_a_process_that_proc_hides_is_not_dead(ordinary_user: OrdinaryUser) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a /proc that hides processes")
    gone = f"{2**22 - 1}-1-{process_id.pid_namespace()}"
    names = f"{process_id.name()!r}, {gone!r}"
    code = (
        f"import sys; sys.path.insert(0, {str(ordinary_user.source)!r})\n"
        "from ringfence.host.process_id import is_dead, start_time\n"
        f"print(start_time({os.getpid()}), *[is_dead(name) for name in ({names})])"
    )
    command = ["unshare", "--mount", "sh", "-c", HIDING, "sh", ordinary_user.python, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this host mounts no such /proc")
    assert done.stdout.split() == ["None", "False", "True"], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="making a time namespace needs root")
def test_who_lives_in_another_time_namespace_is_not_dead_nor_are_others_to_it() -> None:
    """The kernel adds the reader's offset to every start time: a sweep would take what others still use."""
    code = f"""
from ringfence.host import process_id as owners
print(owners.is_dead({process_id.name()!r}), owners.name(), flush=True)
input()
"""
    command = ["unshare", "-T", "--boottime", "1000", "--fork", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        dead, name = other.stdout.readline().split()
        seen = dead, process_id.is_dead(name)
        other.communicate("\n")
    assert seen == ("False", False)
    assert process_id.is_dead(name)
