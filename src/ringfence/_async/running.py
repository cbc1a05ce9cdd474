"""A sandbox for one run: made, used and gone."""

from __future__ import annotations

from ringfence import calls
from ringfence._async.waiting import blocking, launched
from ringfence.launching import prepare
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence._async.sandbox import AsyncSandbox
    from ringfence.backends import Backend
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy
    from ringfence.results import Denial, Result
    from ringfence.values import BackendName


async def run_alone(once: calls.Once, backend: BackendName | Backend, image: str | Image, policy: Policy) -> Result:
    """How it ended, with what was seen after the end."""
    if once.language != "python":
        from ringfence._async.program import run_once
        from ringfence._async.sandbox import AsyncSandbox

        async with AsyncSandbox(backend=backend, image=image, policy=policy) as sandbox:
            result = await run_once(sandbox, once)
        return _with(findings(await sandbox.denials()), result)
    launcher = prepare(backend, image, policy)
    link: AsyncLink | None = None
    box = await launched(launcher)
    try:
        from ringfence._async.link import AsyncLink
        from ringfence._async.process import AsyncProcess, Place

        link = AsyncLink(box)
        place = Place(box, link, policy, launcher.image.name)
        if box.outlet is not None:
            from ringfence._async.equipping import equip

            await equip(place)
        call = calls.python_call(
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
        await blocking(box.wait_destroyed, calls.DESTROY_S)
    return _with(box.findings(), result)


def let_go(sandbox: AsyncSandbox) -> None:
    """For a command about to end: kill everything inside, and leave the rest to the zygote, which outlives us."""
    sandbox._ended = "closed"
    if sandbox._box is not None:
        sandbox._box.kill()
        if sandbox._box.outlet is not None:  # so that its log is whole
            sandbox._box.outlet.close()
            sandbox._box.outlet.wait_ended(1.0)


def findings(denials: tuple[Denial, ...]) -> tuple[Denial, ...]:
    """Of a sandbox's denials those that no result has: what was seen after the end."""
    return tuple(denial for denial in denials if denial.kind not in ("network", "secret"))


def _with(seen: tuple[Denial, ...], result: Result) -> Result:
    """What a look at the writable mounts showed after the end is part of what happened."""
    new = [denial for denial in seen if denial not in result.denials]
    return replace(result, denials=(*result.denials, *new)) if new else result
