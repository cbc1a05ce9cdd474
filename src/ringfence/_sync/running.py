# Generated from ringfence/_async by scripts/unasync: do not edit.
"""A sandbox for one run: made, used and gone."""

from __future__ import annotations

from ringfence import calls
from ringfence._sync.waiting import blocking, launched
from ringfence.launching import prepare
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence._sync.sandbox import Sandbox
    from ringfence.backends import Backend
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy
    from ringfence.results import Denial, Result
    from ringfence.values import BackendName


def run_alone(once: calls.Once, backend: BackendName | Backend, image: str | Image, policy: Policy) -> Result:
    """How it ended, with what was seen after the end."""
    if once.language != "python":
        from ringfence._sync.program import run_once
        from ringfence._sync.sandbox import Sandbox

        with Sandbox(backend=backend, image=image, policy=policy) as sandbox:
            result = run_once(sandbox, once)
        return _with(findings(sandbox.denials()), result)
    launcher = prepare(backend, image, policy)
    link: Link | None = None
    box = launched(launcher)
    try:
        from ringfence._sync.link import Link
        from ringfence._sync.process import Place, Process

        link = Link(box)
        place = Place(box, link, policy, launcher.image.name)
        if box.outlet is not None:
            from ringfence._sync.equipping import equip

            equip(place)
        call = calls.python_call(
            box, policy, once.code, stdin=once.stdin, env=once.env, timeout_s=once.timeout_s, one_shot=True
        )
        process = Process(place, call, link.open(), keep_events=False)._begin()
        if call.stdin:
            process._feed_stdin(call.stdin)
        result = process.wait()
    finally:
        if link is not None:
            link.finish("closed")
        box.close()
    if any(mount.mode == "rw" for mount in policy.mounts):
        blocking(box.wait_destroyed, calls.DESTROY_S)
    return _with(box.findings(), result)


def let_go(sandbox: Sandbox) -> None:
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
