"""Run code in a fresh sandbox that is gone afterwards.

Arguments are checked before the rest of the modules is loaded.
"""

from __future__ import annotations

from ringfence._async.compat import blocking, launched
from ringfence._async.process import completed
from ringfence.core import arguments
from ringfence.errors import SandboxLostError, need_linux
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from ringfence._async.process import Place
    from ringfence._async.sandbox import AsyncSandbox
    from ringfence.backends.auto import Launcher
    from ringfence.backends.contract import Backend
    from ringfence.policy.image import Image
    from ringfence.policy.model import Mount, Policy
    from ringfence.results import Denial, Result
    from ringfence.values import BackendName, Size, Strings


async def run_async(
    code: str,
    *,
    language: str = "python",
    stdin: bytes | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    memory: Size | None = None,
    cpus: float | None = None,
    disk: Size | None = None,
    allow_net: Strings | Literal["public"] | None = None,
    mounts: list[Mount] | tuple[Mount, ...] | None = None,
    backend: BackendName | Backend = "auto",
    image: str | Image = "host",
    policy: Policy | None = None,
) -> Result:
    """Run `code` once in a fresh sandbox and leave nothing behind.

    The code runs as in Sandbox.run, and its process ends, so exit_code is set. Without a policy the code runs
    under `Policy()`, closed, in which `timeout_s`, `memory` and the other short forms set single parts. With a policy,
    `timeout_s` only narrows and the other short forms are a PolicyError; `env` holds variables of this run.

    Safe from threads and from inside a running event loop (it blocks; there, prefer run_async).
    """
    chosen = arguments.policy_of(policy, memory=memory, cpus=cpus, disk=disk, allow_net=allow_net, mounts=mounts)
    if policy is None and timeout_s is not None:
        chosen = arguments.with_room_for(chosen, timeout_s)
    checked, language, given = (
        arguments.check_code(code),
        arguments.check_language(language),
        arguments.check_stdin(stdin),
    )
    variables = arguments.check_env(env)
    seconds = arguments.check_timeout(timeout_s, chosen.limits, beside_policy=policy is not None)
    asked = arguments.Once(language, checked, given, variables, seconds)
    need_linux()
    if backend not in ("auto", "process"):
        return await run_alone(asked, backend, image, chosen)
    from ringfence.host import zygote_start  # for the process backend alone

    is_first = zygote_start.begin_first(backend, image, chosen)
    try:
        if is_first:
            _load_rest()  # while the zygote starts
        return await run_alone(asked, backend, image, chosen)
    finally:
        zygote_start.end_unneeded()


def _load_rest() -> None:
    """Load the modules that are needed once something runs."""
    import ringfence._async.link  # noqa: F401  # used later
    from ringfence.backends import registry

    registry.load_class("process")


# ── a sandbox for one run ────────────────────────────────────────────────────────────────────────


_ATTEMPTS = 3


async def run_alone(once: arguments.Once, backend: BackendName | Backend, image: str | Image, policy: Policy) -> Result:
    """Return the result of code that runs in a sandbox of its own, with what was found after the end."""
    if once.language != "python":
        from ringfence._async.sandbox import AsyncSandbox

        async with AsyncSandbox(backend=backend, image=image, policy=policy) as sandbox:
            result = await run_once(sandbox, once)
        return _with(findings(await sandbox.denials()), result)
    from ringfence.backends.auto import prepare

    for attempt in range(_ATTEMPTS):
        try:
            return await _run_in_new(once, prepare(backend, image, policy), policy)
        except SandboxLostError as error:
            from ringfence.core.endings import HELPER_LOST

            if error.code != HELPER_LOST or attempt == _ATTEMPTS - 1:
                raise  # with HELPER_LOST none of the code has run, so another sandbox can run it
    raise AssertionError("unreachable")


async def _run_in_new(once: arguments.Once, launcher: Launcher, policy: Policy) -> Result:
    link: AsyncLink | None = None
    box = await launched(launcher)
    try:
        from ringfence._async.link import AsyncLink
        from ringfence._async.process import AsyncProcess, Place

        link = AsyncLink(box)
        place = Place(box, link, policy, launcher.image.name)
        if box.outlet is not None:
            await equip(place)
        call = arguments.python_call(
            box, policy, once.code, stdin=once.stdin, env=once.env, timeout_s=once.timeout_s, one_shot=True
        )
        process = await AsyncProcess(place, call, link.open(), keep_events=False)._begin()
        if call.stdin:
            await process._feed_stdin(call.stdin)
        result = await process.wait()
    finally:
        if link is not None:
            link.finish("closed")
        box.close()
    if any(mount.mode == "rw" for mount in policy.mounts):
        await blocking(box.wait_destroyed, arguments.DESTROY_S)
    return _with(box.findings(), result)


