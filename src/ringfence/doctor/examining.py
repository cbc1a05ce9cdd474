"""Owns the order of an examination and what "auto" would take."""

from __future__ import annotations

from ringfence.backends import host_programs
from ringfence.choosing import ORDER
from ringfence.doctor.others import OTHERS, examine_other
from ringfence.doctor.process import examine_process
from ringfence.doctor.report import Finding, Report
from ringfence.doctor.walls import examine_container, examine_gvisor
from ringfence.errors import SandboxError, UnsupportedError
from ringfence.values import frozen_map, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.doctor.report import BackendReport
    from ringfence.policy.model import Policy
    from ringfence.values import BackendName


_ASK = "ringfence doctor"
# What a backend starts; the process backend's are for images.
_PROGRAMS = {
    "process": ("unshare", "mmdebstrap", "npm", "zstd"),
    "container": ("docker", "podman"),
    "gvisor": ("runsc",),
    "vm": ("qemu-system-x86_64",),
}
NAMES = ("process", "container", "gvisor", *OTHERS)


class _Examined(dict[str, "BackendReport"]):
    """Each backend's report, made when it is first asked for."""

    def __missing__(self, name: str) -> BackendReport:
        self[name] = _without_ourselves(_examine(name))
        return self[name]


def _examine(name: str) -> BackendReport:
    report = _tried(name)
    return replace(report, findings=(*report.findings, *_not_run(name)))


def _not_run(name: str) -> list[Finding]:
    """Programs that a shell might run for these names, and that we never do."""
    over = [each for program in _PROGRAMS.get(name, ()) for each in host_programs.passed_over(program)]
    return [Finding("passed over", "ok", f"{each.path}: {each.why}") for each in over]


def _tried(name: str) -> BackendReport:
    if name == "process":
        return examine_process()
    if name == "container":
        return examine_container()
    return examine_gvisor() if name == "gvisor" else examine_other(name)


def _without_ourselves(report: BackendReport) -> BackendReport:
    """Who reads this has asked the doctor; that is no fix any more."""
    findings = tuple(
        replace(each, fix=None, script=None) if each.fix in (_ASK, f"{_ASK} {report.name}") else each
        for each in report.findings
    )
    return replace(report, findings=findings)


def examine(policy: Policy | None = None, backends: Sequence[str] = ()) -> Report:
    """Try what this host can do, and whether it keeps `policy` (the default: offline). About a second.

    `backends`: only these are reported; none means all. Every trial has a deadline. PolicyError for a policy that is
    wrong, or names a backend that does not exist.
    """
    from ringfence.errors import PolicyError
    from ringfence.policy.model import Policy as PolicyValue

    for name in backends:
        if name not in NAMES:
            raise PolicyError(f"unknown backend {name!r}", key="backend", fix=", ".join(NAMES))
    examined = _Examined()
    kept = policy if policy is not None else PolicyValue()
    auto, rejected = _choose(kept, examined)
    for name in backends:
        rejected |= _refused(kept, name, rejected)
    return Report(tuple(examined[name] for name in list(backends) or NAMES), auto, frozen_map(rejected))


def _refused(policy: Policy, name: str, rejected: dict[str, str]) -> dict[str, str]:
    """Why one that was only passed over does not keep the policy either. Nothing where it would."""
    from ringfence.launching import NOT_CHOSEN, prepare

    if name not in ORDER or rejected.get(name) != NOT_CHOSEN[name]:
        return {}
    try:
        prepare(name, "host", policy).plan()
    except (UnsupportedError, SandboxError) as error:
        return {name: str(error)}
    return {}


def _choose(policy: Policy, examined: _Examined) -> tuple[str | None, dict[str, str]]:
    from ringfence.launching import NOT_CHOSEN, prepare

    rejected = dict(NOT_CHOSEN)
    tried: tuple[BackendName, ...] = ("gvisor",) if policy.isolation == "own-kernel" else ("process", *ORDER)
    if policy.isolation == "own-kernel":
        rejected |= dict.fromkeys(("process", "container"), "it shares the host's kernel")
    for name in tried:
        try:
            prepare(name, "host", policy).plan()
        except (UnsupportedError, SandboxError) as error:  # the second: of this moment, and so is this report
            rejected[name] = str(error)
            continue
        if examined[name].works:
            rejected.pop(name, None)
            return name, rejected
        missing = (each.detail for each in examined[name].findings if each.state == "missing")
        rejected[name] = next(missing, "it does not work here")
    return None, rejected
