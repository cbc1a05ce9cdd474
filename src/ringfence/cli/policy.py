"""Run `ringfence policy`: check, explain, print and list policies."""

from __future__ import annotations

import os

from ringfence.cli.console import Problem
from ringfence.cli.options import action_of, policy_table
from ringfence.cli.settings import FOLDER, PRESETS, find_policy, own_policies, path_of, policy_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.console import Console
    from ringfence.cli.options import CommandLine
    from ringfence.errors import PolicyError
    from ringfence.values import Json

ACTIONS = ("check", "explain", "show", "list")
_ABOUT = {
    "offline": "one piece of code: 30 s, 512M, 1 CPU (ringfence run, the library)",
    "dev": "room to build: 1 h, 4G, 4 CPUs (ringfence exec)",
    "hostile": "code that attacks: offline's limits, a kernel of its own, no weaker mechanism",
}


def main(argv: list[str], console: Console) -> int:
    """Run an action and return 0, or 1 for a policy that `check` refuses."""
    given = policy_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("policy", console)
    action, words = action_of("policy", given.words, ACTIONS)
    if action == "show":
        return _show(words, given, console)
    for name, _ in given.options:
        if name != "--json":
            raise Problem(
                f"policy {action} takes no {name}", fix=f"what options add up to: ringfence policy show {name} ..."
            )
    if action == "list":
        _no_more(action, words)
        return _list(console)
    if not words:
        raise Problem(f"policy {action} needs a policy", fix=f"write: ringfence policy {action} FILE.toml")
    _no_more(action, words[1:])
    return _check(words[0], console) if action == "check" else _explain(words[0], console)


def _no_more(action: str, words: list[str]) -> None:
    if words:
        raise Problem(f"policy {action} takes no {words[0]!r}", fix="see: ringfence policy --help")


def _check(name: str, console: Console) -> int:
    mistakes: list[PolicyError] = []
    path = name
    if name not in PRESETS:
        path = name if os.path.isfile(name) else path_of(name)
        mistakes = _mistakes(path)
    if console.json:
        found: list[Json] = [
            {"line": each.line, "key": each.key, "message": str(each), "fix": each.fix} for each in mistakes
        ]
        console.out_json({"file": path, "ok": not mistakes, "mistakes": found})
    elif mistakes:
        for each in mistakes:
            place = f"{path}:{each.line}" if each.line is not None else path
            console.say(f"{place}: {each}" + (f"; {each.fix}" if each.fix else ""))
    else:
        console.out(f"{path}: no mistakes\n")
    return 1 if mistakes else 0


def _mistakes(path: str) -> list[PolicyError]:
    from ringfence.errors import PolicyError
    from ringfence.policy.load import check, read

    try:
        text, folder = read(path)
    except PolicyError as error:
        return [error]
    return check(text, folder)


def _explain(name: str, console: Console) -> int:
    policy = find_policy(name)
    text = policy.explain().rstrip("\n")
    if console.json:
        console.out_json({"policy": name, "digest": policy.digest, "explain": list(text.splitlines())})
    else:
        console.out(text + "\n")
    return 0


def _show(words: list[str], given: CommandLine, console: Console) -> int:
    if console.json:
        raise Problem("policy show prints TOML, not JSON", fix="for a program: ringfence policy explain --json NAME")
    _no_more("show", words[1:])
    if words:
        if given.has("--policy"):
            raise Problem(f"two policies: {words[0]} and --policy", fix="leave one of the two out")
        given.options.append(("--policy", words[0]))
    console.out(policy_from(given, "dev").to_toml())
    return 0


def _list(console: Console) -> int:
    own = own_policies()
    if console.json:
        rows: list[Json] = [{"name": name, "kind": "preset", "file": None, "about": _ABOUT[name]} for name in PRESETS]
        rows += [{"name": name, "kind": "own", "file": path, "about": None} for name, path in _usable(own)]
        console.out_json({"policies": rows})
        return 0
    width = max(len(name) for name in (*PRESETS, *own))
    lines = [f"{name:{width}}  {_ABOUT[name]}" for name in PRESETS]
    lines += [f"{name:{width}}  {path}" for name, path in _usable(own)]
    if not own:
        lines.append(f"none of yours in {FOLDER}; to write one: mkdir -p {FOLDER}")
        lines.append(f"then: ringfence policy show --rw . > {FOLDER}/NAME.toml")
    console.out("".join(f"{line}\n" for line in lines))
    for name in own:
        if name in PRESETS:
            console.note(f"{own[name]} is never used by name: {name} is a preset; rename it")
    return 0


def _usable(own: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, path) for name, path in own.items() if name not in PRESETS]
