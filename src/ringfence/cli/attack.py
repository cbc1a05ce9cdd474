"""ringfence attack: our own escape attempts on this host, drawn as a table. They belong to `ringfence.attacks`."""

from __future__ import annotations

import os

from ringfence.cli.console import ERR, OUT, Problem, colours, write
from ringfence.cli.options import attack_table
from ringfence.text import nearest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.attacks import Attack, Matrix, Row
    from ringfence.cli.console import Console
    from ringfence.values import Json

_COLOURS = {"held": "32", "got through": "31;1", "inconclusive": "33", "not applicable": "2"}


def main(argv: list[str], console: Console) -> int:
    """0 when all held, 1 when one got through, 3 when none did but a case was inconclusive."""
    given = attack_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("attack", console)
    from ringfence.attacks import run
    from ringfence.attacks.witnesses import remove_folders

    ids = choose(given.words, _known(given.last("--backend")))
    if given.has("--list"):
        return _list([each for each in _catalogue(given.last("--backend")) if each.id in set(ids)], console)
    live = progress_line() if os.isatty(ERR) and not console.json else None
    try:
        matrix = run(ids, backend=given.last("--backend"), progress=live or _silent)
    finally:
        remove_folders(os.getpid())  # one that was just made when a signal came is nobody's yet
    if live is not None:
        write(ERR, b"\r\x1b[K")
    if console.json:
        console.out_json(matrix.to_dict())
    else:
        console.out(table(matrix, coloured=colours(OUT)) + _noticed(matrix, whole=not given.words))
    return exit_code(matrix)


def _noticed(matrix: Matrix, *, whole: bool) -> str:
    """After a whole run of a wall: how many of its controls an attack noticed the lack of."""
    if not whole or matrix.backend == "process":
        return ""
    from ringfence.attacks import walled

    return f"{walled.score(matrix.backend, matrix.rows)}\n"


def _known(backend: str | None) -> list[str]:
    return [attack.id for attack in _catalogue(backend)]


def _catalogue(backend: str | None) -> tuple[Attack, ...]:
    if backend in ("container", "gvisor"):
        from ringfence.attacks import walled

        return walled.catalogue(backend)
    from ringfence.attacks import catalogue

    return catalogue()


def choose(words: list[str], known: list[str]) -> list[str]:
    """The ids that ID and letter arguments mean, in the catalogue's order; all without arguments. Raises Problem."""
    if not words:
        return known
    chosen: set[str] = set()
    for word in words:
        wanted = word.upper()
        found = [each for each in known if _means(wanted, each.upper())]
        if not found:
            near = nearest(wanted, known) if len(wanted) > 1 else None
            guess = f"did you mean {near}? " if near else ""
            raise Problem(f"there is no attack {word!r}", fix=f"{guess}all there are: ringfence attack --list")
        chosen.update(found)
    return [each for each in known if each in chosen]


def _means(wanted: str, name: str) -> bool:
    """A letter means all of its attacks, an id its variants too: J17 means J17-signal."""
    return name == wanted or name.startswith(wanted + "-") or (len(wanted) == 1 and name.startswith(wanted))


def exit_code(matrix: Matrix) -> int:
    """What the verdicts add up to."""
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
    """A line per attempt, those that got through first, and the count."""
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
    """Draws "12/104 F07" over itself on the terminal of standard error."""

    def draw(done: int, total: int, attack: str) -> None:
        write(ERR, f"\r\x1b[K{done}/{total} {printable(attack)}".encode())

    return draw


def _silent(done: int, total: int, attack: str) -> None:
    del done, total, attack
