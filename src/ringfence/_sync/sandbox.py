# Generated from ringfence/_async by scripts/unasync: do not edit.
"""A sandbox in the hands of a caller, and the gateway, the sandbox's only way to a network."""

from __future__ import annotations

import os
import time

from ringfence._sync.compat import blocking, launched, lock, opening
from ringfence.backends.auto import prepare
from ringfence.core import arguments, endings
from ringfence.errors import PolicyError, SandboxClosedError, SandboxError, UnsupportedError, unknown_attribute
from ringfence.host import import_path, zygote_start
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from types import TracebackType
    from typing import Literal, NoReturn, Self

    from ringfence._sync.files import Files
    from ringfence._sync.ports import Address
    from ringfence._sync.process import Place, Process, Pty
    from ringfence._sync.session import Session
    from ringfence._sync.snapshots import Trees
    from ringfence.backends.auto import Launcher
    from ringfence.backends.contract import Backend, Box
    from ringfence.plan.model import Plan
    from ringfence.policy.image import Image
    from ringfence.policy.model import Mount, Network, Policy
    from ringfence.records import HostSummary, ProcessInfo, Request
    from ringfence.results import Denial, Enforcement, Result, Usage
    from ringfence.snapshots.model import Snapshot
    from ringfence.values import Argv, BackendName, GuestPath, SessionLanguage, Size, State, Strings, Tool, Workspace

_SHELL = ("sh", "-c", 'exec "$(command -v bash || echo sh)" -i')
_PAUSE_S = 3.0  # how long guestd may take to say that it paused or goes on


