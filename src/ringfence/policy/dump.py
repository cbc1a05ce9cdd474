"""Policies as TOML, every key written out. `loads(to_toml(policy)) == policy`."""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.checks import format_size
from ringfence.policy.secrets import origin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Policy
    from ringfence.policy.secrets import Secret
    from ringfence.values import Struct

_SIZES = ("memory", "disk", "output", "upload", "download")
_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def to_toml(policy: Policy) -> str:
    """Raises PolicyError for a secret that has no `from_env` or `from_file`: a policy file holds no values."""
    lines = ["version = 1"]
    lines += [_pair(name, getattr(policy, name)) for name in ("isolation", "strict", "commands")]
    lines += ["", "[limits]", *_fields(policy.limits)]
    lines += ["", "[network]", *_fields(policy.network, leave_out=("rules",))]
    for rule in policy.network.rules:
        lines += ["", "[[network.rules]]", *_fields(rule)]
    for mount in policy.mounts:
        lines += ["", "[[mounts]]", *_fields(mount)]
    if policy.env:
        lines += ["", "[env]", *(_pair(name, policy.env[name]) for name in sorted(policy.env))]
    for secret in policy.secrets:
        lines += ["", "[[secrets]]", *_fields(secret), _origin(secret)]
    return "\n".join(lines) + "\n"


def _fields(value: Struct, leave_out: tuple[str, ...] = ()) -> list[str]:
    shown = [name for name in type(value).__fields__ if name not in leave_out]
    return [_pair(name, getattr(value, name)) for name in shown if getattr(value, name) is not None]


def _origin(secret: Secret) -> str:
    source = origin(secret)
    if source is None:
        key = "secrets.value"
        fix = f'make it with Secret.from_env("{secret.name}", …) or Secret.from_file(…)'
        raise PolicyError(f"secret {secret.name} holds its value itself, which no file may", key=key, fix=fix)
    return _pair(*source)


def _pair(name: str, value: object) -> str:
    key = name if _BARE.issuperset(name) else _quote(name)
    if name in _SIZES and isinstance(value, int):
        return f"{key} = {_quote(format_size(value))}"
    return f"{key} = {_value(value)}"


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case int():
            return str(value)
        case tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return _quote(str(value))


def _quote(text: str) -> str:
    """A basic string: quotes, backslashes and everything that is not printable escaped."""
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    return f"\\u{ord(char):04X}" if ord(char) < 0x10000 else f"\\U{ord(char):08X}"
