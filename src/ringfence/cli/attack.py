"""Run `ringfence attack`: the escape attempts on this host, drawn as a table.

The attempts are in another distribution, `ringfence-attacks`, which is found by its entry point and has to offer the
functions of `Suite`.
"""

from __future__ import annotations

import os
import sys

from ringfence.cli.console import ERR, OUT, Problem, colours, write
from ringfence.cli.options import attack_table
from ringfence.text import nearest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from importlib.metadata import EntryPoint
    from typing import Protocol, TypeAlias

    from ringfence.cli.console import Console
    from ringfence.values import Json

    Progress: TypeAlias = Callable[[int, int, str], None]  # attempts done, all attempts, id of the next

    class Attack(Protocol):
        """An escape attempt: id, what happens if the attempt succeeds, and what must be true."""

        @property
        def id(self) -> str: ...
        @property
        def outcome(self) -> str: ...
        @property
        def title(self) -> str: ...

    class Row(Attack, Protocol):
        """The outcome of an attempt."""

        @property
        def control(self) -> str: ...
        @property
        def verdict(self) -> str: ...
        @property
        def arms(self) -> Mapping[str, str]: ...
        @property
        def detail(self) -> str: ...

    class Matrix(Protocol):
        """All rows of a run. `noticed` counts the controls of an engine whose absence an attack noticed."""

        @property
        def backend(self) -> str: ...
        @property
        def user(self) -> str: ...
        @property
        def kernel(self) -> str: ...
        @property
        def rows(self) -> Sequence[Row]: ...
        @property
        def noticed(self) -> str: ...
        def to_dict(self) -> dict[str, Json]: ...

    class Suite(Protocol):
        """The module that an entry point of the group `ringfence.attacks` names."""

        def catalogue(self, backend: str | None = None) -> Sequence[Attack]: ...
        def run(
            self, ids: Iterable[str] = (), *, backend: str | None = None, progress: Progress | None = None
        ) -> Matrix: ...


GROUP = "ringfence.attacks"
_COLOURS = {"held": "32", "got through": "31;1", "inconclusive": "33", "not applicable": "2"}


def main(argv: list[str], console: Console) -> int:
    """Return 0 when all held, 1 when an attack got through, 3 when none did but a case was inconclusive."""
    given = attack_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("attack", console)
    suite = installed_suite()
    backend = given.last("--backend")
    catalogue = suite.catalogue(backend)
    ids = choose(given.words, [attack.id for attack in catalogue], backend)
    if given.has("--list"):
        return _list([attack for attack in catalogue if attack.id in set(ids)], console)
    live = progress_line() if os.isatty(ERR) and not console.json else None
    matrix = suite.run(ids, backend=backend, progress=live or _silent)
    if live is not None:
        write(ERR, b"\r\x1b[K")
    if console.json:
        console.out_json(matrix.to_dict())
    else:
        noticed = "" if given.words else matrix.noticed  # a part of the attacks notices a part of the controls
        console.out(table(matrix, coloured=colours(OUT)) + (f"{noticed}\n" if noticed else ""))
    return exit_code(matrix)


def installed_suite() -> Suite:
    """Import the installed attacks. Raises Problem if they are not installed."""
    from importlib.metadata import entry_points

    for found in entry_points(group=GROUP):
        sys.path += [folder for folder in _folders_of(found) if folder not in sys.path]
        suite: Suite = found.load()
        return suite
    raise Problem(
        "the escape attempts are not installed: they are a separate distribution, ringfence-attacks",
        fix="pip install ringfence-attacks; in a clone of the project, make attack",
        code="attacks-missing",
    )


def _folders_of(found: EntryPoint) -> list[str]:
    """Return the folders of an editable installation, read from the .pth file among the installed packages.

    A folder below the working folder was taken from `sys.path`, because a guest may have written there (L12). The
    attacks were installed on purpose and this verb asks for them, so their folder may be used.
    """
    files = found.dist.files or () if found.dist is not None else ()
    lines = [line for file in files if file.name.endswith(".pth") for line in file.read_text().splitlines()]
    return [line for line in lines if os.path.isabs(line)]


def choose(words: list[str], known: list[str], backend: str | None) -> list[str]:
    """Return the ids that the arguments mean, in the catalogue's order; without arguments, all. Raises Problem."""
    if not words:
        return known
    chosen: set[str] = set()
    for word in words:
        wanted = word.upper()
        found = [each for each in known if _means(wanted, each.upper())]
        if not found:
            near = nearest(wanted, known) if len(wanted) > 1 else None
            guess = f"did you mean {near}? " if near else ""
            where, option = (f" for the {backend} backend", f" --backend {backend}") if backend else ("", "")
            fix = f"{guess}all there are: ringfence attack --list{option}"
            raise Problem(f"there is no attack {word!r}{where}", fix=fix)
        chosen.update(found)
    return [each for each in known if each in chosen]


def _means(wanted: str, name: str) -> bool:
    """Return whether an argument means this id. A letter means all its attacks; J17 also means J17-signals."""
    return name == wanted or name.startswith(wanted + "-") or (len(wanted) == 1 and name.startswith(wanted))


def exit_code(matrix: Matrix) -> int:
    """Return the exit code for the verdicts of a run."""
    verdicts = {row.verdict for row in matrix.rows}
    if "got through" in verdicts:
        return 1
    return 3 if "inconclusive" in verdicts else 0


def _list(listed: list[Attack], console: Console) -> int:
    if console.json:
        rows: list[Json] = [{"id": each.id, "title": each.title, "outcome": each.outcome} for each in listed]
        console.out_json({"attacks": rows})
    else:
        width = max(len(each.id) for each in listed)
        console.out("".join(f"{each.id:{width}}  {each.title}\n" for each in listed))
    return 0


def table(matrix: Matrix, *, coloured: bool) -> str:
    """Return a line for each attempt, breakthroughs first, and the counts."""
    rank = {"got through": 0, "inconclusive": 1}
    width = max((len(row.id) for row in matrix.rows), default=0)
    lines = [f"backend {matrix.backend}, as {matrix.user}, Linux {matrix.kernel}", ""]
    for row in sorted(matrix.rows, key=lambda each: rank.get(each.verdict, 2)):
        lines += _lines(row, width, coloured)
    counts = {verdict: sum(row.verdict == verdict for row in matrix.rows) for verdict in _COLOURS}
    lines.append("")
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no attack ran")
    return "\n".join(lines) + "\n"


def _lines(row: Row, width: int, coloured: bool) -> list[str]:
    mark = f"{row.verdict:14}"
    if coloured:
        mark = f"\x1b[{_COLOURS[row.verdict]}m{mark}\x1b[0m"
    lines = [f"{row.id:{width}}  {mark}  {row.outcome:7}  {printable(row.title)}"]
    margin = " " * (width + 2)
    if row.verdict in ("got through", "inconclusive"):
        lines.append(f"{margin}control: {row.control}")
        lines += [f"{margin}{arm}: {printable(said)}" for arm, said in row.arms.items()]
    if row.detail and row.verdict != "held":
        lines.append(f"{margin}{printable(row.detail)}")
    return lines


def progress_line() -> Callable[[int, int, str], None]:
    """Return a function that draws "12/104 F07" over itself on the terminal of standard error."""

    def draw(done: int, total: int, attack: str) -> None:
        write(ERR, f"\r\x1b[K{done}/{total} {printable(attack)}".encode())

    return draw


def _silent(done: int, total: int, attack: str) -> None:
    del done, total, attack
