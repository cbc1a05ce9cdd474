"""The meaning of a call, without I/O: check arguments, make jobs for guestd, turn the end of a job into a Result."""

from __future__ import annotations

import os
import time

from ringfence.errors import PolicyError
from ringfence.policy.model import LIMIT_CHECKS, NETWORK_CHECKS, Limits, Network, Policy
from ringfence.results import Denial, GuestException, Result
from ringfence.text import encodable
from ringfence.values import Struct, final, replace
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from ringfence.backends.contract import Box
    from ringfence.core.transcript import Transcript
    from ringfence.policy.model import Mount
    from ringfence.results import Usage
    from ringfence.values import GuestPath, Reason, Size, Status, Strings

MAX_CODE = 16 << 20
MAX_ARGUMENTS = 3 << 19  # the kernel takes 2 MiB, with the variables
UNENDING_S = 10.0**9
DESTROY_S = 10.0  # how long `close` waits until nothing of the sandbox is left
GRACE_S = 0.7  # how long after a deadline the host waits for guestd before it kills by itself


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


def check_code(code: object) -> str:
    if not isinstance(code, str):
        kind = type(code).__name__
        raise TypeError(f"code is a str, not {kind}" + ("; decode it first" if kind == "bytes" else ""))
    if not code.strip():
        raise PolicyError("there is no code to run", code="code-empty", fix="pass the text of a program")
    if len(code) > MAX_CODE:
        raise PolicyError(
            f"the code has {len(code):,} characters; the most is {MAX_CODE:,}",
            code="code-too-long",
            fix="write it to a file inside with files.write() and exec an interpreter on it",
        )
    if "\0" in code:
        raise PolicyError("the code holds a NUL character", code="code-binary", fix="pass source text, not a binary")
    _check_text(code, "the code")
    return code


def _check_text(text: str, what: str, errors: str = "strict") -> None:
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise PolicyError(
            f"{what} holds a lone surrogate at character {error.start}",
            code="not-unicode",
            fix='decode bytes with errors="replace"',
        ) from None


def check_language(language: object) -> str:
    if language == "python":
        return "python"
    from ringfence.core.languages import find

    return find(language).name


def check_argv(argv: object) -> list[str]:
    if isinstance(argv, str):
        raise TypeError('argv is a list, such as ["ls", "-l"]; for shell text use run(…, language="bash")')
    if not isinstance(argv, list | tuple) or not all(isinstance(part, str) for part in argv):
        raise TypeError("argv is a list or tuple of str")
    if not argv or not argv[0]:
        raise PolicyError("argv is empty: there is no program to run", code="argv-empty", fix='for example ["ls"]')
    for part in argv:
        if "\0" in part:
            raise PolicyError(f"argv holds a NUL character in {part!r}", code="argv-nul", fix="remove it")
    if sum(len(part) + 9 for part in argv) > MAX_ARGUMENTS:
        raise PolicyError("argv is longer than 1.5 MiB", code="argv-too-long", fix="pass long input by stdin or a file")
    for part in argv:
        _check_text(part, "argv", "surrogateescape")  # may be the name of a file that is not UTF-8
    return list(argv)


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    if env is None or env == {}:
        return {}
    return dict(Policy(env=env).env)


def check_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is None or labels == {}:
        return {}
    from ringfence.policy.checks import environment

    return dict(environment(labels, "labels"))


def check_cwd(cwd: GuestPath | None) -> str:
    return "/workspace" if cwd is None else guest_path(cwd)


