"""Managers and environments: an agent's things are the agent's alone, within policy and quota, until they are ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import weaker
from accounts import OrdinaryUser
from behaviour.host import Host, belongings, wait_until_gone
from programs import read_program
from ringfence import (
    AsyncSandboxManager,
    Limits,
    Mount,
    Network,
    Policy,
    PolicyError,
    Quota,
    QuotaError,
    SandboxClosedError,
    SandboxError,
    SandboxManager,
    Secret,
    SnapshotError,
)
from ringfence._sync.environment import OwnedSandbox
from ringfence.types import Environment

pytestmark = pytest.mark.everywhere

SMALL = Policy(limits=Limits(cpus=0.5, memory="128M", disk="4M"))


@pytest.fixture
def manager() -> Iterator[SandboxManager]:
    with SandboxManager(policy=SMALL) as made:
        yield made


def until(true: Callable[[], bool], within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def own(environment: Environment) -> str:
    (info,) = environment.sandboxes()
    return info.id


# ── a workspace that stays ───────────────────────────────────────────────────────────────────────


def test_an_agents_runs_share_one_sandbox_started_on_first_use(manager: SandboxManager) -> None:
    agent = manager.environment("a")
    assert agent.sandboxes() == ()
    assert agent.run("x = 41\nopen('f', 'w').write('file')").ok
    assert agent.run("x + 1").value == "42"
    assert (agent.exec(["cat", "f"]).stdout, agent.files.read_text("f")) == ("file", "file")
    assert [info.agent for info in agent.sandboxes()] == ["a"]
    assert agent.run("echo $((6 * 7))", language="bash").stdout == "42\n"


def test_files_work_before_anything_ran(manager: SandboxManager) -> None:
    agent = manager.environment("a")
    agent.files.write("d/in.txt", "given")
    assert [info.path for info in agent.files.list(recursive=True)] == ["d", "d/in.txt"]
    assert agent.exec(["cat", "d/in.txt"]).stdout == "given"


@pytest.mark.everywhere(gvisor="coreutils' stat fails in it")
def test_an_idle_sandbox_ends_and_the_next_use_finds_the_workspace() -> None:
    with SandboxManager(policy=SMALL.replace(limits=Limits(idle_s=0.4, disk="4M"))) as manager:
        agent = manager.environment("a")
        agent.run("import os\nx = 1\nos.makedirs('d')\nopen('d/f', 'w').write('kept')\nos.symlink('d/f', 'l')")
        agent.exec(["sh", "-c", "chmod 750 d; (sleep 0.2; echo late > late) >/dev/null 2>&1 &"])
        first = own(agent)
        assert until(lambda: agent.sandboxes() == ()), "the idle sandbox did not end"
        result = agent.exec(["sh", "-c", "cat l late; stat -c %a d"])
        assert (result.stdout, own(agent) != first) == ("keptlate\n750\n", True)
        assert agent.run("'x' in globals()").value == "False"


def test_a_manager_that_once_could_start_no_thread_ends_idle_sandboxes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rest, failures = Environment._rest_if_idle, [RuntimeError("can't start new thread")]

    def rest_or_fail(self: Environment) -> None:
        if failures:
            raise failures.pop()
        rest(self)

    monkeypatch.setattr(Environment, "_rest_if_idle", rest_or_fail)
    with SandboxManager(policy=Policy(limits=Limits(idle_s=0.5))) as manager:
        agent = manager.environment("a")
        agent.run("1").check()
        deadline = time.monotonic() + 20
        while agent.sandboxes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (failures, agent.sandboxes()) == ([], ())


def test_a_sandbox_that_is_lost_is_replaced_with_the_workspace_of_the_last_call(manager: SandboxManager) -> None:
    agent = manager.environment("a")
    agent.files.write("f", "kept")
    manager.get(own(agent)).close()
    assert agent.exec(["cat", "f"]).stdout == "kept"


def test_a_long_call_is_not_idle() -> None:
    with SandboxManager(policy=Policy(limits=Limits(idle_s=0.3))) as manager:
        agent = manager.environment("a")
        assert agent.exec(["sleep", "2.5"]).ok
        first = own(agent)
        assert agent.run("1").ok
        assert own(agent) == first


def test_with_a_state_directory_a_workspace_outlives_its_manager(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with SandboxManager(policy=SMALL, state=state) as manager:
        manager.environment("a").run("open('f', 'w').write('of a')")
        manager.environment("..").files.write("f", "of dots")
    with SandboxManager(policy=SMALL, state=state) as manager:
        assert [found.agent for found in manager.environments()] == ["..", "a"]
        assert [found.files.read_text("f") for found in manager.environments()] == ["of dots", "of a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_a_workspace_comes_back_under_another_policy(tmp_path: Path) -> None:
    with SandboxManager(policy=SMALL, state=tmp_path / "s") as manager:
        manager.environment("a").files.write("f", "kept")
    with SandboxManager(state=tmp_path / "s") as manager:
        agent = manager.environment("a", policy=Policy(limits=Limits(memory="64M")))
        assert agent.exec(["cat", "f"]).stdout == "kept"
        agent.files.write("g", "more")
    with SandboxManager(state=tmp_path / "s") as manager:
        assert manager.environment("a").exec(["cat", "f", "g"]).stdout == "keptmore"


KILLED = """
import sys
from ringfence import SandboxManager
manager = SandboxManager(state=sys.argv[1] if len(sys.argv) > 1 else {state!r})
agent = manager.environment("a")
agent.run("open('f', 'w').write('written before the kill')")
print("kept", flush=True)
agent.exec(["sleep", "60"])
"""


def test_a_killed_manager_leaves_no_process_and_its_last_call_is_kept(tmp_path: Path) -> None:
    with Host(KILLED.format(state=str(tmp_path / "s"))) as host:
        assert host.line() == "kept"
        time.sleep(0.3)
        left = belongings(host.pid)
        host.kill()
        assert wait_until_gone(left) == []
    with SandboxManager(state=tmp_path / "s") as manager:
        assert manager.environment("a").files.read_text("f") == "written before the kill"


def test_without_a_state_directory_it_is_gone_with_close() -> None:
    with SandboxManager(policy=SMALL) as manager:
        manager.environment("a").files.write("f", "x")
    with SandboxManager(policy=SMALL) as manager:
        assert list(manager.environment("a").files.list()) == []


def test_two_managers_do_not_share_a_state_directory(tmp_path: Path) -> None:
    with SandboxManager(state=tmp_path / "s"), pytest.raises(SandboxError, match="another manager") as caught:
        SandboxManager(state=tmp_path / "s").environment("a")
    assert caught.value.code == "state-in-use"


def test_a_damaged_workspace_is_told_and_can_be_removed(tmp_path: Path) -> None:
    with SandboxManager(policy=SMALL, state=tmp_path / "s") as manager:
        manager.environment("a").files.write("f", "x" * 1000)
    (file,) = (tmp_path / "s" / "agent-a").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with SandboxManager(policy=SMALL, state=tmp_path / "s") as manager:
        agent = manager.environment("a")
        with pytest.raises(SnapshotError):
            agent.run("1")
        agent.remove()
        assert manager.environment("a").run("1").ok


def test_a_tree_that_cannot_be_kept_is_said_in_the_result_and_the_last_one_stays() -> None:
    with SandboxManager(policy=SMALL.replace(limits=Limits(idle_s=0.4, disk="4M"))) as manager:
        agent = manager.environment("a")
        agent.files.write("f", "kept")
        result = agent.exec(["truncate", "-s", "1T", "huge"])
        assert (result.ok, [(d.kind, d.target, d.code) for d in result.denials]) == (
            True,
            [("mount", "/workspace", "workspace.not-kept")],
        )
        assert "the workspace was not kept" in result.render()
        assert until(lambda: agent.sandboxes() == ())
        assert agent.exec(["ls"]).stdout == "f\n"


# ── agents apart ─────────────────────────────────────────────────────────────────────────────────

LOOK_FOR = read_program("behaviour/managers_look_for.py")


@pytest.mark.everywhere(gvisor="find takes too long in it")
def test_no_agent_finds_what_another_keeps_in_files_processes_or_the_state_directory(tmp_path: Path) -> None:
    """The marker is in one agent's file, variable and argument; another agent searches everywhere for the marker.

    It is searched for backwards, so that the search does not find itself. The witness is that the same search in the
    first agent's sandbox finds it, and that the state directory on the host holds it.
    """
    marker, state = "f4c1b7e09a", str(tmp_path / "s")
    look = ["python3", "-c", LOOK_FOR, marker[::-1], state, str(tmp_path)]
    with SandboxManager(policy=Policy(), state=state) as manager:
        mine, theirs = manager.environment("mine"), manager.environment("theirs")
        mine.files.write("secret", marker)
        mine.exec(
            ["sh", "-c", f"sleep 300 {marker[::-1]}; sh -c 'sleep 300 # {marker}' >/dev/null 2>&1 &"], timeout_s=0.5
        )
        assert "/workspace/secret" in mine.exec(look).stdout
        assert any(marker.encode() in path.read_bytes() for path in Path(state).rglob("*") if path.is_file())
        assert theirs.exec(look).stdout == "[]\n"
        other = theirs.sandbox()
        with other:
            assert other.exec(look).stdout == "[]\n"


def test_a_mount_that_would_show_the_state_directory_is_refused_wherever_it_is_asked_for(tmp_path: Path) -> None:
    policy = Policy(mounts=[Mount(tmp_path, "/data")])
    with pytest.raises(PolicyError, match="state directory"):
        SandboxManager(policy=policy, state=tmp_path / "s")
    with SandboxManager(state=tmp_path / "s") as manager:
        asks: list[Callable[[], object]] = [
            lambda: manager.environment("a", policy=policy),
            lambda: manager.sandbox(policy=policy),
        ]
        for ask in asks:
            with pytest.raises(PolicyError, match="state directory"):
                ask()


@pytest.mark.parametrize("agent", ["", "A", "a/b", "../x", "a" * 65, "ä"])
def test_what_is_no_id_makes_no_environment_and_no_folder(agent: str, tmp_path: Path) -> None:
    with SandboxManager(state=tmp_path / "s") as manager:
        with pytest.raises(PolicyError, match="is no agent's id"):
            manager.environment(agent)
        assert manager.environments() == ()
    assert [path.name for path in tmp_path.rglob("*")] == ["s", "lock"]


# ── policy and quota ─────────────────────────────────────────────────────────────────────────────


def test_policies_only_narrow_from_manager_to_environment_to_sandbox(manager: SandboxManager) -> None:
    less = Policy(limits=Limits(cpus=0.25, memory="64M", disk="1M"))
    with pytest.raises(PolicyError, match="memory"):
        manager.environment("a", policy=Policy(limits=Limits(cpus=0.5, memory="1G", disk="4M")))
    agent = manager.environment("a", policy=less)
    assert (agent.policy, agent.quota) == (less, Quota())
    with pytest.raises(PolicyError, match="memory"):
        agent.sandbox(policy=SMALL)
    with pytest.raises(PolicyError, match="cpus"):
        manager.sandbox(policy=Policy(limits=Limits(cpus=4, memory="64M", disk="1M")))
    with agent.sandbox(policy=less) as box:
        assert (box.policy, list(box.files.list())) == (less, [])


def test_a_link_that_a_guest_makes_leads_no_mount_out_of_the_ceiling(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    project, private = tmp_path / "project", tmp_path / "private"
    for folder in (private, project / "hidden", project / "plain"):
        folder.mkdir(parents=True)
        (folder / "f").write_text("text")
    project.chmod(0o777)
    with SandboxManager(policy=Policy(mounts=[Mount(project, "/p", "rw", hide=["hidden"])])) as manager:
        agent = manager.environment("a")
        assert agent.exec(["sh", "-c", f"ln -s {private} /p/out; ln -s hidden /p/in; ln -s plain /p/fine"]).ok

        def asked(name: str) -> Policy:
            return Policy(mounts=[Mount(project / name, "/q")])

        for name, words in (("out", r"mounts\[0\].source: .*/private is not shown"), ("in", "must stay hidden")):
            for owner in (agent, manager):
                with pytest.raises(PolicyError, match=words) as caught, owner.sandbox(policy=asked(name)):
                    pass
                assert caught.value.code == "mount-leads-out"
            with pytest.raises(PolicyError, match=words):
                manager.environment(f"of-{name}", policy=asked(name)).exec(["true"])
        with pytest.raises(PolicyError, match="/fine is a link to plain") as caught:
            agent.sandbox(policy=asked("fine")).start()
        fix = f"name {project}/plain itself, if that is what you mean"
        assert (caught.value.code, caught.value.fix) == ("link", fix)
        with agent.sandbox(policy=asked("plain")) as box:
            assert box.exec(["cat", "/q/f"]).stdout == "text"


def try_live_rules() -> str:
    """Return the error for rules that permit more than the ceiling does."""
    network = Network(allow=["a.example", "b.example"])
    with SandboxManager(policy=Policy(network=network)) as manager:
        agent = manager.environment("a", policy=Policy(network=Network(allow=["a.example"])))
        with agent.sandbox() as box:
            box.network.set(Network())
            box.network.set(Network(allow=["a.example"]))
            with pytest.raises(PolicyError) as caught:
                box.network.set(network)
        assert agent.requests() == ()
        return str(caught.value)


ASK = "import socket\ntry: socket.getaddrinfo('b.example', 443)\nexcept OSError: pass"


def try_asking() -> list[tuple[tuple[str, int, bool], ...]]:
    """Return an agent's requests before any, with a live sandbox that asked, and after another that ended."""
    seen = []
    with SandboxManager(policy=Policy(network=Network(allow=["a.example"]))) as manager:
        agent = manager.environment("a")
        asks: list[Callable[[], object]] = [
            lambda: agent.exec(["true"]),
            lambda: agent.exec(["python3", "-c", ASK]),
            lambda: in_another(agent),
        ]
        for ask in asks:
            ask()
            seen.append(tuple((row.host, row.allowed, row.denied > 0) for row in agent.requests()))
        assert manager.environment("b").requests() == ()
    return seen


