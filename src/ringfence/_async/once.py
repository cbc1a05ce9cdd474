"""One call, one fresh sandbox, nothing left."""

from __future__ import annotations

from ringfence import calls
from ringfence._async.link import AsyncLink
from ringfence._async.process import AsyncProcess, Place
from ringfence._async.sandbox import DESTROY_S, AsyncSandbox
from ringfence._async.waiting import blocking, launched
from ringfence.launching import check_policy, prepare
from ringfence.policy.model import Policy
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.backends import Backend
    from ringfence.policy.image import Image
    from ringfence.results import Denial, Result
    from ringfence.values import BackendName


async def run_async(
    code: str,
    *,
    language: str = "python",
    stdin: bytes | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    backend: BackendName | Backend = "auto",
    image: str | Image = "host",
    policy: Policy = Policy(),  # noqa: B008  # frozen
) -> Result:
    """A fresh sandbox, one run, nothing left. Same semantics as Sandbox.run, and the process ends, so exit_code is set.

    Safe from threads and from inside a running event loop (it blocks; there, prefer run_async).
    """
    check_policy(policy)
    checked, language, given = calls.check_code(code), calls.check_language(language), calls.check_stdin(stdin)
    variables, seconds = calls.check_env(env), calls.check_timeout(timeout_s, policy.limits)
    if language != "python":
        from ringfence._async.program import Once, run_once

        async with AsyncSandbox(backend=backend, image=image, policy=policy) as sandbox:
            result = await run_once(sandbox, Once(language, checked, given, variables, seconds))
        return _with(findings(await sandbox.denials()), result)
    launcher = prepare(backend, image, policy)
    box = await launched(launcher)
    link = AsyncLink(box)
    try:
        place = Place(box, link, policy, launcher.image.name)
        if box.outlet is not None:
            from ringfence._async.equipping import equip

            await equip(place)
        call = calls.python_call(box, policy, checked, stdin=given, env=variables, timeout_s=seconds, one_shot=True)
        process = await AsyncProcess(place, call, link.open(), keep_events=False)._begin()
        if call.stdin:
            await process._feed_stdin(call.stdin)
        result = await process.wait()
    finally:
        link.finish("closed")
        box.close()
    if any(mount.mode == "rw" for mount in policy.mounts):
        await blocking(box.wait_destroyed, DESTROY_S)
    return _with(box.findings(), result)


def findings(denials: tuple[Denial, ...]) -> tuple[Denial, ...]:
    """Of a sandbox's denials those that no result has: what was seen after the end."""
    return tuple(denial for denial in denials if denial.kind not in ("network", "secret"))


def _with(seen: tuple[Denial, ...], result: Result) -> Result:
    """What a look at the writable mounts showed after the end is part of what happened."""
    return replace(result, denials=(*result.denials, *seen)) if seen else result
