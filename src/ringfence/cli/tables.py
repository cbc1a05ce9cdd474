"""Owns which options each verb knows and what their values may look like. The policy judges what one means."""

from __future__ import annotations

from ringfence.cli.console import Problem
from ringfence.cli.options import Option, Table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.options import Check

BACKENDS = ("auto", "process", "container", "gvisor", "vm", "wasm", "remote")
ISOLATION = ("runtime", "shared-kernel", "own-kernel")
LANGUAGES = ("python", "javascript", "bash", "go", "ruby", "java", "c", "c++", "r", "wasm")

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
    """A check for a closed list of words."""

    def check(name: str, raw: str) -> str:
        if raw in choices:
            return raw
        from ringfence.cli.names import nearest

        near = nearest(raw, choices)
        fix = f"did you mean {name} {near}? " if near else ""
        raise Problem(f"{name} {raw!r} is not known", fix=f"{fix}it takes one of: {', '.join(choices)}")

    return check


def isolation(name: str, raw: str) -> str:
    """A check for a level of isolation, which also knows the old word for one."""
    if raw == "kernel":
        raise Problem(f"{name} kernel is now called shared-kernel", fix=f"write: {name} shared-kernel")
    return one_of(ISOLATION)(name, raw)


def seconds(name: str, raw: str) -> str:
    """A check for a number of seconds above zero."""
    value = number(raw)
    if value is None:
        raise Problem(f"{name} {raw!r} is not a number of seconds", fix=f"write, for 90 seconds: {name} 90")
    if not value > 0:
        raise Problem(f"{name} {raw} leaves no time to run", fix=f"give more than 0 seconds: {name} 30")
    return raw


def limit(name: str, raw: str) -> str:
    """A check for KEY=VALUE with a key of Limits."""
    key, equals, value = raw.partition("=")
    if key not in LIMITS:
        from ringfence.cli.names import nearest

        near = nearest(key, LIMITS)
        fix = f"did you mean {name} {near}={value or _EXAMPLES[LIMITS[near]]}? " if near else ""
        raise Problem(f"{name} {raw!r}: there is no limit {key!r}", fix=f"{fix}limits are: {', '.join(LIMITS)}")
    kind = LIMITS[key]
    if not equals or not value or (kind != "word" and kind != "size" and number(value) is None):
        what = "a whole number" if kind == "integer" else f"a {kind}"
        raise Problem(f"{name} {raw!r}: {key} takes {what}", fix=f"for example: {name} {example(key)}")
    return raw


def example(key: str) -> str:
    """KEY=VALUE as --limit takes it."""
    return f"{key}={_EXAMPLES[LIMITS[key]]}"


def secret(name: str, raw: str) -> str:
    """A check for NAME@HOST[,HOST]."""
    variable, at, hosts = raw.partition("@")
    if not at or not variable or not all(hosts.split(",")):
        raise Problem(
            f"{name} {raw!r} does not say which host may get it",
            fix=f"write the variable and the host: {name} {variable or 'API_TOKEN'}@api.example.com",
        )
    return raw


def filled(name: str, raw: str) -> str:
    """A check for a value that may not be empty, or hold what no path or name can."""
    if not raw:
        raise Problem(f"{name} was given an empty value", fix=f"give it a value, or leave {name} out")
    if "\0" in raw:
        raise Problem(f"{name} {raw!r} holds a NUL character", fix="no path or name can hold one: remove it")
    return raw


def number(raw: str) -> float | None:
    """`raw` as a finite number, None when it is none."""
    try:
        value = float(raw)
    except ValueError:
        return None
    return value if value - value == 0 else None


def sandbox_options() -> list[Option]:
    """What run, exec and shell share: the options that make a policy, and those that say how and what one gets."""
    return [*policy_options(), *_HOW]


def policy_options() -> list[Option]:
    """The options that make a policy."""
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
    Option("--backend", short="-b", value="NAME", check=one_of(BACKENDS)),
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
    """ringfence exec"""
    return Table("exec", sandbox_options(), command=True)


def shell_table() -> Table:
    """ringfence shell"""
    from ringfence.cli.kept import name

    own = [Option("--keep", value="NAME", check=name), Option("--from", value="NAME", check=name)]
    return Table("shell", [*own, *sandbox_options()], command=True)


def run_table() -> Table:
    """ringfence run"""
    own = [
        Option("--code", short="-c", value="CODE"),
        Option("--language", short="-l", value="NAME", check=one_of(LANGUAGES)),
    ]
    return Table("run", [*own, *sandbox_options()], command=True)


def doctor_table() -> Table:
    """ringfence doctor"""
    policy = Option("--policy", short="-p", value="NAME|FILE", check=filled)
    return Table("doctor", [policy, Option("--fix"), Option("--json")])


def attack_table() -> Table:
    """ringfence attack"""
    backend = Option("--backend", short="-b", value="NAME", check=one_of(BACKENDS))
    return Table("attack", [backend, Option("--list"), Option("--json")])


def image_table() -> Table:
    """ringfence image"""
    preset = Option("--preset", value="PRESET", check=one_of(("python", "data", "node", "polyglot")))
    target = Option("--for", value="vm|wasm", check=one_of(("vm", "wasm")))
    return Table("image", [preset, target, Option("--json"), Option("--no-cache"), Option("--yes")])


def policy_table() -> Table:
    """ringfence policy"""
    return Table("policy", [*policy_options(), Option("--json")])
