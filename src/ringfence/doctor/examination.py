"""The examination of each backend in turn, and the choice that "auto" would make for a policy."""

from __future__ import annotations

from ringfence.backends import registry
from ringfence.backends.auto import SHARED_KERNEL, is_only_slower, not_chosen, prepare
from ringfence.backends.contract import BackendReport, Finding
from ringfence.errors import SandboxError, UnsupportedError
from ringfence.host import programs
from ringfence.values import Struct, final, frozen_map, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ringfence.policy.model import Policy
    from ringfence.values import Json

_ASK = "ringfence doctor"
_PATIENCE_S = 30.0  # with the import and the doctor of another distribution's backend


@final
class Report(Struct):
    """An examination as plain data: for a table, for JSON, and as a script of fixes."""

    backends: tuple[BackendReport, ...]
    auto: str | None  # the backend that "auto" would take for the policy; None: no backend keeps the policy
    rejected: Mapping[str, str]  # backend → why "auto" does not take it

    def fixes(self) -> list[str]:
        """Return pieces of a POSIX shell script for root, each once. What no command can fix is a comment."""
        found = [each.script for backend in self.backends for each in backend.findings if each.script is not None]
        return list(dict.fromkeys(found))

    def to_dict(self) -> dict[str, Json]:
        """Return the report for `--json`."""
        backends: list[Json] = [_as_json(each) for each in self.backends]
        return {"auto": self.auto, "rejected": dict(self.rejected), "backends": backends, "fixes": list(self.fixes())}


def _as_json(backend: BackendReport) -> dict[str, Json]:
    lines: list[Json] = [
        {"what": each.what, "state": each.state, "detail": each.detail, "fix": each.fix} for each in backend.findings
    ]
    return {"name": backend.name, "works": backend.works, "lines": lines}


def with_passed_over(report: BackendReport, *names: str) -> BackendReport:
    """Return the report with the programs of these names that are found on this host and never run."""
    found = [each for name in names for each in programs.passed_over(name)]
    lines = [Finding("passed over", "ok", f"{each.path}: {each.why}") for each in found]
    return replace(report, findings=(*report.findings, *lines))


class _Examined(dict[str, "BackendReport"]):
    """The report of each backend, made when first read."""

    def __missing__(self, name: str) -> BackendReport:
        self[name] = _without_ourselves(_examine(name))
        return self[name]


def _examine(name: str) -> BackendReport:
    """Return the backend's own report. What is wrong with a backend of another distribution is its report."""
    if name in registry.names():
        return registry.get(name).doctor()
    import threading

    made: list[BackendReport] = []

    def examine_it() -> None:
        try:
            made.append(_of_another(name))
        except BaseException as error:  # noqa: BLE001  # another distribution's; nobody interrupts this thread
            wrong = Finding("doctor", "missing", f"it raised {registry.said(error)}", "report it to its makers")
            made.append(BackendReport(name, works=False, findings=(wrong,)))

    examining = threading.Thread(target=examine_it, name="ringfence-doctor", daemon=True)
    examining.start()
    examining.join(_PATIENCE_S)
    late = Finding("doctor", "missing", f"it made no report within {_PATIENCE_S:g} s", "report it to its makers")
    return made[0] if made else BackendReport(name, works=False, findings=(late,))


def _of_another(name: str) -> BackendReport:
    try:
        found = registry.get(name)
    except UnsupportedError as error:
        return _unusable(name, error)
    try:
        report = found.doctor()
        shown = isinstance(report.works, bool) and all(map(_is_whole, report.findings))  # type: ignore[redundant-expr]  # the types are promises
        if report.name == name and shown:
            return report
        wrong = f"its report is not a BackendReport of {name!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # another distribution's code
        wrong = f"it raised {registry.said(error)}"
    origin = type(found).__module__.partition(".")[0]
    return BackendReport(name, False, (Finding("doctor", "missing", wrong, f"report it to the makers of {origin}"),))


def _is_whole(finding: object) -> bool:
    """Return whether another distribution's finding can be shown."""
    if not isinstance(finding, Finding) or finding.state not in ("ok", "weaker", "missing"):
        return False
    texts = (finding.what, finding.detail, finding.fix or "", finding.script or "")
    return all(isinstance(text, str) for text in texts)


def _unusable(name: str, error: UnsupportedError) -> BackendReport:
    return BackendReport(name, works=False, findings=(Finding("entry point", "missing", str(error), error.fix),))


def _without_ourselves(report: BackendReport) -> BackendReport:
    """Return the report without the fix "ringfence doctor", which its reader has just run."""
    findings = tuple(
        replace(each, fix=None, script=None) if each.fix in (_ASK, f"{_ASK} {report.name}") else each
        for each in report.findings
    )
    return replace(report, findings=findings)


def examine(policy: Policy | None = None, backends: Sequence[str] = ()) -> Report:
    """Try what this host can do, and whether it keeps `policy` (default: offline). Takes about a second.

    `backends` names the backends to report, ours or those of other distributions; none means all that are installed.
    Every trial has a deadline. Raises PolicyError for a wrong policy or the name of no backend.
    """
    from ringfence.errors import PolicyError
    from ringfence.policy.model import Policy as PolicyValue

    known = (*registry.names(), *registry.stranger_names())
    for name in backends:
        if name not in known:
            raise PolicyError(f"unknown backend {name!r}", key="backend", fix=", ".join(known))
    examined = _Examined()
    kept = policy if policy is not None else PolicyValue()
    auto, rejected = _choose(kept, examined)
    for name in backends:
        rejected |= _refused(kept, name, rejected)
    reports = [examined[name] for name in list(backends) or known]
    if not backends:
        reports += [_unusable(origin, error) for origin, error in registry.misnamed().items()]
    return Report(tuple(reports), auto, frozen_map(rejected))


def _refused(policy: Policy, name: str, rejected: dict[str, str]) -> dict[str, str]:
    """Return why a backend that was only passed over does not keep the policy either; {} where it would."""
    if name not in rejected or not is_only_slower(name, rejected[name]):
        return {}
    try:
        prepare(name, "host", policy).plan()
    except (UnsupportedError, SandboxError) as error:
        return {name: str(error)}
    return {}


def _choose(policy: Policy, examined: _Examined) -> tuple[str | None, dict[str, str]]:
    """Return the backend that "auto" would take here, and why it would take none of the other backends."""
    rejected: dict[str, str] = {}
    taken: str | None = None
    for name, backend in registry.BUILT_IN.items():
        if not registry.is_as_strong(backend.isolation, policy.isolation):
            rejected[name] = SHARED_KERNEL
        elif taken is not None:
            rejected[name] = not_chosen(name)
        else:
            try:
                prepare(name, "host", policy).plan()
            except (UnsupportedError, SandboxError) as error:  # even one that may pass: a report is of one moment
                rejected[name] = str(error)
                continue
            if examined[name].works:
                taken = name
                continue
            missing = (each.detail for each in examined[name].findings if each.state == "missing")
            rejected[name] = next(missing, "it does not work here")
    return taken, rejected
