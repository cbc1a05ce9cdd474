"""What an examination found, as plain data: for a table, for JSON, and as a script of fixes."""

from __future__ import annotations

from ringfence.backends.contract import BackendReport, Finding
from ringfence.host import programs
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.values import Json


@final
class Report(Struct):
    """An examination. `auto` is the backend that would be taken for the policy; None: none keeps it."""

    backends: tuple[BackendReport, ...]
    auto: str | None
    rejected: Mapping[str, str]  # backend → why "auto" does not take it

    def fixes(self) -> list[str]:
        """Pieces of a POSIX shell script for root, each once. What no command can do is a comment."""
        found = [each.script for backend in self.backends for each in backend.findings if each.script is not None]
        return list(dict.fromkeys(found))

    def to_dict(self) -> dict[str, Json]:
        """For `--json`."""
        backends: list[Json] = [_backend(each) for each in self.backends]
        return {"auto": self.auto, "rejected": dict(self.rejected), "backends": backends, "fixes": list(self.fixes())}


def with_passed_over(report: BackendReport, *names: str) -> BackendReport:
    """Return the report with the programs of these names that are found on this host and never run."""
    found = [each for name in names for each in programs.passed_over(name)]
    lines = [Finding("passed over", "ok", f"{each.path}: {each.why}") for each in found]
    return replace(report, findings=(*report.findings, *lines))


def _backend(backend: BackendReport) -> dict[str, Json]:
    lines: list[Json] = [
        {"what": each.what, "state": each.state, "detail": each.detail, "fix": each.fix} for each in backend.findings
    ]
    return {"name": backend.name, "works": backend.works, "lines": lines}