def in_another(agent: Environment) -> None:
    before = agent.requests()[0].denied
    with agent.sandbox() as box:
        box.exec(["python3", "-c", ASK]).check()
    assert agent.requests()[0].denied == 2 * before


@pytest.fixture(scope="module")
def gateway_runs() -> None:
    """A process keeps a gateway and spares of a policy from their first uses on."""
    for _ in range(3):
        try_live_rules()
        try_asking()


@pytest.mark.usefixtures("gateway_runs")
def test_requests_are_of_all_its_sandboxes_those_that_ended_too() -> None:
    asked = (("b.example", 0, True),)
    assert try_asking() == [(), asked, asked]


@pytest.mark.usefixtures("gateway_runs")
def test_live_rules_stay_below_the_ceiling() -> None:
    assert "b.example" in try_live_rules()


def test_an_environment_is_made_once_and_keeps_what_it_was_made_with(manager: SandboxManager) -> None:
    quota = Quota(sandboxes=2)
    agent = manager.environment("a", quota=quota)
    assert manager.environment("a") is agent
    assert manager.environment("a", quota=quota) is agent
    assert manager.environments() == (agent,)
    with pytest.raises(PolicyError, match="already exists, with another quota") as caught:
        manager.environment("a", quota=Quota(sandboxes=3))
    assert caught.value.code == "environment-exists"


