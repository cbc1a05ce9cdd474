"""The result of a run of attacks: a row for each attack, in a table for people, machines and the docs."""

from __future__ import annotations

from ringfence.values import Struct, final, frozen_map, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

    from ringfence.values import Json
    from ringfence_attacks.case import Outcome

    Verdict: TypeAlias = Literal["held", "got through", "inconclusive", "not applicable"]

VERDICTS: tuple[Verdict, ...] = ("held", "got through", "inconclusive", "not applicable")


@final
class Row(Struct):
    """The outcome of an attack. `arms`: what was seen without the control ("off"), with every control ("on"), and, for
    a second control, with only the first ones missing ("alone")."""

    id: str
    title: str
    outcome: Outcome
    control: str
    verdict: Verdict
    arms: Mapping[str, str]
    detail: str
    seconds: float = 0.0
    succeeded: tuple[str, ...] = ()  # names of the arms in which the attack succeeded

    def __post_init__(self) -> None:
        put(self, "arms", frozen_map(self.arms))


@final
class Matrix(Struct):
    """The rows of a run on a backend, as root or as an ordinary user.

    `noticed`: how many of an engine's controls an attack noticed when they were missing. The number says little when
    only a part of the attacks was run.
    """

    backend: str
    user: str
    kernel: str
    rows: tuple[Row, ...]
    noticed: str = ""

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def score(self) -> str:
        """How many of the attacks that were tried were stopped, as in "104/104"."""
        tried = len(self.rows) - self.count("not applicable")
        return f"{self.count('held')}/{tried}"

    def to_dict(self) -> dict[str, Json]:
        rows: list[Json] = [
            {
                "id": row.id,
                "title": row.title,
                "outcome": row.outcome,
                "control": row.control,
                "verdict": row.verdict,
                "arms": dict(row.arms),
                "detail": row.detail,
            }
            for row in self.rows
        ]
        counts: dict[str, Json] = {verdict: self.count(verdict) for verdict in VERDICTS}
        return {
            "backend": self.backend,
            "user": self.user,
            "kernel": self.kernel,
            "score": self.score,
            "counts": counts,
            "attacks": rows,
        }