def guest_path(path: object) -> str:
    """Return an absolute path; a relative one starts at /workspace.

    The guest's kernel resolves `..`, beneath its root.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"a path inside is a str or PurePosixPath, not {type(path).__name__}")
    if not text:
        raise PolicyError("the path is empty", code="path-empty", fix='"." is the workspace')
    if "\0" in text:
        raise PolicyError(f"the path {text!r} holds a NUL character", code="path-nul", fix="remove it")
    try:
        text.encode("utf-8", "surrogateescape")  # list() returns a name that is not UTF-8 with surrogates
    except UnicodeEncodeError:
        raise PolicyError(
            f"the path {text!r} is no text", code="path-text", fix="use a name that list() returned"
        ) from None
    if len(text) > 4000:
        raise PolicyError("the path is longer than 4000 characters", code="path-too-long", fix="use a shorter one")
    return text if text.startswith("/") else f"/workspace/{text}"


def check_policy(policy: object) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is a Policy, not {type(policy).__name__}; see Policy.load() and Policy.preset()")


def policy_of(
    policy: Policy | None,
    *,
    memory: Size | None = None,
    cpus: float | None = None,
    disk: Size | None = None,
    env: Mapping[str, str] | None = None,
    allow_net: Strings | Literal["public"] | None = None,
    mounts: list[Mount] | tuple[Mount, ...] | None = None,
) -> Policy:
    """Return the caller's policy, or the default policy with the short forms in it.

    A short form beside a policy is refused, with the place in the policy where it belongs: it would widen the policy,
    or it would be unclear which of the two holds.
    """
    limits = {"memory": memory, "cpus": cpus, "disk": disk}
    given = {**limits, "env": env, "allow_net": allow_net, "mounts": mounts}
    short = [name for name, value in given.items() if value is not None]
    if policy is not None:
        check_policy(policy)
        if short:
            raise PolicyError(
                f"{short[0]} and policy were given together; {short[0]} is a short form of a part of the policy",
                key=short[0],
                code="policy-mixed",
                fix=f"write it in the policy: {_IN_A_POLICY[short[0]]}",
            )
        return policy
    if not short:
        return _DEFAULT
    checked = {name: LIMIT_CHECKS[name](value, name) for name, value in limits.items() if value is not None}
    reach = () if allow_net is None else NETWORK_CHECKS["allow"](allow_net, "allow_net")
    return Policy(limits=Limits(**checked), network=Network(allow=reach), mounts=mounts or (), env=env or {})


_DEFAULT = Policy()  # one object, so that it is hashed once
_IN_A_POLICY = {
    "memory": 'Policy(limits=Limits(memory="1G"))',
    "cpus": "Policy(limits=Limits(cpus=2))",
    "disk": 'Policy(limits=Limits(disk="1G"))',
    "env": 'Policy(env={"NAME": "value"})',
    "allow_net": 'Policy(network=Network(allow=["api.example.com"]))',
    "mounts": 'Policy(mounts=[Mount("data")])',
}


def with_room_for(policy: Policy, timeout_s: object) -> Policy:
    """Return the default policy, or one made of short forms, with a time limit of at least `timeout_s`.

    A caller that gives a run five minutes means five minutes: the clocks that the caller did not name do not end the
    run sooner.
    """
    limits = policy.limits
    seconds = LIMIT_CHECKS["timeout_s"](narrower(timeout_s, float("inf"), "timeout_s"), "timeout_s")
    if seconds <= limits.timeout_s:
        return policy
    clocks = {name: max(seconds, getattr(limits, name)) for name in ("timeout_s", "cpu_time_s", "lifetime_s")}
    return policy.replace(limits=replace(limits, **clocks))


def check_timeout(timeout_s: object, limits: Limits, *, beside_policy: bool = False) -> float:
    """Return the seconds for one call: the policy's, or the caller's, which may only be less.

    `beside_policy`: the caller gave both, so that a longer time belongs in the policy alone.
    """
    if timeout_s is None:
        return limits.timeout_s
    return narrower(timeout_s, limits.timeout_s, "timeout_s", has_short_form=not beside_policy)


def check_lifetime(timeout_s: object, limits: Limits) -> float:
    """Return the seconds for a spawned process: the sandbox's lifetime, unless the caller wants less."""
    return limits.lifetime_s if timeout_s is None else narrower(timeout_s, limits.lifetime_s, "timeout_s", "lifetime_s")


def check_patience(timeout_s: object) -> None:
    """Raise PolicyError unless `timeout_s` is a time that a caller can wait. No policy limits that time."""
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
        raise PolicyError(f"timeout_s is {timeout_s!r}; it is a number from 0 on, or None", key="timeout_s")