class Sandbox:
    """A place where code runs isolated. Starts in `with` or `start()`; nothing happens in the constructor.

    Without a policy a sandbox has `Policy()`, closed, in which `timeout_s`, `memory` and the other short forms set
    single parts. With a policy, `timeout_s` only narrows and the other short forms are a PolicyError.
    """

    def __init__(
        self,
        *,
        backend: BackendName | Backend = "auto",
        image: str | Image = "host",
        policy: Policy | None = None,
        timeout_s: float | None = None,
        memory: Size | None = None,
        cpus: float | None = None,
        disk: Size | None = None,
        env: Mapping[str, str] | None = None,
        allow_net: Strings | Literal["public"] | None = None,
        mounts: list[Mount] | tuple[Mount, ...] | None = None,
        snapshot: Snapshot | None = None,
        workspace: Workspace = "auto",
        tools: Mapping[str, Tool] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        chosen = arguments.policy_of(
            policy, memory=memory, cpus=cpus, disk=disk, env=env, allow_net=allow_net, mounts=mounts
        )
        if timeout_s is not None:
            if policy is None:
                chosen = arguments.with_room_for(chosen, timeout_s)
            seconds = arguments.check_timeout(timeout_s, chosen.limits, beside_policy=policy is not None)
            chosen = chosen.replace(limits=replace(chosen.limits, timeout_s=seconds))
        self.id = arguments.new_id("s")
        self.policy = chosen
        self.labels = arguments.check_labels(labels)
        self.network = Gateway(lambda: self._box)
        self._launcher: Launcher = prepare(backend, image, chosen, workspace=workspace)
        self._made_with = (backend, workspace)
        self._snapshot = snapshot
        self._files: Files | None = None
        self._trees: dict[str, Trees] = {}  # empty or one: `setdefault` is one step for threads
        if snapshot is not None:
            self._check_snapshot(snapshot)
        self._box: Box | None = None
        self._place: Place | None = None
        self._ended: State = "new"
        self._starting = lock()
        self._pausing = lock()  # a pause and a resume at once would leave half of each
        self._tools = _checked_tools(tools)
        self._addresses: list[Address] = []
        self._paused = False
        self._processes: dict[str, tuple[Process, float]] = {}
        self._sessions: dict[str, Session] = {}

    @property
    def state(self) -> State:
        if self._place is None or self._ended == "closed":
            return self._ended
        if self._place.pid != os.getpid():
            return "closed"
        self._place.link.poll()
        over = self._place.link.over
        if over is None:
            return "paused" if self._paused or self._place.link.paused else "running"
        return "closed" if over in ("closed", "idle", "lifetime") else "lost"

    @property
    def files(self) -> Files:
        if self._files is None:
            from ringfence._sync.files import Files

            self._files = Files(self._running_place)
        return self._files

    @property
    def backend(self) -> str:
        """Return the name of the backend that was chosen, never "auto". Raise SandboxClosedError before the start."""
        if self._box is None:
            raise SandboxClosedError("the sandbox has not been started, so no backend was taken", fix="call start()")
        return self._box.backend

    @property
    def enforcement(self) -> Enforcement:
        """Return the mechanism behind each promise; before the start, the mechanism that is planned."""
        return self._launcher.plan().enforcement if self._box is None else self._box.enforcement

    def plan(self) -> Plan:
        """Return what start() would do. Raise UnsupportedError when the policy cannot be kept here."""
        return self._launcher.plan()

    def start(self) -> Self:
        with self._starting:
            if self._box is None or self._ended == "closed":
                self._start()
        return self

    def _start(self) -> None:
        if self._ended != "closed":
            backend, _ = self._made_with
            zygote_start.begin_first(backend, self._launcher.image.name, self.policy)
            try:
                box = launched(self._launcher)
            finally:
                zygote_start.end_unneeded()
            try:
                if self.state != "closed":
                    self._begin(box)
                    return
            except BaseException:
                box.close()  # `close` may not know the box yet
                self.close()
                raise
            box.close()  # the sandbox was closed meanwhile
            blocking(box.wait_destroyed, arguments.DESTROY_S)
        raise SandboxClosedError(f"sandbox {self.id} was closed; a sandbox starts once", fix="make a new Sandbox")

    def _begin(self, box: Box) -> None:
        from ringfence._sync.link import Link
        from ringfence._sync.process import Place

        self._box = box
        link = Link(box)
        self._place = Place(box, link, self.policy, self._launcher.image.name)
        limits = self.policy.limits
        link.say(op="clocks", lifetime_s=limits.lifetime_s, idle_s=limits.idle_s, on_idle=limits.on_idle)
        self._ends_at = time.time() + limits.lifetime_s
        if box.outlet is not None:
            from ringfence._sync.run import equip

            equip(self._place)
        if self._snapshot is not None:
            self._trees_kept().fill(self._running_place(), self._snapshot)
            self._put_sessions(self._snapshot)

    def close(self) -> None:
        """Kill everything inside and leave nothing behind. Idempotent."""
        box = self._end_now()
        for address in self._addresses:
            address.close()
        if box is not None:
            blocking(box.wait_destroyed, arguments.DESTROY_S)

    def _end_now(self) -> Box | None:
        """Do the part of `close` that must not be interrupted. Return the box that `close` has to wait for."""
        self._ended = "closed"
        for trees in self._trees.values():
            trees.close()
        if self._place is None or self._place.pid != os.getpid():
            return None
        try:
            self._place.link.finish("closed")
        finally:
            self._place.box.close()
        return self._place.box

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.close()

    def _running_place(self) -> Place:
        if self._place is None:
            raise endings.not_started(self.id, closed=self._ended == "closed")
        if self._place.pid != os.getpid():
            raise endings.of_another_process(f"sandbox {self.id}", self._place.pid)
        self._place.link.poll()
        over = self._place.link.over
        if over is not None:
            raise endings.ended(self.id, over, self._place.box)
        if self._paused:
            raise SandboxError(f"sandbox {self.id} is paused", code="paused", fix="call resume()")
        import_path.keep_first()  # L12
        return self._place

    # code and commands

    def run(
        self,
        code: str,
        *,
        language: str = "python",
        stdin: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """Run code in the default session of `language`.

        A language without sessions is compiled where needed, and run once.
        """
        checked, language = arguments.check_code(code), arguments.check_language(language)
        if language in arguments.PROGRAMS:
            from ringfence._sync.session import check_session_language

            session = self.session(language=check_session_language(language))
            return session.run(checked, stdin=stdin, env=env, timeout_s=timeout_s)
        from ringfence._sync.run import run_once

        seconds = arguments.check_timeout(timeout_s, self.policy.limits)
        given, variables = arguments.check_stdin(stdin), arguments.check_env(env)
        return run_once(self, arguments.Once(language, checked, given, variables, seconds))

    def exec(
        self,
        argv: Argv,
        *,
        stdin: bytes | str | None = None,
        cwd: GuestPath | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """Run a command, without a shell. A str raises TypeError that names `run(…, language="bash")`."""
        place, call = self._exec_call(argv, cwd, env, timeout_s, stdin=arguments.check_stdin(stdin))
        from ringfence._sync.process import completed

        return completed(place, call)

    def spawn(
        self,
        argv: Argv,
        *,
        cwd: GuestPath | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Process:
        """Start a command and return without waiting: iterate over the events, write input, send signals."""
        place, call = self._exec_call(argv, cwd, env, timeout_s, keeps_stdin=True)
        return opening(self._spawn(place, call))

    def _spawn(self, place: Place, call: arguments.Call) -> Process:
        place.count_call()
        from ringfence._sync.process import Process

        process = Process(place, call, place.link.open(), keep_events=True)._begin()
        self._processes[process.id] = (process, time.time())
        return process

    def _exec_call(
        self,
        argv: Argv,
        cwd: GuestPath | None,
        env: Mapping[str, str] | None,
        timeout_s: float | None,
        *,
        stdin: bytes | None = None,
        keeps_stdin: bool = False,
    ) -> tuple[Place, arguments.Call]:
        words, where, variables = arguments.check_argv(argv), arguments.check_cwd(cwd), arguments.check_env(env)
        limits = self.policy.limits
        seconds = (
            arguments.check_lifetime(timeout_s, limits) if keeps_stdin else arguments.check_timeout(timeout_s, limits)
        )
        place = self._running_place()
        call = arguments.exec_call(
            place.box,
            self.policy,
            words,
            cwd=where,
            env=variables,
            timeout_s=seconds,
            stdin=stdin,
            keeps_stdin=keeps_stdin,
            one_shot=zygote_start.is_command(),  # a command's sandbox runs one process, and ends with it
        )
        return place, call

    def pty(
        self,
        argv: Argv | None = None,
        *,
        cols: int = 80,
        rows: int = 24,
        cwd: GuestPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Pty:
        return self._pty(_SHELL if argv is None else argv, cols=cols, rows=rows, cwd=cwd, env=env)

    def _pty(
        self,
        argv: Argv,
        *,
        cols: int,
        rows: int,
        cwd: GuestPath | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Pty:
        place, call = self._exec_call(argv, cwd, env, timeout_s, keeps_stdin=True)
        size = arguments.check_size(cols, rows)
        return opening(self._open_terminal(place, replace(call, pty=size, one_shot=False)))

    def _open_terminal(self, place: Place, call: arguments.Call) -> Pty:
        place.count_call()
        from ringfence._sync.process import Pty

        terminal = Pty(place, call, place.link.open(), keep_events=True)._begin()
        self._processes[terminal.id] = (terminal, time.time())
        return terminal

    def session(self, name: str | None = None, *, language: SessionLanguage = "python") -> Session:
        """Return the session `name`, opened if there is none; without a name, the default session of `language`."""
        from ringfence._sync.session import Session, check_name, check_session_language

        spoken = check_session_language(language)
        called = spoken if name is None else check_name(name)
        self._running_place()
        found = self._sessions.get(called)
        if found is None or found._closed:
            found = self._sessions[called] = Session(called, spoken, self._running_place, self._tools)
        if found.language != spoken:
            raise PolicyError(
                f"session {called!r} runs {found.language}, not {spoken}", code="session-language", fix="another name"
            )
        return found

    def sessions(self) -> tuple[Session, ...]:
        """Return the open sessions, in the order in which they were opened."""
        return tuple(session for session in self._sessions.values() if not session._closed)

    def process(self, id: str, *, after: int = 0) -> Process:
        """Return a spawned process, whose events start after the cursor `after`.

        Raise LookupError for an unknown id.
        """
        if id not in self._processes:
            raise LookupError(f"no process {id!r} was spawned in sandbox {self.id}")
        found = self._processes[id][0]
        found._read_on(after)
        return found

    def processes(self) -> tuple[ProcessInfo, ...]:
        from datetime import UTC, datetime

        from ringfence.records import ProcessInfo

        return tuple(
            ProcessInfo(id, process.argv, process.running, datetime.fromtimestamp(at, UTC))
            for id, (process, at) in self._processes.items()
        )

    # copies and time

    def snapshot(self, *, memory: bool = False) -> Snapshot:
        """Return a snapshot of /workspace; a second one costs what changed.

        Raise SnapshotError when it cannot be kept.
        """
        if not memory:
            return self._trees_kept().take(self._running_place())
        from ringfence._sync import snapshots

        return snapshots.snapshot(self)

    def rollback(self, snapshot: Snapshot) -> None:
        """Set the files back to a snapshot.

        Sessions restart unless the snapshot holds memory. Spawned processes end.
        """
        from ringfence._sync import snapshots

        snapshots.roll_back(self, snapshot)

    def fork(self, *, memory: bool = True) -> Sandbox:
        """Return one live, independent copy.

        Raise UnsupportedError when memory cannot be copied here; a copy without is never made.
        """
        from ringfence._sync import snapshots

        self._running_place()
        return opening(snapshots.fork(self) if memory else snapshots.fork_files(self))

    def _put_sessions(self, snapshot: Snapshot) -> None:
        if snapshot.memory:
            from ringfence._sync import snapshots
            from ringfence.snapshots.model import sessions_of

            snapshots.put(sessions_of(snapshot), self)

    def _another(self) -> Sandbox:
        """Return a sandbox of the same backend, image, policy, workspace, tools and labels. It is not started."""
        backend, workspace = self._made_with
        image = self._launcher.image
        return Sandbox(
            backend=backend,
            image=image,
            policy=self.policy,
            workspace=workspace,
            tools=self._tools,
            labels=self.labels,
        )

    def _trees_kept(self) -> Trees:
        if not self._trees:
            from ringfence._sync.snapshots import Trees
            from ringfence.snapshots.model import check_workspace

            check_workspace(self.policy)
            self._trees.setdefault("kept", Trees(self._bound()))
        return self._trees["kept"]

    def _bound(self) -> str:
        from ringfence.snapshots.model import bound_to

        return bound_to(self._launcher.name, self._launcher.image, self.policy)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        from ringfence.snapshots import model

        if not isinstance(snapshot, model.Snapshot):
            raise TypeError(f"snapshot is a Snapshot, not {type(snapshot).__name__}; see box.snapshot()")
        model.check_workspace(self.policy)
        model.check(snapshot, self._bound(), self.policy)
        self._launcher.twin_of = model.outlet_of(snapshot)

    def pause(self) -> None:
        """Freeze everything inside: the sandbox uses no CPU, and all clocks stop. Idempotent."""
        with self._pausing:
            if self.state == "paused" and self._paused:
                return
            place = self._running_place()
            if place.box.can_freeze:
                try:
                    place.link.say(op="pause")  # guestd stops the clocks first: it may be frozen too
                    place.link.wait(lambda: place.link.paused, time.monotonic() + _PAUSE_S)
                    self._paused = blocking(place.box.freeze)
                finally:
                    if not self._paused:  # an interrupted call has not paused the sandbox
                        self._go_on()
            if not self._paused:
                raise endings.no_freezer(self.id, self.backend)

    def resume(self) -> None:
        """Let a paused sandbox go on. Does nothing to a sandbox that runs."""
        with self._pausing:
            self._go_on()

    def _go_on(self) -> None:
        self._paused = False
        place = self._running_place()
        blocking(place.box.thaw)
        place.link.say(op="resume")
        place.link.wait(lambda: not place.link.paused, time.monotonic() + _PAUSE_S)

    def set_lifetime(self, lifetime_s: float) -> datetime:
        """End the sandbox `lifetime_s` seconds from now, at most the policy's; return when that is."""
        from datetime import UTC, datetime

        seconds = arguments.narrower(lifetime_s, self.policy.limits.lifetime_s, "lifetime_s")
        place = self._running_place()
        limits = self.policy.limits
        place.link.say(op="clocks", lifetime_s=seconds, idle_s=limits.idle_s, on_idle=limits.on_idle)
        return datetime.fromtimestamp(time.time() + seconds, UTC)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown_attribute(self, name, {"extend": "set_lifetime"})

    # ports, usage, denials

    def expose(self, port: int) -> Address:
        """Return a local address that reaches `port` inside.

        The port may be opened later: each connection is tried when it comes.
        """
        number = arguments.check_port(port)
        self._running_place()
        return opening(self._expose(number))

    def _expose(self, port: int) -> Address:
        from ringfence._sync.connection import Connection
        from ringfence._sync.ports import opened

        def connect() -> Connection:
            return Connection(self._running_place(), arguments.connect_call(port, self.policy)).begin()

        address = opened(connect)
        self._addresses.append(address)
        return address

    def usage(self) -> Usage:
        return self._running_place().box.usage()[0]

    def denials(self) -> tuple[Denial, ...]:
        """Return what the policy refused so far; after close(), also what a look at the writable mounts showed."""
        if self._box is None:
            return ()
        refused = () if self._box.outlet is None else self._box.outlet.denials(0)
        return (*refused, *self._box.findings())


class Gateway:
    """The gateway of a sandbox, and the only way to a network: the log of decisions, and live rules."""

    def __init__(self, box: Callable[[], Box | None]) -> None:
        self._box = box
        self._live: Network | None = None  # rules that replaced those of the policy

    def log(self, *, after: int = 0) -> tuple[Request, ...]:
        """Return each connection or request that has ended, oldest first, without the first `after`.

        The last 10,000 are kept.
        """
        box = self._box()
        return () if box is None or box.outlet is None else box.outlet.requests(after)

    def summary(self) -> tuple[HostSummary, ...]:
        box = self._box()
        return () if box is None or box.outlet is None else box.outlet.summary()

    def set(self, network: Network) -> None:
        """Replace the rules and cut connections that are no longer permitted. Never goes beyond a manager's policy."""
        from ringfence.policy.model import Network as Kind

        if not isinstance(network, Kind):
            raise TypeError(f"network is a Network, not {type(network).__name__}")
        box = self._box()
        if box is None:
            raise SandboxClosedError("the sandbox has not been started", fix="use `with`, or call start()")
        if box.outlet is None:
            raise UnsupportedError(
                "the sandbox was started without a network, and has no way to the gateway",
                code="network",
                fix="start it with a Network that permits something",
            )
        blocking(box.outlet.set, network)
        self._live = network

    def _take_over_rules(self, other: Gateway) -> None:
        """Take over the live rules of `other`, whose sandbox was copied."""
        if other._live is not None:
            self.set(other._live)


def _checked_tools(tools: Mapping[str, Tool] | None) -> dict[str, Tool]:
    if not tools:
        return {}
    from ringfence.core.tools import check_tools

    return check_tools(tools)
