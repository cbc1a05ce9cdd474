"""Inspect's sandbox provider "ringfence": each sample of an evaluation gets a sandbox of its own.

Inspect finds this module by the entry point group `inspect_ai`; a task says `sandbox="ringfence"`. A command is never
run twice: `timeout_retry` is ignored.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    sandboxenv,
)
from inspect_ai.util import SandboxUnavailableError as Unavailable
from inspect_ai.util import SandboxUserUnsupportedError as UserUnsupported
from pydantic import BaseModel, ConfigDict

from ringfence._async.sandbox import AsyncSandbox
from ringfence.errors import PolicyError, SandboxError
from ringfence.policy.checks import format_size
from ringfence.policy.model import Limits, Policy
from ringfence.values import replace

if TYPE_CHECKING:
    from inspect_ai.util import SandboxEnvironmentConfigType

    from ringfence.results import Result
    from ringfence.values import BackendName

_DAY_S = 24 * 3600.0
_USERS = (None, "user", "1000")  # the one user inside, by name and by number
_TOO_LARGE = ("argv-too-long", "argv-nul")


class RingfenceConfig(BaseModel):
    """The options of a task for its sandboxes. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str | None = None  # a TOML file; None is the preset `dev` for a day, no network, no host files
    limits: dict[str, int | float | str] = {}  # changes to the policy's limits: {"memory": "8G"}
    backend: str = "auto"
    image: str = "host"

    def __hash__(self) -> int:
        """Return a hash of the content: Inspect prepares each distinct config once, and keeps configs in a set."""
        return hash(self.model_dump_json())

    def resolved(self) -> Policy:
        """Return the policy of the sandboxes. Raise PolicyError."""
        policy = Policy.load(self.policy) if self.policy is not None else _default_policy()
        return policy.replace(limits=_changed(policy.limits, self.limits)) if self.limits else policy


def _default_policy() -> Policy:
    """Return the preset `dev` for a day: a sample may wait for the model for hours, and ends the sandbox when done."""
    policy = Policy.preset("dev")
    return policy.replace(limits=replace(policy.limits, lifetime_s=_DAY_S, idle_s=_DAY_S))


def _changed(limits: Limits, changes: dict[str, int | float | str]) -> Limits:
    known = Limits.__fields__
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise PolicyError(f"no limit is named {unknown[0]!r}", key="limits", fix=f"one of: {', '.join(known)}")
    return replace(limits, **changes)


def _config(given: SandboxEnvironmentConfigType | None) -> RingfenceConfig:
    match given:
        case None:
            return RingfenceConfig()
        case str():
            return RingfenceConfig(policy=given)
        case RingfenceConfig():
            return given
        case _:
            raise PolicyError(
                f"the config of a ringfence sandbox is a policy file or a RingfenceConfig, not {type(given).__name__}",
                key="sandbox",
                fix='sandbox=("ringfence", "policy.toml")',
            )


