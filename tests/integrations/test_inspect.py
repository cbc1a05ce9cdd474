"""Inspect's own conformance suite for sandbox providers, check by check, and a task with a model that calls tools."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, bash, bash_session, python
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

import weaker
from backends_declared import DECLARED, missing
from ringfence import Limits, Policy, PolicyError
from ringfence.backends import Container
from ringfence.integrations.inspect import RingfenceConfig, RingfenceSandboxEnvironment

# Inspect's own use of its dependencies.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*MemoryObjectReceiveStream.*"),
]
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
PROCESS = RingfenceConfig(backend="process")
NOT_APPLICABLE = {"test_exec_as_user": "makes a user, which needs root inside; no guest is root"}
CHECKS = sorted(set(self_check.__all__) - NOT_APPLICABLE.keys())


def inside(
    work: Callable[[RingfenceSandboxEnvironment], Awaitable[T]], config: RingfenceConfig | str | None = PROCESS
) -> T:
    """Run `work` with an environment that is made and cleaned up as Inspect does, in a single event loop."""

    async def whole() -> T:
        provider = RingfenceSandboxEnvironment
        await provider.task_init("task", config)
        environments = await provider.sample_init("task", config, {})
        try:
            return await work(environments["default"].as_type(provider))
        finally:
            await provider.sample_cleanup("task", config, environments, interrupted=False)
            assert environments["default"].as_type(provider).sandbox.state == "closed"

    return asyncio.run(whole())


@pytest.mark.parametrize("name", CHECKS)
def test_inspects_own_check_holds(name: str) -> None:
    inside(getattr(self_check, name))


def test_every_check_runs_but_those_declared_not_applicable() -> None:
    assert sorted([*CHECKS, *NOT_APPLICABLE]) == sorted(self_check.__all__)
    assert list(NOT_APPLICABLE) == ["test_exec_as_user"]


@pytest.mark.parametrize("name", NOT_APPLICABLE)
def test_what_is_not_applicable_is_refused_for_its_reason(name: str) -> None:
    with pytest.raises(SandboxUserUnsupportedError, match="'root'"):
        inside(getattr(self_check, name))


@pytest.fixture(scope="module", params=["container", "podman", "gvisor"])
def walled(request: pytest.FixtureRequest) -> Iterator[RingfenceConfig]:
    """Return a config that names an engine's backend; the engine is found as the engine's own tools do."""
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    backend = DECLARED[request.param].backend()
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(backend, Container):
            patch.setenv("DOCKER_HOST", f"unix://{backend.socket}")
        config = RingfenceConfig(backend=backend.name)
        inside(_policy_of, config)  # what a first use makes is there before a test counts what is left
        yield config


def test_every_check_of_inspects_holds_on_every_engine(walled: RingfenceConfig) -> None:
    """Every check runs in its own sandbox; a few run at once, because the slow checks only wait."""
    failed: dict[str, BaseException] = {}

    async def one(name: str, room: asyncio.Semaphore) -> None:
        provider = RingfenceSandboxEnvironment
        async with room:
            environments = await provider.sample_init("task", walled, {})
            try:
                await getattr(self_check, name)(environments["default"])
            except BaseException as error:  # a failed check, reported with the other failures
                failed[name] = error
            finally:
                await provider.sample_cleanup("task", walled, environments, interrupted=False)

    async def all_of_them() -> None:
        room = asyncio.Semaphore(4)
        await asyncio.gather(*(one(name, room) for name in self_check.__all__))

    asyncio.run(all_of_them())
    assert {name: type(error).__name__ for name, error in failed.items()} == {
        "test_exec_as_user": SandboxUserUnsupportedError.__name__
    }, failed


def test_the_package_registers_the_provider_under_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["inspect_ai"] == {"ringfence": RingfenceSandboxEnvironment.__module__}
    assert registry_find_sandboxenv("ringfence") is RingfenceSandboxEnvironment


# ── what its suite leaves open ───────────────────────────────────────────────────────────────────


def test_a_program_that_is_not_there_is_a_result_that_says_so() -> None:
    result = inside(lambda env: env.exec(["no-such-program"]))
    assert (result.success, result.returncode, result.stderr) == (
        False,
        127,
        "no-such-program: not found in the sandbox\n",
    )


@weaker.needs_cgroup
def test_a_command_killed_for_its_memory_is_a_result_that_says_so() -> None:
    config = RingfenceConfig(limits={"memory": "64M", "disk": "1M"})
    result = inside(lambda env: env.exec(["python3", "-c", "x = b'x' * (1 << 30)"]), config)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (137, "[killed: out of memory (limits.memory)]")


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_output_past_inspects_limit_raises_inspects_error(stream: str) -> None:
    async def work(env: RingfenceSandboxEnvironment) -> None:
        with override_max_exec_output_size(1024):
            assert (await env.exec(["sh", "-c", f"head -c 1024 /dev/zero{stream}"])).success
            with pytest.raises(OutputLimitExceededError, match="limit of 1 KiB was exceeded"):
                await env.exec(["sh", "-c", f"head -c 1025 /dev/zero{stream}"])

    inside(work)


def test_output_past_the_policys_limit_raises_inspects_error() -> None:
    config = RingfenceConfig(limits={"output": "2K"})
    with pytest.raises(OutputLimitExceededError, match="limit of 2K was exceeded"):
        inside(lambda env: env.exec(["head", "-c", "4096", "/dev/zero"]), config)


def test_text_that_is_not_utf8_raises_and_line_ends_stay() -> None:
    async def work(env: RingfenceSandboxEnvironment) -> str:
        await env.write_file("bad", b"\xc3\x28")
        with pytest.raises(UnicodeDecodeError):
            await env.read_file("bad")
        await env.write_file("lines", "a\r\nb\n")
        return await env.read_file("lines")

    assert inside(work) == "a\r\nb\n"


def test_a_background_process_goes_on_after_its_command() -> None:
    async def work(env: RingfenceSandboxEnvironment) -> str:
        await env.exec(["sh", "-c", "(sleep 0.3; echo late > late.txt) >/dev/null 2>&1 &"])
        await env.exec(["sh", "-c", "until [ -s late.txt ]; do sleep 0.05; done"], timeout=10)
        return await env.read_file("late.txt")

    assert inside(work) == "late\n"


def test_a_timeout_longer_than_the_policys_is_the_policys() -> None:
    config = RingfenceConfig(limits={"timeout_s": 1})
    with pytest.raises(TimeoutError, match="sleep was killed after 1 s"):
        inside(lambda env: env.exec(["sleep", "30"], timeout=100), config)


def test_a_sandbox_that_has_ended_is_unavailable_not_a_failed_command() -> None:
    async def work(env: RingfenceSandboxEnvironment) -> None:
        await env.sandbox.close()
        for call in (env.exec(["true"]), env.read_file("x"), env.write_file("x", "")):
            with pytest.raises(SandboxUnavailableError, match="was closed"):
                await call

    inside(work)


def test_a_command_line_too_long_for_the_kernel_is_a_failed_command() -> None:
    result = inside(lambda env: env.exec(["echo", "x" * (2 << 20)]))
    assert (result.returncode, result.stderr) == (126, "argv is longer than 1.5 MiB\n")


def test_each_sample_has_a_sandbox_of_its_own() -> None:
    async def work(env: RingfenceSandboxEnvironment) -> None:
        await env.write_file("mine", "1")
        other = await RingfenceSandboxEnvironment.sample_init("task", PROCESS, {})
        try:
            with pytest.raises(FileNotFoundError):
                await other["default"].read_file("mine")
        finally:
            await RingfenceSandboxEnvironment.sample_cleanup("task", PROCESS, other, interrupted=False)

    inside(work)


# ── configuration ────────────────────────────────────────────────────────────────────────────────


def test_a_config_is_a_policy_file_or_an_object(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('version = 1\n[limits]\nmemory = "300M"\n')
    assert inside(_policy_of, str(path)) == Policy(limits=Limits(memory="300M"))
    changed = RingfenceConfig(policy=str(path), limits={"cpus": 2})
    assert inside(_policy_of, changed) == Policy(limits=Limits(memory="300M", cpus=2))
    assert RingfenceSandboxEnvironment.config_deserialize(changed.model_dump()) == changed


async def _policy_of(env: RingfenceSandboxEnvironment) -> Policy:
    return env.sandbox.policy


def test_without_a_config_there_is_room_to_work_and_no_network() -> None:
    policy = inside(_policy_of, None)
    assert (policy.limits.timeout_s, policy.limits.lifetime_s, policy.network.allow) == (3600, 86400, ())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RingfenceConfig(limits={"memroy": 1}), "no limit is named 'memroy'"),
        (RingfenceConfig(backend="docker"), "unknown backend 'docker'"),
        ("/no/such/policy.toml", "cannot read policy"),
    ],
)
def test_a_wrong_config_fails_the_task_before_its_first_sample(config: RingfenceConfig | str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        asyncio.run(RingfenceSandboxEnvironment.task_init("task", config))


def test_an_unknown_key_of_a_config_is_refused() -> None:
    with pytest.raises(ValueError, match="extra_forbidden"):
        RingfenceSandboxEnvironment.config_deserialize({"memory": "1G"})


# ── a whole task ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def inspect_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run a first task: Inspect then opens a trace log and keeps it open, which must not count as left behind."""
    model = get_model("mockllm/model", custom_outputs=[])
    asyncio.run(eval_async(Task(solver=[]), model=model, log_dir=str(tmp_path_factory.mktemp("first"))))


