"""Run `ringfence doctor`: print what this host can enforce. `ringfence.doctor` examines the host."""

from __future__ import annotations

from ringfence.backends import registry
from ringfence.backends.auto import is_only_slower
from ringfence.cli.console import OUT, Problem, colours
from ringfence.cli.options import LATER_BACKENDS, backend_name, doctor_table
from ringfence.text import nearest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.console import Console
    from ringfence.doctor import BackendReport, Report

_MARKS = {"ok": ("ok", "32"), "weaker": ("weaker", "33"), "missing": ("missing", "31")}


def main(argv: list[str], console: Console) -> int:
    """Examine this host. Return 0 when a backend, among the named backends, keeps the policy, else 1."""
    given = doctor_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("doctor", console)
    wanted = _wanted(given.words)
    name = given.last("--policy") or "offline"
    from ringfence.cli.settings import find_policy
    from ringfence.doctor import examine

    report = examine(find_policy(name), wanted)
    if console.json:
        console.out_json(report.to_dict())
    elif given.has("--fix"):
        console.out(script(report))
    else:
        console.out(table(report, name, wanted, coloured=colours(OUT)))
    return 0 if _kept(report, wanted) else 1


def _wanted(words: list[str]) -> list[str]:
    for word in words:
        if word not in registry.names():
            known = (*registry.names(), *registry.stranger_names())
            if word in LATER_BACKENDS and word not in known:
                backend_name("BACKEND", word)
            if word not in known:
                near = nearest(word, known)
                fix = f"did you mean {near}? " if near else ""
                raise Problem(f"there is no backend {word!r}", fix=f"{fix}backends are: {', '.join(known)}")
    return words


def _kept(report: Report, wanted: list[str]) -> bool:
    if not wanted:
        return report.auto is not None

    def keeps(name: str) -> bool:
        """Return whether "auto" takes the backend, or passes over it only because another is faster."""
        return name == report.auto or is_only_slower(name, report.rejected.get(name))

    return any(each.works and keeps(each.name) for each in _chosen(report, wanted))


def _chosen(report: Report, wanted: list[str]) -> list[BackendReport]:
    return [each for each in report.backends if not wanted or each.name in wanted]


def table(report: Report, policy: str, wanted: list[str], *, coloured: bool) -> str:
    """Return the examination as text: a block for each backend, a line for each trial, the fix below."""
    lines: list[str] = []
    for backend in _chosen(report, wanted):
        works = "works" if backend.works else "does not work here"
        title = _bold(f"{printable(backend.name)}: {works}", coloured)
        lines += ["", title] if lines else [title]
        width = max((len(what) for what, *_ in backend.lines), default=0)
        for what, state, detail, fix in backend.lines:
            word, colour = _MARKS[state]
            mark = f"\x1b[{colour}m{word:7}\x1b[0m" if coloured else f"{word:7}"
            lines.append(f"  {mark}  {printable(what):{width}}  {printable(detail)}".rstrip())
            if fix:
                lines += [
                    f"  {'':7}  fix: {printable(line)}" if n == 0 else f"  {'':7}       {printable(line)}"
                    for n, line in enumerate(fix.splitlines())
                ]
    lines.append("")
    if report.auto is None:
        lines.append(f"auto: no backend keeps the policy {policy!r}")
    else:
        lines.append(f"auto: {report.auto} keeps the policy {policy!r}")
    lines += [f"  {name} was not taken: {printable(why)}" for name, why in report.rejected.items()]
    if report.fixes():
        lines.append("all fixes as a script: ringfence doctor --fix")
    return "\n".join(lines) + "\n"


def script(report: Report) -> str:
    """Return the fixes as a shell script that stops at the first failure. A user reads the script before running it."""
    fixes = report.fixes()
    if not fixes:
        return "#!/bin/sh\n# no command here would fix anything\n"
    return (
        "#!/bin/sh\n# what ringfence doctor found missing on this host; read it before you run it\nset -eu\n"
        + "".join(line.rstrip("\n") + "\n" for line in fixes)
    )


def _bold(text: str, coloured: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if coloured else text
