# Generated from ringfence/_async by scripts/unasync: do not edit.
"""One call, one fresh sandbox, nothing left. What it is given is checked here; what does it is loaded after that."""

from __future__ import annotations

from ringfence import calls, early
from ringfence.launching import check_policy
from ringfence.policy.model import Policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.backends import Backend
    from ringfence.policy.image import Image
    from ringfence.results import Result
    from ringfence.values import BackendName


def run(
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
    asked = calls.Once(language, checked, given, variables, seconds)
    early.begin(backend, image, policy, _load_rest)
    try:
        from ringfence._sync.running import run_alone

        return run_alone(asked, backend, image, policy)
    finally:
        early.end_unneeded()


def _load_rest() -> None:
    """What is needed once something runs."""
    import ringfence._sync.link
    import ringfence._sync.process  # noqa: F401  # used later, as the other
