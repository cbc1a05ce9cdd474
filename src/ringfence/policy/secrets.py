"""Defines secrets, whose values the guest never gets. A value is in a private slot that only `reveal` reads."""

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
    """A value that the guest never gets. The guest sees a placeholder, which the gateway replaces towards `hosts`.

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
        """Return a secret from the host's variable `variable`, or else `name`, read now.

        Raises PolicyError when the variable is not set.
        """
        source = name if variable is None else variable
        secret = deferred(name, hosts=hosts, from_env=source)
        reveal(secret)
        return secret

    @classmethod
    def from_file(cls, name: str, path: HostPath, *, hosts: Strings) -> Self:
        """Return a secret from a host file, read now, without its last line break.

        Raises PolicyError when the file cannot be read.
        """
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
    """Return a secret whose value the first `reveal` reads: a policy file may be checked where no value is set."""
    secret = Secret(name, "-", hosts=hosts, inject=inject)
    put(secret, "_value", None)
    if from_env is not None:
        put(secret, "_from_env", variable(from_env, "secrets.from_env"))
    if from_file is not None:
        put(secret, "_from_file", host_path(from_file, "secrets.from_file"))
    return secret


def origin(secret: Secret) -> tuple[str, str] | None:
    """Return `("from_env", variable)` or `("from_file", path)`; None when the caller gave the value itself."""
    variable_name, path = _slots(secret, "_from_env", "_from_file")
    if variable_name is not None:
        return "from_env", variable_name
    return None if path is None else ("from_file", path)


def reveal(secret: Secret) -> str:
    """Return the value, for the gateway alone. Raises PolicyError when the variable or file is missing."""
    (value,) = _slots(secret, "_value")
    if value is None:
        value = _read(secret)
        put(secret, "_value", value)
    return value


def _slots(secret: Secret, *names: str) -> list[str | None]:
    """Return the values of private slots, which belong to this module."""
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
    """Return a checked value. An error never shows the value, whatever is wrong (I03)."""
    key = "secrets.value"
    if not isinstance(value, str):
        raise PolicyError(f"the value of secret {name} must be a string, not {type(value).__name__}", key=key)
    if not value or len(value) > _LARGEST:
        raise PolicyError(f"the value of secret {name} must have 1 to {_LARGEST} characters", key=key)
    if not value.isprintable() or not value.isascii():
        # A line break would let the value add headers to a request.
        fix = "store it without line breaks and control characters"
        raise PolicyError(f"the value of secret {name} has characters no header can carry", key=key, fix=fix)
    return value


def _read(secret: Secret) -> str:
    source = origin(secret)
    if source is None:
        fix = "make the secret anew where it is used: pickling leaves the value out"
        raise PolicyError(f"secret {secret.name} has no value after pickling", key="secrets.value", fix=fix)
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


# ── files that a person named, and that a guest may have replaced: only regular ones, read once, capped


def read_regular(path: str, largest: int) -> bytes:
    """Return the bytes of a regular file of at most `largest` bytes. Raises OSError for any other file.

    A FIFO or device never blocks (A24).
    """
    descriptor = _open(path)
    try:
        data = _read_at_most(descriptor, largest + 1)
    finally:
        os.close(descriptor)
    if len(data) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest} bytes", path)
    return data


def read_head(path: str, most: int) -> bytes:
    """Return the first `most` bytes of a regular file, whatever its size. Raises OSError as `read_regular` does."""
    descriptor = _open(path)
    try:
        return _read_at_most(descriptor, most)
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    _check(os.stat(path), path)  # before opening: a device may act on being opened
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
    # The bytes are counted while reading: stat may give the size 0 for a file without end (A25).
    data = b""
    while len(data) < most:
        part = os.read(descriptor, most - len(data))
        if not part:
            break
        data += part
    return data