def let_go(sandbox: AsyncSandbox) -> None:
    """Kill everything inside for a command that is about to end.

    The zygote outlives the command and cleans up the rest.
    """
    sandbox._ended = "closed"
    if sandbox._box is not None:
        sandbox._box.kill()
        if sandbox._box.outlet is not None:  # so that its log is whole
            sandbox._box.outlet.close()
            sandbox._box.outlet.wait_ended(1.0)


def findings(denials: tuple[Denial, ...]) -> tuple[Denial, ...]:
    """Return the denials of a sandbox that are in no result: what was found after the end."""
    return tuple(denial for denial in denials if denial.kind not in ("network", "secret"))


def _with(seen: tuple[Denial, ...], result: Result) -> Result:
    """Return the result with the denials from the look at the writable mounts after the end."""
    new = [denial for denial in seen if denial not in result.denials]
    return replace(result, denials=(*result.denials, *new)) if new else result


# ── code that runs once, as a file, in a running sandbox; compiled first where its language needs it ──


async def run_once(sandbox: AsyncSandbox, once: arguments.Once) -> Result:
    """Return the result of code; its reason is "compile" when nothing ran.

    The time limit is for compiling and running.
    """
    if once.language == "javascript":
        return await completed(sandbox._running_place(), _javascript_call(sandbox, once))
    from ringfence.core.languages import commands, find

    folder = f"/tmp/{arguments.new_id('run')}"  # inside, a file system of this sandbox alone
    what = commands(find(once.language), once.code, folder)
    await sandbox.files.mkdir(folder)
    try:
        await sandbox.files.write(what.path, once.code)
        left = once.timeout_s
        compiled: Result | None = None
        if what.compile:
            compiled = await compile_once(sandbox, what.compile, what.env, left)
            left -= compiled.duration_s
            if not compiled.ok or left <= 0:
                return compiled
        variables = {**what.env, **once.env}
        result = await completed(sandbox._running_place(), _exec(sandbox, what.run, variables, left, stdin=once.stdin))
    finally:
        if sandbox.state == "running":
            await sandbox.files.remove(folder, recursive=True, missing_ok=True)
    if compiled is None:
        return result
    return replace(result, started_at=compiled.started_at, duration_s=result.duration_s + compiled.duration_s)


async def compile_once(
    sandbox: AsyncSandbox, argv: tuple[str, ...], env: Mapping[str, str], timeout_s: float
) -> Result:
    """Return the result of a compiler, under the policy's limits. A compiler that refuses has the reason "compile"."""
    result = await completed(sandbox._running_place(), _exec(sandbox, argv, env, timeout_s))
    return replace(result, reason="compile") if result.reason == "exit" else result


def _exec(
    sandbox: AsyncSandbox,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    timeout_s: float,
    *,
    stdin: bytes | None = None,
) -> arguments.Call:
    box = sandbox._running_place().box
    return arguments.exec_call(
        box, sandbox.policy, list(argv), cwd="/workspace", env=dict(env), timeout_s=timeout_s, stdin=stdin
    )


def _javascript_call(sandbox: AsyncSandbox, once: arguments.Once) -> arguments.Call:
    """Return a call that runs code in the kernel of a session's cells, after which node ends.

    Value, imports and await therefore work as in a session.
    """
    box = sandbox._running_place().box
    env = {**box.env, **once.env}
    job = {"kind": "javascript", "code": once.code, "env": env, "cwd": "/workspace", "tools": []}
    return arguments.Call(job, ("node",), once.timeout_s, sandbox.policy.limits.cpu_time_s, stdin=once.stdin)


# ── what the gateway needs in a new sandbox, written before any guest code runs ──────────────────


async def equip(place: Place) -> None:
    """Write the trusted roots into a sandbox whose TLS the gateway reads. Do nothing for other sandboxes."""
    outlet = place.box.outlet
    if outlet is None or not outlet.files:
        return
    from ringfence._async.files import AsyncFiles

    inside = AsyncFiles(lambda: place)
    for path, data in outlet.files.items():
        await inside.write(path, data, mode=0o444)
