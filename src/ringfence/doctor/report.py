"""What an examination found, as plain data: for a table, for JSON, and as a script of fixes."""

from __future__ import annotations

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

    from ringfence.values import Json

    Condition: TypeAlias = Literal["ok", "weaker", "missing"]


@final
class Finding(Struct):
    """One thing that was tried. "weaker": a sandbox runs without it, and something is refused or held less well."""

    what: str
    state: Condition
    detail: str
    fix: str | None = None  # for a person: a command, or what to change in words
    script: str | None = None  # the same for a root shell; None: not part of the script


@final
class BackendReport(Struct):
    """One backend: whether it works here, and what that rests on."""

    name: str
    works: bool
    findings: tuple[Finding, ...]

    @property
    def lines(self) -> list[tuple[str, Condition, str, str | None]]:
        """(what, state, detail, fix) of each finding, in the order they were tried."""
        return [(each.what, each.state, each.detail, each.fix) for each in self.findings]


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


def _backend(backend: BackendReport) -> dict[str, Json]:
    lines: list[Json] = [
        {"what": each.what, "state": each.state, "detail": each.detail, "fix": each.fix} for each in backend.findings
    ]
    return {"name": backend.name, "works": backend.works, "lines": lines}