def narrower(
    value: object, limit: float, name: str, of: str | None = None, *, has_short_form: bool | None = None
) -> float:
    """Return the seconds for a call. An option of a call narrows the policy, never widens the policy.

    `of`: the policy's limit, where its name is another.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise PolicyError(f"{name} is {value!r}; it is a number above 0", key=name, fix="for example 5")
    if value > limit:
        offered = name == "timeout_s" if has_short_form is None else has_short_form
        short = f"Sandbox(timeout_s={value:g}) or " if offered else ""
        raise PolicyError(
            f"{name}={value:g} is more than the policy's limits.{of or name}={limit:g}",
            key=name,
            fix=f"{short}Policy(limits=Limits({of or name}={value:g}))",
        )
    return float(value)


def check_size(cols: object, rows: object) -> dict[str, int]:
    """Return the columns and rows of a terminal, checked."""
    for name, value in (("cols", cols), ("rows", rows)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1000:
            raise PolicyError(f"{name} is {value!r}; it is a number from 1 to 1000", key=name, fix=f"{name}=80")
    assert isinstance(cols, int)
    assert isinstance(rows, int)
    return {"cols": cols, "rows": rows}


def check_stdin(stdin: object) -> bytes | None:
    if stdin is None or isinstance(stdin, bytes):
        return stdin
    if isinstance(stdin, str):
        _check_text(stdin, "stdin")
        return stdin.encode()
    raise TypeError(f"stdin is bytes, str or None, not {type(stdin).__name__}")


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────


@final
class Once(Struct):
    """A piece of code for one run, checked."""

    language: str
    code: str
    stdin: bytes | None
    env: dict[str, str]
    timeout_s: float


@final
class Call(Struct):
    """One thing to run, checked. `job` is the part for guestd."""

    job: Mapping[str, object]
    argv: tuple[str, ...]
    timeout_s: float
    cpu_s: float | None
    stdin: bytes | None = None
    keeps_stdin: bool = False  # stdin stays open for write()
    one_shot: bool = False
    pty: Mapping[str, int] | None = None  # columns and rows of a terminal

    @property
    def execs(self) -> bool:
        """Return whether the call begins with an exec, which can fail before any code of the guest runs."""
        job = self.job
        return job["kind"] in ("exec", "fresh", "javascript") or bool(job.get("fresh")) or self.argv != ("python",)

    def start(self, number: int, credit: int) -> bytes:
        return frames.message(
            op="start",
            id=number,
            one_shot=self.one_shot,
            job=dict(self.job),
            stdin=bool(self.stdin) or self.keeps_stdin,
            pty=None if self.pty is None else dict(self.pty),
            credit=credit,
            timeout_s=self.timeout_s,
            cpu_s=self.cpu_s,
        )


def _check_python(box: Box) -> None:
    if box.python["executable"] is None:
        from ringfence.errors import ImageError

        raise ImageError(
            "the image has no Python of its own, so it cannot run Python code",
            code="image-python",
            fix='exec() its programs, run(…, language="bash"), or use an image with python3',
        )


def python_call(
    box: Box, policy: Policy, code: str, *, stdin: bytes | None, env: dict[str, str], timeout_s: float, one_shot: bool
) -> Call:
    _check_python(box)
    kind = "fresh" if box.python["fresh"] else "python"
    job = {"kind": kind, "code": code, "env": {**box.env, **env}, "cwd": "/workspace", **box.python}
    cpu_s = policy.limits.cpu_time_s
    return Call(job, ("python",), timeout_s, cpu_s, stdin=stdin, one_shot=one_shot)


def exec_call(
    box: Box,
    policy: Policy,
    argv: list[str],
    *,
    cwd: str,
    env: dict[str, str],
    timeout_s: float,
    stdin: bytes | None = None,
    keeps_stdin: bool = False,
    one_shot: bool = False,
) -> Call:
    job = {"kind": "exec", "argv": argv, "env": {**box.env, **env}, "cwd": cwd}
    cpu_s = policy.limits.cpu_time_s
    return Call(job, tuple(argv), timeout_s, cpu_s, stdin=stdin, keeps_stdin=keeps_stdin, one_shot=one_shot)


PROGRAMS = {"python": "python", "javascript": "node", "bash": "bash"}  # the interpreter of each language's sessions


def session_call(box: Box, *, language: str, env: Mapping[str, str], tools: list[str], apart_from: list[int]) -> Call:
    """Return the call for an interpreter that waits for cells.

    `apart_from`: process numbers that it must not have, because it will become a copy of a session that had them.
    """
    if language == "python":
        _check_python(box)
    job = {"kind": "session", "language": language, "env": dict(env), "cwd": "/workspace", "tools": tools, **box.python}
    return Call({**job, "image": apart_from}, (PROGRAMS[language],), UNENDING_S, None)


def connect_call(port: int, policy: Policy) -> Call:
    """Return the call for a connection to a port inside: a process whose standard streams are the two directions."""
    job = {"kind": "connect", "port": port}
    return Call(job, ("connect", str(port)), policy.limits.lifetime_s, None, keeps_stdin=True)


def check_port(port: object) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise PolicyError(f"port is {port!r}; it is a number from 1 to 65535", key="port", fix="expose(8000)")
    return port


def check_signal(signal: object) -> int:
    if isinstance(signal, bool) or not isinstance(signal, int) or not 1 <= signal <= 64:
        raise PolicyError(f"{signal!r} is no signal", key="signal", fix="signal.SIGTERM, for example")
    return int(signal)


def file_call(call: str, args: Mapping[str, object], *, keeps_stdin: bool = False) -> Call:
    """Return the call for a file worker. The waiting caller, which sees progress, keeps its time."""
    job = {"kind": "file", "call": call, "args": dict(args)}
    return Call(job, ("file", call), UNENDING_S, None, keeps_stdin=keeps_stdin)


# ── results ──────────────────────────────────────────────────────────────────────────────────────


def new_id(prefix: str) -> str:
    return f"{prefix}-{os.urandom(8).hex()}"


def early_report_of(call: Call, end: Mapping[str, object]) -> dict[str, object]:
    """Return what our own code reported before it became the guest.

    Nothing is believed about Python code in our own interpreter: that code can use the line from its first statement
    (J02).
    """
    if call.job["kind"] == "exec":
        return report_of(end)
    early = end.get("early")
    return dict(early) if isinstance(early, dict) and call.execs else {}


def report_of(end: Mapping[str, object]) -> dict[str, object]:
    """Return the report that the guest made; {} when there is none or it is not an object within the caps."""
    text = str(end.get("report") or "")
    if not text:
        return {}
    try:
        data = frames.strict_json(text.encode("utf-8", "replace"))
    except frames.WireError:
        return {}
    return data if isinstance(data, dict) else {}


def result(
    call: Call,
    end: Mapping[str, object],
    transcript: Transcript,
    box: Box,
    policy: Policy,
    *,
    image: str,
    number: str,
    state_kept: bool = False,
) -> Result:
    """Return how a call ended.

    `end` is guestd's event, {"ev": "over"} when guestd is gone, or a cell's {"ev": "done"}.
    """
    # The C half of `datetime`: importing the Python half too takes 5 ms.
    from _datetime import datetime, timezone  # type: ignore[import-not-found]  # a C module without a stub

    usage, oom = _used(box, end, transcript)
    status, reason = _verdict(call, end, oom=oom, raised=transcript.exception is not None)
    stopped = box.findings() if box.is_unprotected and status == "lost" else ()
    if stopped:
        status, reason = "killed", "protection-lost"
    produced = transcript.stdout.count + transcript.stderr.count
    code, signal = _number(end.get("code")), _number(end.get("signal"))
    return Result(
        id=number,
        status=status,
        reason=reason,
        exit_code={"not-found": 127, "not-executable": 126}.get(reason, code),
        signal=signal,
        stdout_bytes=transcript.stdout.bytes(),
        stderr_bytes=transcript.stderr.bytes(),
        truncated=transcript.cut,
        outputs=tuple(transcript.outputs),
        exception=_exception(transcript.exception),
        state_kept=state_kept,
        duration_s=time.monotonic() - transcript.started,
        started_at=datetime.fromtimestamp(transcript.started_at, timezone.utc),
        usage=replace(usage, output_bytes=produced),
        denials=(*_denials(call, reason, policy, image), *_refused(box, transcript.mark), *stopped),
        enforcement=box.enforcement,
        backend=box.backend,
        image=image,
        policy_digest=policy.digest,
    )


def _used(box: Box, end: Mapping[str, object], transcript: Transcript) -> tuple[Usage, bool]:
    """Return what the sandbox used since the call began, and whether the memory limit killed a process meanwhile.

    Both are differences from the call's own marks: other calls that end meanwhile, and callers of usage(), change
    nothing.
    """
    usage, ooms = box.usage()
    before, ooms_before = transcript.before
    cpu_s = end.get("cpu_s") if usage.cpu_s is None else usage.cpu_s - (before.cpu_s or 0.0)
    return replace(usage, cpu_s=cpu_s if isinstance(cpu_s, float) else None), ooms > ooms_before


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


_BY_WHY: dict[str, tuple[Status, Reason]] = {
    "timeout": ("timeout", "wall-clock"),
    "cpu": ("limit", "cpu-time"),
    "caller": ("killed", "caller"),
    "interrupted": ("killed", "interrupted"),
    "closed": ("killed", "caller"),
    "lifetime": ("limit", "wall-clock"),
    "lost": ("lost", "guest-lost"),
}
_SIGXCPU, _SIGKILL = 24, 9
_NEARLY = 0.8  # the kernel counts ticks for the limit, and nanoseconds for the usage


def _verdict(call: Call, end: Mapping[str, object], *, oom: bool, raised: bool) -> tuple[Status, Reason]:
    why = end.get("why")
    if end["ev"] == "over":
        if oom and why == "lost":
            return "oom", "memory"  # under gVisor the limit ends the guest's whole kernel
        return _BY_WHY.get(str(why), ("lost", "guest-lost"))
    if isinstance(why, str) and why in _BY_WHY:
        return _BY_WHY[why]
    if oom and end.get("signal") == _SIGKILL:
        return "oom", "memory"
    if _met_rlimit(call, end):
        return "limit", "cpu-time"
    if end.get("signal") is not None:
        return "error", "signal"
    if early_report_of(call, end).get("stage") == "exec" and end.get("code") in (126, 127):
        return ("error", "not-found") if end["code"] == 127 else ("error", "not-executable")
    if end.get("code") == 0 or (end["ev"] == "done" and not end["failed"]):
        return "ok", "done"
    return ("error", "exception") if raised else ("error", "exit")


def _met_rlimit(call: Call, end: Mapping[str, object]) -> bool:
    """Return whether RLIMIT_CPU ended the process.

    The kernel sends SIGXCPU, and SIGKILL to a process that ignores it. A guest can send itself both signals, so the CPU
    time that it spent decides. A session has no such limit, and its interpreter may have spent as much in other cells.
    Where a cgroup counts, guestd has reported the reason.
    """
    spent = end.get("cpu_s")
    if call.cpu_s is None or call.job["kind"] == "session" or not isinstance(spent, float):
        return False
    return end.get("signal") in (_SIGXCPU, _SIGKILL) and spent > call.cpu_s * _NEARLY


def _exception(found: Mapping[str, object] | None) -> GuestException | None:
    if found is None:
        return None
    texts = [found.get(name) for name in ("name", "message", "traceback")]
    name, message, traceback = (encodable(text) if isinstance(text, str) else "" for text in texts)
    return GuestException(name, message, traceback)


def _refused(box: Box, mark: int) -> tuple[Denial, ...]:
    """Return what the gateway refused during the call."""
    return () if box.outlet is None else box.outlet.denials(mark)


def _denials(call: Call, reason: Reason, policy: Policy, image: str) -> tuple[Denial, ...]:
    if reason != "not-found" or not call.argv:
        return ()
    name = call.argv[0].rpartition("/")[2]
    if policy.commands == "any" or name in policy.commands:
        return _not_in_image(name, image)
    message = f"{name} is not among the policy's commands"
    return (Denial("command", name, "exec.not-listed", message, allow=f'commands = [..., "{name}"]'),)


def _not_in_image(name: str, image: str) -> tuple[Denial, ...]:
    """Return a denial that says which image has the program, for the tools of known languages."""
    from ringfence.core.languages import image_with

    other = image_with(name)
    if other is None:
        return ()
    message = f"the image {image!r} has no program {name}; one {other} has it"
    return (Denial("command", name, "exec.not-in-image", message, allow=None),)
