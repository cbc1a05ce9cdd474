# Generated from ringfence/_async by scripts/unasync: do not edit.
"""Runs a piece of code once in a sandbox that is there: as a file, compiled first where its language asks for that."""

from __future__ import annotations

from ringfence import calls
from ringfence._sync.process import completed
from ringfence.languages import commands, find
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence._sync.sandbox import Sandbox
    from ringfence.results import Result


def run_once(sandbox: Sandbox, once: calls.Once) -> Result:
    """How it ended; with the reason "compile" when nothing ran. The time is for both together."""
    if once.language == "javascript":
        return completed(sandbox._running_place(), _javascript_call(sandbox, once))
    folder = f"/tmp/{calls.new_id('run')}"  # inside, a file system of this sandbox alone
    what = commands(find(once.language), once.code, folder)
    sandbox.files.mkdir(folder)
    try:
        sandbox.files.write(what.path, once.code)
        left, compiled = once.timeout_s, None
        if what.compile:
            compiled = compile_once(sandbox, what.compile, what.env, left)
            left -= compiled.duration_s
            if not compiled.ok or left <= 0:
                return compiled
        variables = {**what.env, **once.env}
        result = completed(sandbox._running_place(), _exec(sandbox, what.run, variables, left, stdin=once.stdin))
    finally:
        if sandbox.state == "running":
            sandbox.files.remove(folder, recursive=True, missing_ok=True)
    if compiled is None:
        return result
    return replace(result, started_at=compiled.started_at, duration_s=result.duration_s + compiled.duration_s)


def compile_once(sandbox: Sandbox, argv: tuple[str, ...], env: Mapping[str, str], timeout_s: float) -> Result:
    """Under the policy's limits, as everything inside. A compiler that refuses is the reason "compile"."""
    result = completed(sandbox._running_place(), _exec(sandbox, argv, env, timeout_s))
    return replace(result, reason="compile") if result.reason == "exit" else result


def _exec(
    sandbox: Sandbox,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    timeout_s: float,
    *,
    stdin: bytes | None = None,
) -> calls.Call:
    box = sandbox._running_place().box
    return calls.exec_call(
        box, sandbox.policy, list(argv), cwd="/workspace", env=dict(env), timeout_s=timeout_s, stdin=stdin
    )


def _javascript_call(sandbox: Sandbox, once: calls.Once) -> calls.Call:
    """By the same kernel as a session's cells, which then lets node end: value, imports and are the same."""
    box = sandbox._running_place().box
    env = {**box.env, **once.env}
    job = {"kind": "javascript", "code": once.code, "env": env, "cwd": "/workspace", "tools": []}
    return calls.Call(job, ("node",), once.timeout_s, sandbox.policy.limits.cpu_time_s, stdin=once.stdin)
