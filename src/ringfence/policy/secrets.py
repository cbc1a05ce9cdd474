"""Secrets: values the guest never holds. The value lives in one private slot and leaves it only by `reveal`."""

from __future__ import annotations

import errno
import os
import stat

from ringfence.errors import PolicyError
from ringfence.policy.checks import choice, each, host_path, identifier, items, shorten, variable
from ringfence.policy.http import reachable_host
from ringfence.values import Struct, fill, final, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, Self

    from ringfence.policy.checks import Check
    from ringfence.values import HostPath, Inject, Strings


_LARGEST = 65_536


def _hosts(value: object, key: str) -> tuple[str, ...]:
    if not items(value, key):
        raise PolicyError(f"{key} is empty: the secret would never be used", key=key, fix="name the hosts that get it")
    return each(value, key, reachable_host)


def _inject(value: object, key: str) -> tuple[Inject, ...]:
    if not items(value, key):
        raise PolicyError(f"{key} is empty: the secret would never be used", key=key, fix='write ["header"]')
    return each(value, key, choice("header", "query", "basic"))


SECRET_CHECKS: dict[str, Check] = {"name": identifier, "hosts": _hosts, "inject": _inject}


@final
class Secret(Struct):
    """A value the guest never holds: it sees a placeholder, the gateway swaps it for `hosts`.

    repr, equality, digest and pickling leave the value out.
    """

    name: str
    hosts: tuple[str, ...]
    inject: tuple[Literal["header", "query", "basic"], ...]
    _value: str | None
    _from_env: str | None
    _from_file: str | None

    def __init__(
        self,
        name: str,
        value: str,
        *,
        hosts: Strings,
        inject: tuple[Literal["header", "query", "basic"], ...] = ("header",),
    ) -> None:
        given = {"name": name, "hosts": hosts, "inject": inject}
        fill(self, {part: SECRET_CHECKS[part](given[part], f"secrets.{part}") for part in given})
        put(self, "_value", _checked_value(value, self.name))

    @classmethod
    def from_env(cls, name: str, *, hosts: Strings, variable: str | None = None) -> Self:
        """The host's variable of the same name, or `variable`, read now. PolicyError when it is not set."""
        source = name if variable is None else variable
        secret = deferred(name, hosts=hosts, from_env=source)
        reveal(secret)
        return secret

    @classmethod
    def from_file(cls, name: str, path: HostPath, *, hosts: Strings) -> Self:
        """The content of a host file, read now, without its last line break. PolicyError when it cannot be read."""
        secret = deferred(name, hosts=hosts, from_file=path)
        reveal(secret)
        return secret

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.name, self.hosts, self.inject, self._from_env, self._from_file)


def deferred(
    name: str,
    *,
    hosts: Strings,
    inject: tuple[Inject, ...] = ("header",),
    from_env: str | None = None,
    from_file: HostPath | None = None,
) -> Secret:
    """A secret whose value is read by the first `reveal`: policy files are checked where it is not set."""
    secret = Secret(name, "-", hosts=hosts, inject=inject)
    put(secret, "_value", None)
    if from_env is not None:
        put(secret, "_from_env", variable(from_env, "secrets.from_env"))
    if from_file is not None:
        put(secret, "_from_file", host_path(from_file, "secrets.from_file"))
    return secret


def origin(secret: Secret) -> tuple[str, str] | None:
    """`("from_env", variable)` or `("from_file", path)`; None when the value was given itself."""
    variable_name, path = _slots(secret, "_from_env", "_from_file")
    if variable_name is not None:
        return "from_env", variable_name
    return None if path is None else ("from_file", path)


def reveal(secret: Secret) -> str:
    """The value, for the gateway alone. PolicyError when its variable or file is not there."""
    (value,) = _slots(secret, "_value")
    if value is None:
        value = _read(secret)
        put(secret, "_value", value)
    return value


def _slots(secret: Secret, *names: str) -> list[str | None]:
    """Private slots, which are this module's own."""
    return [getattr(secret, name) for name in names]


def _rebuild(
    name: str,
    hosts: tuple[str, ...],
    inject: tuple[Inject, ...],
    from_env: str | None,
    from_file: str | None,
) -> Secret:
    return deferred(name, hosts=hosts, inject=inject, from_env=from_env, from_file=from_file)


def _checked_value(value: object, name: str) -> str:
    """Never shows the value, whatever is wrong with it (I03)."""
    key = "secrets.value"
    if not isinstance(value, str):
        raise PolicyError(f"the value of secret {name} must be a string, not {type(value).__name__}", key=key)
    if not value or len(value) > _LARGEST:
        raise PolicyError(f"the value of secret {name} must have 1 to {_LARGEST} characters", key=key)
    if not value.isprintable() or not value.isascii():
        # A line break would let the value add headers of its own to a request.
        fix = "store it without line breaks and control characters"
        raise PolicyError(f"the value of secret {name} has characters no header can carry", key=key, fix=fix)
    return value


def _read(secret: Secret) -> str:
    source = origin(secret)
    if source is None:
        fix = "make the secret anew where it is used: pickling leaves the value out"
        raise PolicyError(f"secret {secret.name} came without its value", key="secrets.value", fix=fix)
    kind, place = source
    if kind == "from_env":
        found = os.environ.get(place)
        if found is None:
            fix = f"set it: export {place}=…"
            message = f"secret {secret.name}: the variable {shorten(place)} is not set"
            raise PolicyError(message, key="secrets.from_env", fix=fix)
        return _checked_value(found, secret.name)
    return _checked_value(_read_file(secret.name, place), secret.name)


def _read_file(name: str, path: str) -> str:
    key = "secrets.from_file"
    try:
        data = read_regular(path, _LARGEST)
    except OSError as error:
        raise PolicyError(f"secret {name}: cannot read {shorten(path)}: {error.strerror}", key=key) from None
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise PolicyError(f"secret {name}: {shorten(path)} is not UTF-8 text", key=key) from None


# ── files that a person named, or where a guest may have put something: regular, read once, capped


def read_regular(path: str, largest: int) -> bytes:
    """The bytes of a regular file of at most `largest`. OSError otherwise; a FIFO or device never blocks (A24)."""
    descriptor = _open(path)
    try:
        data = _read_at_most(descriptor, largest + 1)
    finally:
        os.close(descriptor)
    if len(data) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest} bytes", path)
    return data


def read_head(path: str, most: int) -> bytes:
    """The first `most` bytes of a regular file, whatever its size; OSError as `read_regular`."""
    descriptor = _open(path)
    try:
        return _read_at_most(descriptor, most)
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    _check(os.stat(path), path)  # before it is opened: a device may act on that alone
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(found: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)


def _read_at_most(descriptor: int, most: int) -> bytes:
    # Counted while reading: the size that stat gives may be 0 for a file without end (A25).
    data = b""
    while len(data) < most:
        part = os.read(descriptor, most - len(data))
        if not part:
            break
        data += part
    return data
