"""Parse a command line: a table for each verb names its options, which take a value, and how a value is checked."""

from __future__ import annotations

from ringfence.backends import registry
from ringfence.cli.console import Problem
from ringfence.text import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from ringfence.cli.console import Console

    Check: TypeAlias = Callable[[str, str], str]


def as_given(name: str, raw: str) -> str:
    """Accept any value."""
    del name
    return raw


class Option:
    """An option. `value` names the value, empty for a switch; `check(name, raw)` returns a value or raises Problem."""

    __slots__ = ("check", "name", "short", "value")

    def __init__(self, name: str, *, short: str = "", value: str = "", check: Check = as_given) -> None:
        self.name = name
        self.short = short
        self.value = value
        self.check = check


class CommandLine:
    """A command line as read: options in order, and the words that are no options."""

    __slots__ = ("options", "words")

    def __init__(self) -> None:
        self.options: list[tuple[str, str]] = []
        self.words: list[str] = []

    def has(self, name: str) -> bool:
        """Return whether the option was given."""
        return any(given == name for given, _ in self.options)

    def last(self, name: str) -> str | None:
        """Return the last value of an option, or None. A user's own option comes after the options of an alias."""
        return next((value for given, value in reversed(self.options) if given == name), None)


class Table:
    """The options of a verb. With `command`, the first word that is no option ends them: the rest is the command."""

    __slots__ = ("by_name", "command", "verb")

    def __init__(self, verb: str, options: Iterable[Option], *, command: bool = False) -> None:
        self.verb = verb
        self.command = command
        self.by_name: dict[str, Option] = {}
        for option in options:
            self.by_name[option.name] = option
            if option.short:
                self.by_name[option.short] = option

    def parse(self, argv: list[str], console: Console) -> CommandLine | None:
        """Return what `argv` says; None when it asks for help. Raises Problem for the first mistake.

        The whole line is read first, so that `--json` after a mistake still decides how the mistake is reported.
        """
        reader = _OptionReader(self, argv, console)
        given = reader.read()
        if given is None:
            return None
        if reader.mistake is not None:
            raise reader.mistake
        given.options = [(name, self.by_name[name].check(name, value)) for name, value in given.options]
        return given


class _OptionReader:
    __slots__ = ("argv", "at", "console", "given", "mistake", "table")

    def __init__(self, table: Table, argv: list[str], console: Console) -> None:
        self.table = table
        self.argv = argv
        self.at = 0
        self.console = console
        self.given = CommandLine()
        self.mistake: Problem | None = None

    def read(self) -> CommandLine | None:
        while self.at < len(self.argv):
            word = self.argv[self.at]
            self.at += 1
            if word == "--":
                self.given.words += self.argv[self.at :]
                break
            if word in ("--help", "-h"):
                return None
            if len(word) < 2 or word[0] != "-":
                self.given.words.append(word)
                if self.table.command:
                    self.given.words += self.argv[self.at :]
                    break
            elif word[1] == "-":
                self._long(word)
            else:
                self._short(word)
        return self.given

    def _long(self, word: str) -> None:
        name, equals, value = word.partition("=")
        option = self.table.by_name.get(name)
        if option is None:
            self._unknown(name)
        elif option.value:
            self._take(option, name, value if equals else None)
        elif equals:
            self._note(Problem(f"{name} takes no value, but was given {value!r}", fix=f"write {name} alone"))
        else:
            self._switch(option)

    def _short(self, word: str) -> None:
        for index, letter in enumerate(word[1:], 1):
            option = self.table.by_name.get("-" + letter)
            if option is None:
                self._unknown("-" + letter if index > 1 or len(word) == 2 else word)
                return
            if option.value:
                self._take(option, "-" + letter, word[index + 1 :] or None)
                return
            self._switch(option)

    def _take(self, option: Option, name: str, value: str | None) -> None:
        if value is None:
            value = self.argv[self.at] if self.at < len(self.argv) else None
            self.at += 1
            # An option in place of a value means that the value was forgotten, except for code, which may be any text.
            if value is None or (option.value != "CODE" and (value == "--" or value in self.table.by_name)):
                self.at -= 1
                self._note(Problem(f"{name} needs a value: {name} {option.value}", fix=self._see()))
                return
        self.given.options.append((option.name, value))
        if option.name == "--report":
            self.console.named_report = value

    def _switch(self, option: Option) -> None:
        self.given.options.append((option.name, ""))
        if option.name == "--json":
            self.console.json = True
        elif option.name == "--quiet":
            self.console.quiet = True

    def _unknown(self, name: str) -> None:
        near = nearest(name, [known for known in self.table.by_name if known.startswith("--")])
        fix = f"did you mean {near}? {self._see()}" if near else self._see()
        if self.table.command:
            fix += f"; an option of the command goes after it, or after --: ringfence {self.table.verb} -- ..."
        self._note(Problem(f"{self.table.verb} has no option {name}", fix=fix))

    def _see(self) -> str:
        return f"see: ringfence {self.table.verb} --help"

    def _note(self, mistake: Problem) -> None:
        if self.mistake is None:
            self.mistake = mistake


