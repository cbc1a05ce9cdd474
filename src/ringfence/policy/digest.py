"""Makes the digest of a policy: SHA-256 over canonical JSON. On the launch path: imports neither json nor hashlib."""

from __future__ import annotations

import sys

from ringfence.values import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Policy

_PLAIN = frozenset(map(chr, range(32, 127))) - frozenset('"\\')


def digest(policy: Policy) -> str:
    """Return hex digits that are the same for equal policies, on every machine and Python."""
    return _sha256(canonical(policy).encode("ascii"))


def canonical(value: object) -> str:
    """Return a value as canonical JSON: ASCII, no spaces, fields in the order of their class, other keys sorted."""
    if isinstance(value, Struct):
        names = type(value).__fields__
        return "{" + ",".join(f"{_quote(name)}:{canonical(_content(value, name))}" for name in names) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quote(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        return _quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    raise TypeError(f"a {type(value).__name__} has no canonical form")


def _content(value: Struct, name: str) -> object:
    """Return a field's value; for `isolation` the older word "kernel", which the digests of snapshots on disk have."""
    content = getattr(value, name)
    return "kernel" if name == "isolation" and content == "shared-kernel" else content


def _quote(text: str) -> str:
    if _PLAIN.issuperset(text):
        return f'"{text}"'
    units = text.encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2))
    return '"' + "".join(chr(code) if chr(code) in _PLAIN else f"\\u{code:04x}" for code in codes) + '"'


def _sha256(data: bytes) -> str:
    # hashlib loads OpenSSL, about 3 ms; these modules are the interpreter's own. The name is chosen by the version,
    # because Python searches every directory for a module that does not exist, each time.
    try:
        if sys.version_info >= (3, 12):
            from _sha2 import sha256  # type: ignore[import-not-found]  # typeshed leaves it out
        else:
            from _sha256 import sha256  # type: ignore[import-not-found]  # the same
    except ImportError:
        from hashlib import sha256
    return str(sha256(data).hexdigest())
