"""Owns the seccomp filters of the process backend: the table of `table.py` compiled to classic BPF.

On the launch path: imports `struct` alone. Nothing here runs a system call; the guest side installs the bytes.
"""

from __future__ import annotations

import struct

from ringfence.plan.seccomp import table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

CONTROLS = table.CONTROLS

_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_OFFSET_NR, _OFFSET_ARCH = 0, 4
_LOAD, _AND, _JUMP, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x05, 0x15, 0x35, 0x45, 0x06
_REACH = 250  # a conditional jump spans 255; the rest is room for the two jumps `_branch` may put before it

_compiled: dict[str, bytes] = {}  # by layer: every sandbox has the same two


def guest_filter() -> bytes:
    """Return the allow-list that the spawner puts on itself before any guest exists: an array of struct sock_filter.

    Raises UnsupportedError("machine") off x86_64. The first call compiles (about a millisecond), later calls do not.
    """
    return _filter("guest")


def last_layer() -> bytes:
    """Return the filter that each guest process adds before guest code runs.

    openat2 is ENOSYS; clone with CLONE_PARENT and leases are EPERM. Raises as `guest_filter` does.
    """
    return _filter("last")


def rules_of(layer: str) -> tuple[dict[str, table.Rule], table.Rule]:
    """Return the rules of a layer, "guest" or "last", by the name of the call, and the rule for every other call."""
    if layer == "guest":
        return table.guest_rules(), table.UNKNOWN
    return table.last_rules(), (((), table.ALLOW),)


def compile_rules(rules: Mapping[str, table.Rule], rest: table.Rule, *, check_abi: bool) -> bytes:
    """Return the program of `rules`; `rest` is the rule for all other calls.

    `check_abi`: calls of the 32-bit and x32 ABIs, whose numbers mean other calls, kill the process.
    Raises UnsupportedError("machine") off x86_64.
    """
    _check_machine()
    known = table.numbers()
    program = _Program()
    entry = program.tree(_segments({known[name]: rule for name, rule in rules.items()}, rest))
    return program.finish(entry, check_abi=check_abi)


def describe() -> list[str]:
    """Return the filters for people, a line for each control, in the order of CONTROLS."""
    rules = table.guest_rules()
    plain = sum(rule == (((), table.ALLOW),) for rule in rules.values())
    conditional = sum(len(rule) > 1 for rule in rules.values())
    return [
        f"system calls: {plain} pass, {conditional} pass on conditions, all others are refused",
        "abi: 32-bit and x32 calls kill the process",
        *(f"{control}: {_refused_by(control, rules)}" for control in CONTROLS if control not in ("abi", "unknown")),
        "unknown: every call not named here, and any a newer kernel adds: ENOSYS",
    ]


def _refused_by(control: str, rules: dict[str, table.Rule]) -> str:
    parts = []
    names = [name for name, rule in rules.items() if len(rule) == 1 and rule[0][1][1] == control]
    if names:
        parts.append(", ".join(names))
    parts += [words for name, words in table.CONDITIONS if name == control]
    return f"{'; '.join(parts)}: {' or '.join(_errnos(control, rules))}"


def _errnos(control: str, rules: dict[str, table.Rule]) -> list[str]:
    found: list[str] = []
    for rule in (*rules.values(), *table.last_rules().values()):
        for _, (action, name) in rule:
            errno = table.ERRNO_NAMES.get(action & 0xFFFF, "")
            if name == control and errno not in found:
                found.append(errno)
    return found


def _filter(layer: str) -> bytes:
    if layer not in _compiled:
        _compiled[layer] = compile_rules(*rules_of(layer), check_abi=True)
    return _compiled[layer]


def _check_machine() -> None:
    import os

    machine = os.uname().machine
    if machine != "x86_64":
        from ringfence.errors import UnsupportedError

        raise UnsupportedError(
            f"this version has no system call table for {machine}",
            code="machine",
            fix="use a machine with x86-64: the other backends need the table too",
        )


def _segments(rules: dict[int, table.Rule], rest: table.Rule) -> list[tuple[int, table.Rule]]:
    """Return (first number, rule) of each run of numbers with one rule, from 0 to the end of 32 bits."""
    found: list[tuple[int, table.Rule]] = []
    for number in range(max(rules) + 2):
        rule = rules.get(number, rest)
        if not found or found[-1][1] != rule:
            found.append((number, rule))
    return found


class _Program:
    """A filter that is written from end to start, so that the length of every jump is known.

    A label is the count of instructions from the label to the end, its own included.
    """

    def __init__(self) -> None:
        self._code: list[bytes] = []
        self._returns: dict[int, int] = {}
        self._rules: dict[table.Rule, int] = {}

    def finish(self, entry: int, *, check_abi: bool) -> bytes:
        """Put the checks of the ABI before `entry` and return the whole program."""
        if check_abi:
            entry = self._branch(_JSET, _X32_BIT, self._return(table.KILL_PROCESS), entry)
        entry = self._load(_OFFSET_NR, entry)
        strange = self._return(table.KILL_PROCESS if check_abi else table.RET_ALLOW)
        entry = self._branch(_JEQ, _AUDIT_ARCH_X86_64, entry, strange)
        self._load(_OFFSET_ARCH, entry)
        return b"".join(reversed(self._code))

    def tree(self, segments: list[tuple[int, table.Rule]]) -> int:
        """Write a binary search for the rule of the number in the accumulator; return its label."""
        if len(segments) == 1:
            return self._rule(segments[0][1])
        middle = len(segments) // 2
        above = self.tree(segments[middle:])
        below = self.tree(segments[:middle])
        return self._branch(_JGE, segments[middle][0], above, below)

    def _rule(self, rule: table.Rule) -> int:
        *clauses, (_, (action, _)) = rule
        if not clauses:
            return self._return(action)
        if rule not in self._rules:
            label = self._return(action)
            for checks, (verdict, _) in reversed(clauses):
                label = self._clause(checks, verdict, label)
            self._rules[rule] = label
        return self._rules[rule]

    def _clause(self, checks: tuple[table.Check, ...], action: int, otherwise: int) -> int:
        label = self._return(action)
        for check in reversed(checks):
            label = self._test(check, label, otherwise)
        return label

    def _test(self, check: table.Check, yes: int, no: int) -> int:
        operation, offset, mask, values = check
        if operation == "any-bit":
            return self._load(offset, self._branch(_JSET, mask, yes, no))
        hit, label = (yes, no) if operation == "in" else (no, yes)
        for value in reversed(values):
            label = self._branch(_JEQ, value, hit, label)
        if mask != table.FULL:
            label = self._emit(_AND, mask)
        return self._load(offset, label)

    def _return(self, action: int) -> int:
        label = self._returns.get(action, 0)
        if not label or len(self._code) - label > _REACH:
            label = self._returns[action] = self._emit(_RET, action)
        return label

    def _load(self, offset: int, then: int) -> int:
        if then != len(self._code):
            self._jump(then)
        return self._emit(_LOAD, offset)

    def _branch(self, code: int, value: int, yes: int, no: int) -> int:
        yes, no = self._near(yes), self._near(no)
        here = len(self._code)
        return self._emit(code, value, here - yes, here - no)

    def _near(self, label: int) -> int:
        return label if len(self._code) - label <= _REACH else self._jump(label)

    def _jump(self, label: int) -> int:
        return self._emit(_JUMP, len(self._code) - label)

    def _emit(self, code: int, value: int, yes: int = 0, no: int = 0) -> int:
        self._code.append(struct.pack("=HBBI", code, yes, no, value))
        return len(self._code)