@sandboxenv(name="ringfence")
class RingfenceSandboxEnvironment(SandboxEnvironment):
    """The sandbox of one sample. Belongs to the sample's event loop, in which `sample_init` was called."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        super().__init__()
        self.sandbox = sandbox

    # Inspect's life cycle

    @classmethod
    def default_concurrency(cls) -> int | None:
        return 2 * (os.cpu_count() or 1)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return RingfenceConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:  # noqa: ARG003  # Inspect's signature
        """Fail a task before the first sample when this host cannot keep the policy."""
        _sandbox(_config(config)).plan()

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],  # noqa: ARG003  # Inspect's signature
    ) -> dict[str, SandboxEnvironment]:
        sandbox = _sandbox(_config(config), task=task_name)
        return {"default": cls(await sandbox.start())}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,  # noqa: ARG003  # Inspect's signature
        config: SandboxEnvironmentConfigType | None,  # noqa: ARG003  # Inspect's own signature
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,  # noqa: ARG003  # Inspect's own signature
    ) -> None:
        for environment in environments.values():
            await environment.as_type(RingfenceSandboxEnvironment).sandbox.close()

    # commands

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002  # Inspect's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109  # Inspect's signature
        timeout_retry: bool = True,  # noqa: ARG002  # what has run may have had effects: it is not run again
        concurrency: bool = True,  # noqa: ARG002  # the sandbox's own limits hold
    ) -> ExecResult[str]:
        """Run a command. When a limit of the policy ended it, the last line of the result's stderr has the reason."""
        if user not in _USERS:
            raise UserUnsupported(f"no user named {user!r} in a ringfence sandbox; the only one is 'user'")
        limits = self.sandbox.policy.limits
        seconds = limits.timeout_s if timeout is None else min(float(timeout), limits.timeout_s)
        try:
            result = await self.sandbox.exec(cmd, stdin=input, cwd=cwd, env=env, timeout_s=seconds)
        except PolicyError as error:
            if error.code not in _TOO_LARGE:
                raise
            return ExecResult(success=False, returncode=126, stdout="", stderr=f"{error}\n")
        except SandboxError as error:
            raise Unavailable(f"{error}; {error.fix}") from error
        return _exec_result(result, cmd, limits)

    # files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        try:
            await self._refuse_read_only(file)
            await self.sandbox.files.write(file, contents)
        except SandboxError as error:
            raise Unavailable(f"{error}; {error.fix}") from error

    async def _refuse_read_only(self, file: str) -> None:
        """Raise PermissionError for a read-only file.

        files.write() replaces a file, which its directory permits; Inspect's method means to open the file for writing.
        """
        try:
            info = await self.sandbox.files.stat(file)
        except (FileNotFoundError, NotADirectoryError):
            return
        if info.kind == "file" and not info.mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            info = await self.sandbox.files.stat(file)
            # The size is the guest's word, and may change: what is read is bounded by itself.
            data = b"" if info.size > limit else await self.sandbox.files.read(file, size=limit + 1)
        except SandboxError as error:
            raise Unavailable(f"{error}; {error.fix}") from error
        if info.size > limit or len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, truncated_output=None)
        return data.decode("utf-8") if text else data


def _sandbox(config: RingfenceConfig, *, task: str | None = None) -> AsyncSandbox:
    """Return a sandbox that is not started. Raise PolicyError or UnsupportedError."""
    backend: BackendName = config.backend  # type: ignore[assignment]  # an unknown name is refused by its list
    labels = {} if task is None else {"inspect-task": task}
    return AsyncSandbox(backend=backend, image=config.image, policy=config.resolved(), labels=labels)


def _exec_result(result: Result, cmd: list[str], limits: Limits) -> ExecResult[str]:
    match result.status, result.reason:
        case "timeout", _:
            raise TimeoutError(f"{cmd[0]} was killed after {result.duration_s:.0f} s")
        case "error", "not-executable":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cmd[0])
        case "lost" | "killed", _:
            raise Unavailable(f"the sandbox ended while {cmd[0]} ran ({result.reason})")
        case _:
            pass
    _check_output(result, limits)
    code = 128 + (result.signal or 9) if result.exit_code is None else result.exit_code
    return ExecResult(
        success=code == 0, returncode=code, stdout=result.stdout, stderr=result.stderr + _note(result, cmd)
    )


def _check_output(result: Result, limits: Limits) -> None:
    """Raise OutputLimitExceededError past Inspect's limit or the policy's, whichever is less."""
    most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    if result.truncated and limits.output < most:
        raise OutputLimitExceededError(format_size(limits.output), truncated_output=result.stdout)
    if result.truncated or max(len(result.stdout_bytes), len(result.stderr_bytes)) > most:
        kept = result.stdout_bytes[-most:].decode("utf-8", "replace")
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, truncated_output=kept)


def _note(result: Result, cmd: list[str]) -> str:
    """Return what a shell would have printed about the end of a command."""
    match result.reason:
        case "not-found":
            return f"{cmd[0]}: not found in the sandbox\n"
        case "memory":
            return "[killed: out of memory (limits.memory)]\n"
        case "cpu-time":
            return "[killed: out of CPU time (limits.cpu_time_s)]\n"
        case _:
            return ""