def action_of(verb: str, words: list[str], actions: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return which action of a verb the words name, and the words after. Raises Problem with the nearest action."""
    if not words:
        fix = f"one of: {', '.join(actions)}; see: ringfence {verb} --help"
        raise Problem(f"{verb} needs to know what to do", fix=fix)
    if words[0] in actions:
        return words[0], words[1:]
    near = nearest(words[0], actions)
    guess = f"did you mean: ringfence {verb} {near}? " if near else ""
    raise Problem(f"{verb} has no {words[0]!r}", fix=f"{guess}it has: {', '.join(actions)}")


# What each verb takes. Only the form of a value is checked here; the policy judges what a value means.


LATER_BACKENDS = ("vm", "wasm", "remote")  # named in older texts; the answer is that this version has none of them
ISOLATION = ("runtime", "shared-kernel", "own-kernel")
LANGUAGES = ("python", "javascript", "bash", "go", "ruby", "java", "c", "c++", "r")

# The keys of Limits and what each takes.
LIMITS = {
    "timeout_s": "number",
    "cpu_time_s": "number",
    "cpus": "number",
    "memory": "size",
    "processes": "integer",
    "open_files": "integer",
    "disk": "size",
    "disk_files": "integer",
    "output": "size",
    "lifetime_s": "number",
    "idle_s": "number",
    "on_idle": "word",
}
_EXAMPLES = {"number": "1.5", "size": "512M", "integer": "64", "word": "close"}


def one_of(choices: tuple[str, ...]) -> Check:
    """Return a check for a closed list of words."""

    def check(name: str, raw: str) -> str:
        if raw in choices:
            return raw
        near = nearest(raw, choices)
        fix = f"did you mean {name} {near}? " if near else ""
        raise Problem(f"{name} {raw!r} is not known", fix=f"{fix}it takes one of: {', '.join(choices)}")

    return check


def backend_name(name: str, raw: str) -> str:
    """Check the name of a backend, ours or another distribution's. A backend of a later version is said to be one."""
    own = ("auto", *registry.names())
    if raw in own:
        return raw
    known = (*own, *registry.stranger_names())  # read only now: to find other distributions takes long
    if raw in LATER_BACKENDS and raw not in known:
        fix = f"it takes one of: {', '.join(known)}"
        raise Problem(f"the {raw} backend is not in this version", fix=fix, code="not-in-this-version")
    return one_of(known)(name, raw)


def language(name: str, raw: str) -> str:
    """Check the name of a language. WebAssembly passes here: `run` says that this version lacks WebAssembly."""
    return raw if raw == "wasm" else one_of(LANGUAGES)(name, raw)


def isolation(name: str, raw: str) -> str:
    """Check a level of isolation. The error for the old word `kernel` gives the new word."""
    if raw == "kernel":
        raise Problem(f"{name} kernel is now called shared-kernel", fix=f"write: {name} shared-kernel")
    return one_of(ISOLATION)(name, raw)


def seconds(name: str, raw: str) -> str:
    """Check a number of seconds above zero."""
    value = number(raw)
    if value is None:
        raise Problem(f"{name} {raw!r} is not a number of seconds", fix=f"write, for 90 seconds: {name} 90")
    if not value > 0:
        raise Problem(f"{name} {raw} leaves no time to run", fix=f"give more than 0 seconds: {name} 30")
    return raw


def limit(name: str, raw: str) -> str:
    """Check KEY=VALUE with a key of Limits."""
    key, equals, value = raw.partition("=")
    if key not in LIMITS:
        near = nearest(key, LIMITS)
        fix = f"did you mean {name} {near}={value or _EXAMPLES[LIMITS[near]]}? " if near else ""
        raise Problem(f"{name} {raw!r}: there is no limit {key!r}", fix=f"{fix}limits are: {', '.join(LIMITS)}")
    kind = LIMITS[key]
    if not equals or not value or (kind != "word" and kind != "size" and number(value) is None):
        what = "a whole number" if kind == "integer" else f"a {kind}"
        raise Problem(f"{name} {raw!r}: {key} takes {what}", fix=f"for example: {name} {example(key)}")
    return raw


def example(key: str) -> str:
    """Return KEY=VALUE as --limit takes it."""
    return f"{key}={_EXAMPLES[LIMITS[key]]}"


def secret(name: str, raw: str) -> str:
    """Check NAME@HOST[,HOST]."""
    variable, at, hosts = raw.partition("@")
    if not at or not variable or not all(hosts.split(",")):
        raise Problem(
            f"{name} {raw!r} does not say which host may get it",
            fix=f"write the variable and the host: {name} {variable or 'API_TOKEN'}@api.example.com",
        )
    return raw


def filled(name: str, raw: str) -> str:
    """Check a path or name: not empty, and without NUL."""
    if not raw:
        raise Problem(f"{name} was given an empty value", fix=f"give it a value, or leave {name} out")
    if "\0" in raw:
        raise Problem(f"{name} {raw!r} holds a NUL character", fix="no path or name can hold one: remove it")
    return raw


def number(raw: str) -> float | None:
    """Return `raw` as a finite number, or None."""
    try:
        value = float(raw)
    except ValueError:
        return None
    return value if value - value == 0 else None


def sandbox_options() -> list[Option]:
    """Return the options that run, exec and shell share."""
    return [*policy_options(), *_HOW]


def policy_options() -> list[Option]:
    """Return the options that make a policy."""
    return _POLICY


_POLICY = [
    Option("--ro", value="PATH[:DST]", check=filled),
    Option("--rw", value="PATH[:DST]", check=filled),
    Option("--copy", value="PATH[:DST]", check=filled),
    Option("--hide", value="PATH", check=filled),
    Option("--allow-net", value="HOST[:PORT]", check=filled),
    Option("--deny-net", value="HOST", check=filled),
    Option("--secret", value="NAME@HOST[,HOST]", check=secret),
    Option("--env", short="-e", value="NAME[=VALUE]", check=filled),
    Option("--timeout", value="S", check=seconds),
    Option("--memory", value="SIZE", check=filled),
    Option("--limit", value="KEY=VALUE", check=limit),
    Option("--policy", short="-p", value="NAME|FILE", check=filled),
    Option("--isolation", value="LEVEL", check=isolation),
    Option("--strict"),
]
_HOW = [
    Option("--backend", short="-b", value="NAME", check=backend_name),
    Option("--image", short="-i", value="NAME", check=filled),
    Option("--cwd", short="-C", value="PATH", check=filled),
    Option("--tty", short="-t"),
    Option("--json"),
    Option("--report", value="FILE", check=filled),
    Option("--net-log", value="FILE", check=filled),
    Option("--explain"),
    Option("--raw"),
    Option("--quiet", short="-q"),
]


def exec_table() -> Table:
    """Return the table of `ringfence exec`."""
    return Table("exec", sandbox_options(), command=True)


def shell_table() -> Table:
    """Return the table of `ringfence shell`."""
    from ringfence.cli.launch import snapshot_name

    own = [Option("--keep", value="NAME", check=snapshot_name), Option("--from", value="NAME", check=snapshot_name)]
    return Table("shell", [*own, *sandbox_options()], command=True)


def run_table() -> Table:
    """Return the table of `ringfence run`."""
    own = [
        Option("--code", short="-c", value="CODE"),
        Option("--language", short="-l", value="NAME", check=language),
    ]
    return Table("run", [*own, *sandbox_options()], command=True)


def doctor_table() -> Table:
    """Return the table of `ringfence doctor`."""
    policy = Option("--policy", short="-p", value="NAME|FILE", check=filled)
    return Table("doctor", [policy, Option("--fix"), Option("--json")])


def attack_table() -> Table:
    """Return the table of `ringfence attack`."""
    where = Option("--backend", short="-b", value="NAME", check=backend_name)
    return Table("attack", [where, Option("--list"), Option("--json")])


def image_table() -> Table:
    """Return the table of `ringfence image`."""
    preset = Option("--preset", value="PRESET", check=one_of(("python", "data", "node", "polyglot")))
    return Table("image", [preset, Option("--json"), Option("--no-cache"), Option("--yes")])


def policy_table() -> Table:
    """Return the table of `ringfence policy`."""
    return Table("policy", [*policy_options(), Option("--json")])