def evaluate(calls: list[tuple[str, dict[str, Any]]], tools: list[Tool], folder: Path, **sample: Any) -> EvalLog:
    outputs = [ModelOutput.for_tool_call("mockllm", name, arguments) for name, arguments in calls]
    outputs.append(ModelOutput.from_content("mockllm", "done"))
    for output in outputs:
        output.usage = ModelUsage(input_tokens=1, output_tokens=1)  # else it is counted with a table from the network
    model = get_model("mockllm/model", custom_outputs=outputs)
    task = Task(
        dataset=[Sample(input="go", target="done", **sample)],
        solver=[use_tools(tools), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("ringfence", PROCESS),
    )
    (log,) = asyncio.run(eval_async(task, model=model, log_dir=str(folder)))
    return log


def answers(log: EvalLog) -> list[str]:
    assert log.status == "success", log.error
    assert log.samples is not None
    messages = [m for m in log.samples[0].messages if m.role == "tool"]
    return [m.text if m.error is None else m.error.message for m in messages]


@pytest.mark.usefixtures("inspect_runs")
def test_a_models_tool_calls_run_in_the_sandbox_of_its_sample(tmp_path: Path) -> None:
    calls = [
        ("bash", {"command": "cat given.txt; whoami; echo kept > kept.txt"}),
        ("python", {"code": "print(open('kept.txt').read(), 6 * 7)"}),
        ("bash", {"command": "cat /etc/shadow || curl -sS -m 2 http://192.0.2.1 || exit 3"}),
    ]
    log = evaluate(calls, [bash(timeout=20), python(timeout=20)], tmp_path, files={"given.txt": "from the sample\n"})
    first, second, third = answers(log)
    assert first == "from the sample\nuser\n"
    assert second == "kept\n 42\n"
    assert "No such file" in third
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1


@pytest.mark.usefixtures("inspect_runs")
def test_tools_that_inspect_installs_in_the_sandbox_work_there(tmp_path: Path) -> None:
    calls = [
        ("bash_session", {"action": "type_submit", "input": "cd /tmp; x=7"}),
        ("bash_session", {"action": "type_submit", "input": "echo $PWD $((x * 6))"}),
    ]
    _, second = answers(evaluate(calls, [bash_session(wait_for_output=5)], tmp_path))
    assert "/tmp 42" in second
