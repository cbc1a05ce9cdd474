"""Groups really made on this host: limits hold, counters count, a kill leaves nothing.

Run as root on v1 here; tests/v2 runs the same file on v2, as root and in a systemd user session.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.process.children import Say, child, state_of
from ringfence import Sandbox
from ringfence.backends.process import pool
from ringfence.backends.process.box import ProcessBox
from ringfence.errors import UnsupportedError
from ringfence.host import cgroups, process_id, zygote_start
from ringfence.host.cgroups import Group, GroupLimits, GroupUsage, Mechanisms, Tree, base, v1, v2
from ringfence.host.cgroups import systemd as scope
from ringfence.plan.rootfs.interpreter import interpreter

LIMITS = GroupLimits(memory_bytes=64 << 20, processes=16, cpus=1.0)
NOBODY_YET = 2_070_001  # outside of every range this host knows


@pytest.fixture
def tree() -> Iterator[Tree]:
    pool.close_all()  # spares of earlier tests have groups of this process too
    found = cgroups.find()
    if found is None:
        pytest.skip("no cgroup this user may write")
    yield found
    assert found.close()
    assert _left_of(process_id.name()) == []


@pytest.fixture
def group(tree: Tree) -> Group:
    return tree.create("box", LIMITS)


def _left_of(owner: str) -> list[str]:
    return [path for path, _, _ in os.walk(base.MOUNT) if f"/ringfence/{owner}" in path]


def _sleep(say: Say) -> None:
    say("here")
    time.sleep(60)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _eat_memory(say: Say) -> None:
    hoard = []
    say("here")
    while True:
        hoard.append(bytearray(1 << 20))


def _fork_until_refused(say: Say) -> None:
    count = 0
    while True:
        try:
            pid = os.fork()
        except BlockingIOError:
            break
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
    say(count)
    time.sleep(60)


def _spin(say: Say) -> None:
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pass
    say("done")


def _fork_bomb(say: Say) -> None:
    say("here")
    while True:
        try:
            if os.fork() == 0:
                continue
            time.sleep(0.0001)
            os._exit(0)
        except BlockingIOError:
            continue


def test_the_mechanisms_name_what_holds_each_limit(tree: Tree) -> None:
    if tree.kind == "cgroup v1":
        expected = Mechanisms(
            memory="cgroup v1 memory.limit_in_bytes",
            cpu="cgroup v1 cpu.cfs_quota_us",
            cpu_time="cgroup v1 cpuacct.usage",
            processes="cgroup v1 pids.max",
        )
    else:
        expected = Mechanisms(
            memory="cgroup v2 memory.max",
            cpu="cgroup v2 cpu.max" if tree.has_cpu else None,
            cpu_time="cgroup v2 cpu.stat",
            processes="cgroup v2 pids.max",
        )
    assert tree.mechanisms == expected


def test_finding_a_tree_changes_nothing() -> None:
    before = sorted(os.walk(base.MOUNT))
    cgroups.find()
    assert sorted(os.walk(base.MOUNT)) == before


def test_a_new_group_has_used_nothing(group: Group) -> None:
    used = group.usage()
    assert used == GroupUsage(
        cpu_s=0.0,
        memory_peak_bytes=used.memory_peak_bytes and 0,
        processes_peak=used.processes_peak and 0,
        oom_kills=0,
    )


def test_a_hog_over_the_memory_limit_is_killed_and_counted_once(group: Group) -> None:
    fds = group.join_fds()
    with child(_eat_memory, join=fds) as hog:
        assert hog.wait() == -signal.SIGKILL
    _close(fds)
    used = group.usage()
    assert used.oom_kills == 1
    assert used.memory_peak_bytes is None or 60 << 20 <= used.memory_peak_bytes <= 64 << 20


def test_a_limit_set_later_holds_in_both_directions(group: Group) -> None:
    group.set(GroupLimits(memory_bytes=256 << 20, processes=16, cpus=1.0))
    group.set(GroupLimits(memory_bytes=32 << 20, processes=4, cpus=0.5))
    fds = group.join_fds()
    with child(_eat_memory, join=fds) as hog:
        assert hog.wait() == -signal.SIGKILL
    with child(_fork_until_refused, join=fds) as forker:
        assert forker.hear() == 3
        group.kill()
    _close(fds)
    peak = group.usage().memory_peak_bytes
    assert peak is None or peak <= 32 << 20


def test_socket_buffers_have_the_memory_limit_too_where_they_are_counted_apart(tree: Tree, group: Group) -> None:
    if not isinstance(tree, v1.Tree) or not tree.counts_tcp:
        pytest.skip("v2 counts them with the rest")
    directory = next(path for path in _left_of(process_id.name()) if path.endswith("/box") and "/memory/" in path)
    for limit in (LIMITS.memory_bytes, LIMITS.memory_bytes // 2):
        group.set(GroupLimits(limit, 16, 1.0))
        with open(f"{directory}/memory.kmem.tcp.limit_in_bytes") as file:
            assert int(file.read()) == limit


def test_processes_over_the_limit_are_refused_and_the_peak_is_known(group: Group) -> None:
    fds = group.join_fds()
    with child(_fork_until_refused, join=fds) as forker:
        assert forker.hear() == 15
        assert group.usage().processes_peak in (16, None)
        assert group.kill()
    _close(fds)


def test_half_a_cpu_gets_half_of_a_second_of_cpu_time_in_a_second(tree: Tree) -> None:
    if not tree.has_cpu:
        pytest.skip("the cpu controller is not delegated here")
    group = tree.create("half", GroupLimits(memory_bytes=64 << 20, processes=16, cpus=0.5))
    fds = group.join_fds()
    with child(_spin, join=fds) as spinner:
        assert spinner.hear() == "done"
        used = group.usage().cpu_s
    _close(fds)
    assert used is not None
    assert 0.05 < used < 0.7  # without the quota it is 1.0 on an idle host


def test_a_frozen_group_stands_still_and_runs_on_after_a_thaw(group: Group) -> None:
    fds = group.join_fds()
    with child(_spin, join=fds) as spinner:
        time.sleep(0.1)
        assert group.freeze()
        first = group.usage().cpu_s
        time.sleep(0.2)
        assert group.usage().cpu_s == first
        group.thaw()
        assert spinner.hear() == "done"
    _close(fds)


def test_a_frozen_group_can_be_killed(group: Group) -> None:
    fds = group.join_fds()
    with child(_sleep, join=fds) as sleeper:
        sleeper.hear()
        assert group.freeze()
        assert group.kill()
        assert sleeper.wait() == -signal.SIGKILL
    _close(fds)


def test_whoever_holds_the_freezer_descriptor_can_thaw_without_rights(tree: Tree, group: Group) -> None:
    if tree.kind != "cgroup v1":
        pytest.skip("v2: SIGKILL reaches a frozen process")
    fd = group.freezer_fd()
    assert fd is not None
    fds = group.join_fds()

    def thaw(say: Say) -> None:
        say(os.write(fd, b"THAWED"))

    with child(_sleep, join=fds) as sleeper:
        sleeper.hear()
        group.freeze()
        os.kill(sleeper.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert state_of(sleeper.pid) == "D"  # the control arm: without a thaw it does not die
        with child(thaw, uid=NOBODY_YET) as monitor:
            assert monitor.hear() == 6
        assert sleeper.wait() == -signal.SIGKILL
    _close([fd, *fds])


def test_a_fork_bomb_is_killed_to_the_last_process(tree: Tree) -> None:
    group = tree.create("bomb", GroupLimits(memory_bytes=128 << 20, processes=64, cpus=1.0))
    fds = group.join_fds()
    with child(_fork_bomb, join=fds) as bomb:
        bomb.hear()
        time.sleep(0.1)
        assert group.kill(timeout_s=10)
    _close(fds)
    assert group.remove(timeout_s=5)


def test_removing_kills_what_runs_and_may_be_repeated(group: Group) -> None:
    fds = group.join_fds()
    with child(_sleep, join=fds) as sleeper:
        sleeper.hear()
        assert group.remove()
        assert sleeper.wait() == -signal.SIGKILL
    _close(fds)
    assert group.remove()
    assert group.kill()
    assert group.usage() == GroupUsage(cpu_s=None, memory_peak_bytes=None, processes_peak=None, oom_kills=None)


def test_a_process_without_rights_joins_through_descriptors_it_was_given(group: Group) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    fds = group.join_fds()

    def join(say: Say) -> None:
        for fd in fds:
            os.write(fd, b"0")
        with open("/proc/self/cgroup") as file:
            say(file.read().count(f"/ringfence/{owner}/box\n"))
        time.sleep(60)

    owner = process_id.name()
    with child(join, uid=NOBODY_YET) as guest:
        assert guest.hear() == len(fds)
        assert group.remove()
    _close(fds)


def test_the_caller_is_never_moved(tree: Tree) -> None:
    before = base.read("/proc/self/cgroup")
    tree.create("other", LIMITS).remove()
    assert base.read("/proc/self/cgroup") == before


def test_a_group_that_exists_is_not_made_again_and_its_processes_live(tree: Tree, group: Group) -> None:
    fds = group.join_fds()
    with child(_sleep, join=fds) as sleeper:
        sleeper.hear()
        with pytest.raises(FileExistsError):
            tree.create("box", LIMITS)
        assert state_of(sleeper.pid) in ("S", "R")  # alive
        assert group.remove()
    _close(fds)


def test_closing_one_tree_leaves_the_groups_of_another_tree_of_this_process(tree: Tree, group: Group) -> None:
    other = cgroups.find()
    assert other is not None
    fds = group.join_fds()
    with child(_sleep, join=fds) as sleeper:
        sleeper.hear()
        other.create("second", LIMITS)
        assert other.close()
        assert state_of(sleeper.pid) in ("S", "R")  # alive
        assert [path for path in _left_of(process_id.name()) if path.endswith("/second")] == []
    _close(fds)


def test_a_fork_that_closes_its_copy_of_the_tree_leaves_the_groups(tree: Tree, group: Group) -> None:
    fds = group.join_fds()
    with child(_sleep, join=fds) as sleeper:
        sleeper.hear()
        with child(lambda say: say(tree.close())) as fork:
            assert fork.hear() is True
        assert state_of(sleeper.pid) in ("S", "R")  # alive
    _close(fds)


def test_each_zygote_gets_a_scope_name_of_its_own() -> None:
    trees = [v2.ScopeTree("/usr/bin/systemd-run", "/run/user/1000", {"memory"}) for _ in range(2)]
    units = [word for one in trees for word in one.launch_prefix() + one.launch_prefix() if word.startswith("--unit=")]
    assert len(set(units)) == 4
    assert all(unit.startswith(f"--unit=ringfence-{process_id.name()}-") for unit in units)


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "a\0b", "cgroup.procs", "tasks", "zygote.leaf"])
def test_a_box_id_that_is_no_plain_name_is_refused(tree: Tree, bad: str) -> None:
    with pytest.raises(ValueError, match="cannot name a cgroup"):
        tree.create(bad, LIMITS)


def test_a_limit_the_kernel_refuses_leaves_no_group(tree: Tree) -> None:
    with pytest.raises(OSError):  # noqa: PT011  # v1 and v2 differ in the number
        tree.create("refused", GroupLimits(memory_bytes=64 << 20, processes=1 << 60, cpus=1.0))
    assert not [path for path in _left_of(process_id.name()) if path.endswith("refused")]


def test_an_ordinary_user_without_a_delegated_group_finds_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")

    def look(say: Say) -> None:
        say([cgroups.find() is None, cgroups.delegable() is None])

    with child(look, uid=NOBODY_YET) as user:
        assert user.hear() == [True, True]


def test_the_dead_are_removed_and_the_living_are_left(tree: Tree, group: Group) -> None:
    mine = process_id.name()

    def own_and_freeze(say: Say) -> None:
        box = tree.create("orphan", LIMITS)
        fds = box.join_fds()
        guest = os.fork()
        if guest == 0:
            for fd in fds:
                os.write(fd, b"0")
            os.write(ready, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(wait, 1)
        box.freeze()
        say([process_id.name(), guest])
        time.sleep(60)

    wait, ready = os.pipe()
    with child(own_and_freeze) as owner:
        name, guest = owner.hear()
        assert cgroups.remove_dead_owners(process_id.is_dead) == []
        owner.kill()
        assert state_of(guest) in "DS"  # frozen: on v1 not even SIGKILL would end it
        removed = cgroups.remove_dead_owners(process_id.is_dead)
    _close([wait, ready])
    assert [path for path in removed if not path.endswith(f"/ringfence/{name}")] == []
    assert len(removed) >= 1
    assert state_of(guest) in ("gone", "Z")
    assert _left_of(name) == []
    assert _left_of(mine) != []


def _in_its_group(box: Sandbox) -> bool:
    assert isinstance(box._box, ProcessBox)
    assert isinstance(box._box._group, v2.Group)
    return bool(base.pids(box._box._group.directory))


@pytest.mark.parametrize("way", ["born there", "by a write, where that is refused"])
def test_a_sandbox_is_in_its_group_whichever_way_it_comes_there(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way alone. A write to v2's cgroup.procs waits 5 to 20 ms for the kernel, who is born there does not."""
    if not isinstance(pool.pool(interpreter(), ()).tree, v2.Tree):
        pytest.skip("no cgroup v2 this user may write; tests/v2 has one")
    pool.close_all()
    if way == "born there":
        monkeypatch.setattr(v2.Group, "join_fds", lambda _: [os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)])
    else:
        monkeypatch.setattr(v2.Group, "into_fd", lambda _: os.open("/dev", os.O_PATH | os.O_CLOEXEC))
    with Sandbox() as box:
        assert _in_its_group(box)
        box.exec(["sh", "-c", "kill -9 2"])  # the spawner: another is made for the next
        assert box.exec(["cat", "/proc/self/cgroup"]).stdout == "0::/\n"
        assert _in_its_group(box)
    pool.close_all()


