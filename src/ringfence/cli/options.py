"""Owns how a command line is read: a table per verb says what is known, what takes a value, and how that is checked."""

from __future__ import annotations

from ringfence.cli.console import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from ringfence.cli.console import Console

    Check: TypeAlias = Callable[[str, str], str]


def as_given(name: str, raw: str) -> str:
    """The check that accepts any value."""
    del name
    return raw


class Option:
    """One option. `value` names its value, empty for a switch; `check(name, raw)` returns it or raises Problem."""

    __slots__ = ("check", "name", "short", "value")

    def __init__(self, name: str, *, short: str = "", value: str = "", check: Check = as_given) -> None:
        self.name = name
        self.short = short
        self.value = value
        self.check = check


class Given:
    """What a command line said: options in order, and the words that are no options."""

    __slots__ = ("options", "words")

    def __init__(self) -> None:
        self.options: list[tuple[str, str]] = []
        self.words: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the option was given."""
        return any(given == name for given, _ in self.options)

    def last(self, name: str) -> str | None:
        """The value given last: a person's own comes after an alias's."""
        return next((value for given, value in reversed(self.options) if given == name), None)


class Table:
    """The options of one verb. `command`: the first word that is no option ends them, the rest is the command's."""

    __slots__ = ("by_name", "command", "verb")

    def __init__(self, verb: str, options: Iterable[Option], *, command: bool = False) -> None:
        self.verb = verb
        self.command = command
        self.by_name: dict[str, Option] = {}
        for option in options:
            self.by_name[option.name] = option
            if option.short:
                self.by_name[option.short] = option

    def parse(self, argv: list[str], console: Console) -> Given | None:
        """What `argv` says; None when it asks for help. Raises Problem for the first mistake.

        The whole line is read before it raises, so that `--json` after a mistake still decides how it is told.
        """
        reader = _Reader(self, argv, console)
        given = reader.read()
        if given is None:
            return None
        if reader.mistake is not None:
            raise reader.mistake
        given.options = [(name, self.by_name[name].check(name, value)) for name, value in given.options]
        return given


class _Reader:
    __slots__ = ("argv", "at", "console", "given", "mistake", "table")

    def __init__(self, table: Table, argv: list[str], console: Console) -> None:
        self.table = table
        self.argv = argv
        self.at = 0
        self.console = console
        self.given = Given()
        self.mistake: Problem | None = None

    def read(self) -> Given | None:
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
            # An option where a value should be is a value forgotten, except for code, which may be any text.
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
        from ringfence.cli.names import nearest

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
    """Which of its actions a verb is asked for, and the words after it. Raises Problem, with the nearest."""
    if not words:
        fix = f"one of: {', '.join(actions)}; see: ringfence {verb} --help"
        raise Problem(f"{verb} needs to know what to do", fix=fix)
    if words[0] in actions:
        return words[0], words[1:]
    from ringfence.cli.names import nearest

    near = nearest(words[0], actions)
    guess = f"did you mean: ringfence {verb} {near}? " if near else ""
    raise Problem(f"{verb} has no {words[0]!r}", fix=f"{guess}it has: {', '.join(actions)}")