@pytest.mark.parametrize(
    ("quota", "code"),
    [
        (Quota(sandboxes=2), "quota-sandboxes"),
        (Quota(cpus=1), "quota-cpus"),
        (Quota(memory="300M"), "quota-memory"),
        (Quota(disk="10M"), "quota-disk"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_sandbox_beyond_a_quota_does_not_start_until_another_ends(quota: Quota, code: str) -> None:
    with SandboxManager(policy=SMALL, quota=quota) as manager:
        agent = manager.environment("a")
        agent.run("1")
        with agent.sandbox() as second:
            third = agent.sandbox()
            with pytest.raises(QuotaError, match="is at its quota") as caught:
                third.start()
            assert (caught.value.code, caught.value.retry_after_s > 0, third.state) == (code, True, "new")
            with pytest.raises(QuotaError):
                second.fork(memory=False)
            assert len(agent.sandboxes()) == 2
        with agent.sandbox() as again:
            assert again.exec(["echo", "on"]).stdout == "on\n"
        with manager.environment("b").sandbox() as others:
            assert others.exec(["true"]).ok


def test_a_sandbox_that_several_start_is_admitted_once() -> None:
    with SandboxManager(policy=SMALL, quota=Quota(sandboxes=1)) as manager:
        box = manager.environment("a").sandbox()
        with ThreadPoolExecutor(4) as pool:
            assert [started is box for started in pool.map(lambda _: box.start(), range(4))] == [True] * 4


def test_a_fork_is_one_more_on_the_quota_of_its_agent(manager: SandboxManager) -> None:
    agent = manager.environment("a", quota=Quota(sandboxes=2))
    with agent.sandbox() as box:
        box.files.write("f", "x")
        with box.fork(memory=False) as twin:
            assert (twin.files.read_text("f"), len(agent.sandboxes())) == ("x", 2)
            with pytest.raises(QuotaError):
                agent.run("1")
    assert agent.run("1").ok


def test_runs_of_every_kind_count_against_the_minute(manager: SandboxManager) -> None:
    agent = manager.environment("a", quota=Quota(runs_per_minute=5))
    agent.run("1")
    agent.exec(["true"])
    with agent.sandbox() as box:
        box.session("s").run("1")
        box.spawn(["true"]).wait()
        box.run("true", language="bash")
        calls: list[Callable[[], object]] = [
            lambda: box.exec(["true"]),
            lambda: box.run("1"),
            lambda: box.spawn(["true"]),
            lambda: box.session("s").run("1"),
            lambda: box.pty(["true"]),
            lambda: agent.run("1"),
        ]
        for call in calls:
            with pytest.raises(QuotaError, match="5 of 5 are used and 1 more is wanted") as caught:
                call()
            assert (0 < caught.value.retry_after_s <= 60, caught.value.code) == (True, "quota-runs_per_minute")
        box.files.write("f", "files are no runs")


# ── looking ──────────────────────────────────────────────────────────────────────────────────────


def test_history_is_newest_first_with_a_line_of_output(manager: SandboxManager) -> None:
    agent = manager.environment("a")
    agent.run("print('one\\ntwo')")
    agent.exec(["sh", "-c", "echo bad >&2; exit 3"])
    assert [(r.status, r.stdout, r.stderr, r.truncated) for r in agent.history()] == [
        ("error", "", "bad\n", False),
        ("ok", "one\n", "", True),
    ]
    assert [r.exit_code for r in agent.history(limit=1)] == [3]
    assert manager.environment("b").history() == ()


@pytest.mark.everywhere(gvisor="counts bytes and not blocks")
@weaker.needs_cgroup
def test_what_a_sandbox_used_counts_whoever_sees_its_end_first(
    manager: SandboxManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = manager.environment("a")
    box = agent.sandbox().start()
    box.run("sum(range(1_000_000))")
    assert box._box is not None
    with monkeypatch.context() as patched:
        patched.setattr(box._box, "wait_destroyed", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            box.close()
    box.close()
    assert agent.usage().cpu_s


@weaker.needs_cgroup
def test_usage_is_of_all_its_sandboxes_those_that_ended_too(manager: SandboxManager) -> None:
    burn = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\nprint('x' * 99)"
    agent = manager.environment("a")
    for _ in range(2):
        with agent.sandbox() as box:
            box.run(burn)
    agent.run(burn)
    agent.files.write("f", "x" * 5000)
    usage = agent.usage()
    assert usage.cpu_s is not None
    assert (usage.cpu_s >= 0.6, usage.output_bytes, usage.disk_bytes, usage.disk_files) == (True, 100, 8192, 1)
    assert manager.environment("b").usage().cpu_s is None


@weaker.needs_cgroup
def test_a_paused_sandbox_is_listed_counted_and_ended_with_the_others(manager: SandboxManager) -> None:
    agent = manager.environment("a", quota=Quota(sandboxes=1))
    box = agent.sandbox().start()
    box.exec(["true"]).check()
    box.pause()
    assert [info.state for info in agent.sandboxes()] == ["paused"]
    with pytest.raises(QuotaError):
        agent.run("1")
    assert agent.usage().cpu_s is not None
    agent.remove()
    assert box.state == "closed"


def test_sandboxes_are_found_by_id_and_by_labels(manager: SandboxManager) -> None:
    agent = manager.environment("a")
    agent.run("1")
    with manager.sandbox(labels={"team": "x", "n": "1"}) as one, manager.sandbox(labels={"team": "x"}) as two:
        assert manager.get(one.id) is one
        assert manager.get(own(agent)).exec(["true"]).ok
        assert [info.id for info in manager.sandboxes(labels={"team": "x"})] == [one.id, two.id]
        assert [info.id for info in manager.sandboxes(labels={"team": "x", "n": "1"})] == [one.id]
        assert manager.sandboxes(labels={"team": "y"}) == ()
        (info,) = [info for info in manager.sandboxes() if info.id == one.id]
        assert (info.state, info.backend, info.agent, dict(info.labels)) == ("running", one.backend, None, one.labels)
        assert 3590 < (info.ends_at - info.started_at).total_seconds() <= 3601
        assert len(manager.sandboxes()) == 3
    for unknown in (one.id, "s-0000000000000000", "", "../x"):
        with pytest.raises(LookupError, match="no sandbox"):
            manager.get(unknown)


def test_warm_sandboxes_wait_unused_are_handed_out_once_and_replaced() -> None:
    with SandboxManager(policy=SMALL, warm=2) as manager:
        assert manager.sandboxes() == ()
        first = manager.sandbox(labels={"a": "b"})
        assert (first.state, len(manager.sandboxes(labels={"a": "b"}))) == ("running", 1)
        with first:
            first.files.write("f", "x")
            assert until(lambda: len(manager._waiting) == 2)
            ids = {box.id for box in manager._waiting}
            assert first.id not in ids
            agent = manager.environment("a", quota=Quota(sandboxes=1))
            assert (agent.exec(["ls"]).stdout, own(agent) in ids) == ("", True)
            extra = agent.sandbox
            with pytest.raises(QuotaError):
                extra()
        other = Policy(limits=Limits(cpus=0.25, memory="64M", disk="1M"))
        assert manager.sandbox(policy=other).state == "new"


def test_a_warm_sandbox_is_not_given_to_who_brings_a_secret_of_his_own() -> None:
    """Two secrets with the same name are equal, whatever the values are."""

    def policy(value: str) -> Policy:
        network = Network(allow=["a.test"])
        return SMALL.replace(network=network, secrets=[Secret("TOKEN", value, hosts=["a.test"])])

    with SandboxManager(policy=policy("sk-of-the-manager-1"), warm=1) as manager:
        assert manager.sandbox(policy=policy("sk-of-the-agent-22")).state == "new"
        assert manager.sandbox().state == "running"


@pytest.mark.everywhere(gvisor="its processes have no numbers outside")
def test_the_interpreter_of_a_warm_sandbox_waits_too_and_is_no_session_before_it_is_asked_for() -> None:
    with SandboxManager(policy=SMALL, warm=1) as manager, manager.sandbox() as box:
        before = box.exec(["ls", "/proc"]).stdout.split()
        assert box.sessions() == ()
        assert str(box.run("import os; os.getpid()").value) in before
        assert [session.name for session in box.sessions()] == ["python"]
        box.session().restart()
        assert str(box.run("import os; os.getpid()").value) not in before


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


def test_remove_ends_the_agents_sandboxes_and_deletes_its_workspace(tmp_path: Path) -> None:
    with SandboxManager(policy=SMALL, state=tmp_path / "s") as manager:
        agent, other = manager.environment("a"), manager.environment("b")
        agent.files.write("f", "x")
        other.files.write("f", "of b")
        box = agent.sandbox().start()
        assert (tmp_path / "s" / "agent-a").is_dir()
        agent.remove()
        agent.remove()
        assert (box.state, (tmp_path / "s" / "agent-a").exists()) == ("closed", False)
        uses: list[Callable[[], object]] = [lambda: agent.run("1"), lambda: agent.files.read("f"), agent.sandbox]
        for use in uses:
            with pytest.raises(SandboxClosedError, match="'a' was removed"):
                use()
        again = manager.environment("a")
        assert (again is agent, list(again.files.list()), other.files.read_text("f")) == (False, [], "of b")


def test_closing_ends_everything_and_may_be_done_again() -> None:
    manager = SandboxManager(policy=SMALL, warm=1)
    agent = manager.environment("a")
    agent.run("1")
    boxes = [manager.sandbox().start(), agent.sandbox().start(), *manager._waiting]
    manager.close()
    manager.close()
    assert [box.state for box in boxes] == ["closed"] * len(boxes)
    uses: list[Callable[[], object]] = [
        lambda: manager.environment("b"),
        manager.sandbox,
        manager.sandboxes,
        manager.environments,
        lambda: manager.get("x"),
        lambda: agent.run("1"),
        agent.sandbox,
    ]
    for use in uses:
        with pytest.raises(SandboxClosedError):
            use()


def test_what_was_made_before_the_end_of_its_owner_does_not_start_after_it() -> None:
    with SandboxManager(policy=SMALL) as manager:
        agent = manager.environment("a")
        of_agent, of_manager = agent.sandbox(), manager.sandbox()
        agent.remove()
        assert manager.environment("a") is not agent
        with pytest.raises(SandboxClosedError, match="made for has ended"):
            of_agent.start()
    with pytest.raises(SandboxClosedError, match="made for has ended"):
        of_manager.start()


def test_a_removed_environment_is_forgotten(manager: SandboxManager) -> None:
    manager.environment("a").remove()
    assert until(lambda: not manager._environments)


def test_a_manager_that_cannot_begin_leaves_no_warm_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[OwnedSandbox] = []
    real = OwnedSandbox.start

    def start(self: OwnedSandbox) -> OwnedSandbox:
        if started:
            raise KeyboardInterrupt
        started.append(self)
        return real(self)

    monkeypatch.setattr(OwnedSandbox, "start", start)
    with pytest.raises(KeyboardInterrupt), SandboxManager(policy=SMALL, warm=2):
        pass
    assert [box.state for box in started] == ["closed"]


def test_a_manager_that_is_closed_while_it_begins_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SandboxManager(policy=SMALL)
    monkeypatch.setattr(manager, "_fill", lambda: setattr(manager, "_closed", True))
    with pytest.raises(SandboxClosedError, match="the manager was closed"):
        manager.environment("a")
    assert manager._ticker is None


def test_an_interrupted_close_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manager = SandboxManager(policy=SMALL, warm=1, state=tmp_path / "s")
    agent = manager.environment("a")
    agent.run("1")
    boxes = [manager.sandbox().start(), agent.sandbox().start(), agent._box, *manager._waiting]
    with monkeypatch.context() as patched:
        patched.setattr(Environment, "_end", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    places = [box._box for box in boxes if box is not None and box._box is not None]
    assert [place.wait_destroyed(5.0) for place in places] == [True] * len(places)
    with SandboxManager(policy=SMALL, state=tmp_path / "s") as another:
        assert another.environment("a").run("1").ok


def test_nothing_happens_in_the_constructor(tmp_path: Path) -> None:
    SandboxManager(warm=3, state=tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"policy": "offline"}, TypeError, "policy is a Policy"),
        ({"quota": 5}, TypeError, "quota is a Quota"),
        ({"backend": "chroot"}, PolicyError, "unknown backend"),
        ({"warm": -1}, PolicyError, "warm is -1"),
        ({"warm": True}, PolicyError, "warm is True"),
        ({"warm": 10**6}, PolicyError, "warm is"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        SandboxManager(**arguments)


def test_threads_share_an_agents_sandbox(manager: SandboxManager) -> None:
    agent = manager.environment("a")
    results: list[str] = []

    def work(number: int) -> None:
        results.append(agent.exec(["sh", "-c", f"echo {number} > {number}; cat {number}"]).stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"{number}\n" for number in range(8)]
    assert (len(agent.sandboxes()), len(list(agent.files.list()))) == (1, 8)


def test_the_async_half_does_the_same(tmp_path: Path) -> None:
    async def work() -> list[object]:
        seen: list[object] = []
        policy = SMALL.replace(limits=Limits(idle_s=0.4, disk="4M"))
        async with AsyncSandboxManager(policy=policy, warm=1, state=tmp_path / "s") as manager:
            agent = await manager.environment("a", quota=Quota(sandboxes=1))
            await asyncio.gather(*(agent.exec(["sh", "-c", f"echo {n} > {n}"]) for n in range(5)))
            await agent.files.write("d/f", "x")
            seen.append([info.path async for info in agent.files.list(recursive=True)])
            try:
                await agent.sandbox().start()
            except QuotaError as error:
                seen.append(error.code)
            for _ in range(100):
                await asyncio.sleep(0.05)
                if not await agent.sandboxes():
                    break
            seen.append(await agent.sandboxes())
            seen.append((await agent.exec(["cat", "0", "d/f"])).stdout)
            seen.append(len(await agent.history()))
        return seen

    first = ["0", "1", "2", "3", "4", "d", "d/f"]
    assert asyncio.run(work()) == [first, "quota-sandboxes", (), "0\nx", 6]
    assert os.listdir(tmp_path / "s" / "agent-a") == ["workspace.snapshot"]


AS_USER = read_program("behaviour/managers_as_user.py")


def test_an_ordinary_user_has_managers_too(ordinary_user: OrdinaryUser) -> None:
    state = ordinary_user.home / "state-of-a-test"
    try:
        done = ordinary_user.run(AS_USER, str(state))
        lines = ["'x'", "quota-sandboxes", "'xx'", "quota-sandboxes", "()"]
        assert (done.stdout.splitlines(), done.stderr) == (lines, "")
    finally:
        shutil.rmtree(state, ignore_errors=True)