def test_nobody_is_in_a_group_when_both_ways_lead_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before would notice."""
    if not isinstance(pool.pool(interpreter(), ()).tree, v2.Tree):
        pytest.skip("no cgroup v2 this user may write; tests/v2 has one")
    pool.close_all()
    monkeypatch.setattr(v2.Group, "join_fds", lambda _: [os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)])
    monkeypatch.setattr(v2.Group, "into_fd", lambda _: os.open("/dev", os.O_PATH | os.O_CLOEXEC))
    with Sandbox() as box:
        assert not _in_its_group(box)
    pool.close_all()


def test_a_scope_of_the_user_manager_holds_a_zygote_and_its_boxes() -> None:
    tree = cgroups.delegable()
    if tree is None:
        pytest.skip("no systemd user manager to ask")
    hog = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    join = "echo 0 > $path"
    script = f"/usr/bin/env; echo ready; read path; ({join}; exec {sys.executable} -S -c '{hog}'); echo $?; sleep 60"
    argv = [*tree.launch_prefix(), "/bin/sh", "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as zygote:
        try:
            assert zygote.stdin is not None
            assert zygote.stdout is not None
            said = iter(zygote.stdout.readline, "ready\n")
            assert [line for line in said if not line.startswith(("PWD=", "_=", "SHLVL="))] == []
            tree.attach(zygote.pid)
            assert tree.mechanisms.memory == "cgroup v2 memory.max"
            group = tree.create("box", LIMITS)
            zygote.stdin.write(f"{tree.path}/box/cgroup.procs\n")
            zygote.stdin.flush()
            assert zygote.stdout.readline() == f"{128 + signal.SIGKILL}\n"
            assert group.usage().oom_kills == 1
            assert group.remove()
            assert tree.close()
        finally:
            zygote.kill()


def test_a_process_that_runs_is_moved_to_a_scope_of_its_own() -> None:
    tree = cgroups.delegable()
    if tree is None:
        pytest.skip("no systemd user manager to ask")
    with child(_sleep) as zygote:
        zygote.hear()
        assert tree.adopt(zygote.pid)
        tree.attach(zygote.pid)
        assert (v2._own_path(zygote.pid) or "").endswith(f".scope/{v2.ZYGOTE}")
        assert tree.create("box", LIMITS).remove()
        assert tree.close()  # kills it


@pytest.mark.parametrize("asked", [True, False])
def test_a_zygote_is_moved_to_its_scope_or_started_in_one(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(pool.pool(interpreter(), ()).tree, v2.ScopeTree):
        pytest.skip("no systemd user manager to ask")
    pool.close_all()
    started: list[bool] = []
    start = zygote_start.start

    def noted(executable: str, prefix: list[str]) -> zygote_start.Started:
        started.append(bool(prefix))
        return start(executable, prefix)

    monkeypatch.setattr(zygote_start, "start", noted)
    if not asked:
        monkeypatch.setattr(scope, "ask", lambda *_: False)
    with Sandbox() as box:
        assert _in_its_group(box)
    assert started == ([False] if asked else [False, True])
    pool.close_all()


# As a strict reader of D-Bus (jeepney) understands it: a scope with one process, Delegate and CollectMode.
_ORDER = (
    b"l\1\0\1\x88\0\0\0\1\0\0\0\xb6\0\0\0\1\1o\0\x19\0\0\0/org/freedesktop/systemd1\0\0\0\0\0\0\0"
    b"\2\1s\0 \0\0\0org.freedesktop.systemd1.Manager\0\0\0\0\0\0\0\0\3\1s\0\x12\0\0\0StartTransientUnit\0"
    b"\0\0\0\0\0\6\1s\0\x18\0\0\0org.freedesktop.systemd1\0\0\0\0\0\0\0\0\x08\1g\0\x10ssa(sv)a(sa(sv))\0\0\0"
    b"\x11\0\0\0ringfence-1.scope\0\0\0\4\0\0\0fail\0\0\0\0[\0\0\0\4\0\0\0PIDs\0\2au\0\0\0\0\4\0\0\0g\x12"
    b"\0\0\x08\0\0\0Delegate\0\1b\0\1\0\0\0\0\0\0\0\x0b\0\0\0CollectMode\0\1s\0\0\x12\0\0\0"
    b"inactive-or-failed\0\0\0\0\0\0"
)


_SIGNAL = b"l\4\1\1\5\0\0\0\4\0\0\0\3\0\0\0abc\0\0\0\0\0\2\2\2\2\2"  # three bytes of fields, five of a body


@pytest.mark.parametrize(
    ("said", "kind", "taken"), [(b"REJECTED\r\n", 0, False), (b"OK 1\r\n", 3, False), (b"OK 1\r\n", 2, True)]
)
def test_an_order_is_taken_when_the_manager_says_so(said: bytes, kind: int, taken: bool, tmp_path: Path) -> None:
    (tmp_path / "systemd").mkdir()
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "systemd/private"))
        listener.listen()

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                heard.append(peer.recv(4096))
                peer.sendall(said)
                if said.startswith(b"OK"):
                    heard.append(peer.recv(4096))
                    for piece in (_SIGNAL[:3], _SIGNAL[3:] + _SIGNAL, bytes([ord("l"), kind]) + bytes(14)):
                        peer.sendall(piece)
                        time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        assert scope.ask(str(tmp_path), "ringfence-1.scope", 4711) is taken
        thread.join()
    hello = b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\n"
    assert heard == ([hello, b"BEGIN\r\n" + _ORDER] if said.startswith(b"OK") else [hello])


def test_an_order_is_not_taken_where_nobody_listens(tmp_path: Path) -> None:
    assert not scope.ask(str(tmp_path), "ringfence-1.scope", os.getpid())


def test_a_scope_with_fewer_controllers_than_its_manager_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DisableControllers=memory in app.slice strict plans claimed memory.max, which nothing enforced."""
    scope = tmp_path / f"ringfence-{process_id.name()}-1.scope"
    scope.mkdir()
    (scope / "cgroup.controllers").write_text("cpu pids\n")
    (scope / "cgroup.subtree_control").write_text("")
    monkeypatch.setattr(base, "MOUNT", str(tmp_path))
    monkeypatch.setattr(v2, "_own_path", lambda _: f"/{scope.name}")
    tree = v2.ScopeTree("systemd-run", "/run/user/1", {"cpu", "memory", "pids"})
    with pytest.raises(UnsupportedError, match="no memory controller") as refused:
        tree.attach(os.getpid())
    assert refused.value.code == "cgroup"
    (scope / "cgroup.controllers").write_text("cpu memory pids\n")
    tree.attach(os.getpid())
    assert (scope / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_remove_noted_refuses_what_is_not_that_owners() -> None:
    assert [
        cgroups.remove_noted(path, "1-2-3")
        for path in (
            "/sys/fs/cgroup",
            "/sys/fs/cgroup/system.slice",
            "/sys/fs/cgroup/ringfence/1-2-4",
            "/sys/fs/cgroup/x/../ringfence/1-2-3",
            "/tmp/ringfence/1-2-3",
        )
    ] == [False] * 5
