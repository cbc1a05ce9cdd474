"""Placeholders and values: only this module puts a secret into a request, and the guest never holds a value.

A placeholder is worth nothing: it is random for each sandbox, and only this sandbox's gateway knows what it stands
for. It is swapped in header values (and, where the secret says so, in the query or in basic authentication), for the
secret's own hosts, on connections whose TLS the gateway itself has verified. Anywhere else it is a refusal (I05).
Nothing here may put a value into an error, a log or a repr (I03).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import resource
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import quote

from ringfence.errors import PolicyError
from ringfence.gateway.secrets.scrub import Forms
from ringfence.gateway.types import Refusal
from ringfence.policy.hosts import parse_pattern
from ringfence.policy.secrets import reveal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ringfence.gateway.types import Target
    from ringfence.policy.secrets import Secret

    Headers = list[tuple[bytes, bytes]]

SHORTEST = 8  # characters; a shorter value could not be distinguished from other text in a response
_MARK = b"rf-secret-"
# Headers that say something about the message or the client. A server may show them to others: no value goes there.
_NO_CREDENTIALS = frozenset(
    b"host connection keep-alive transfer-encoding te trailer upgrade expect range referer origin user-agent from via "
    b"forwarded date accept accept-charset accept-encoding accept-language cache-control pragma".split()
)
_NO_CREDENTIAL_PREFIXES = (b":", b"content-", b"if-", b"sec-", b"access-control-", b"x-forwarded-", b"proxy-")

_CORE_FILTER = "/proc/self/coredump_filter"
_NO_MEMORY = b"0"  # no private, shared or mapped memory; gcore obeys this too


class Vault:
    """The secrets of a sandbox and their placeholders. repr and pickling give nothing away."""

    def __init__(self, secrets: Iterable[Secret], held: Mapping[str, str] = {}) -> None:  # never changed
        """Read the values. Raises PolicyError for a secret without a value, or with a value too short to be kept.

        `held`: placeholders, by name, that the memory of a copy holds; they stand for this sandbox's own values.
        """
        self._secrets = tuple(_KeptSecret(secret, held.get(secret.name)) for secret in secrets)
        self._forms: dict[tuple[_KeptSecret, ...], Forms] = {}

    def __repr__(self) -> str:
        return f"Vault({', '.join(kept.name for kept in self._secrets)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a vault stays in its process")

    @property
    def is_empty(self) -> bool:
        """Return whether there is no secret, and therefore no placeholder."""
        return not self._secrets

    @property
    def environment(self) -> dict[str, str]:
        """Return what the guest sees: the placeholder of each secret, by name."""
        return {kept.name: kept.placeholder.decode() for kept in self._secrets}

    def serves(self, name: str, port: int) -> bool:
        """Return whether some secret is for this host, whose TLS must then be intercepted."""
        return any(kept.serves(name, port) for kept in self._secrets)

    def forms(self, target: Target) -> Forms:
        """Return what must not come back from this host: every value that a request may have given the host."""
        served = tuple(kept for kept in self._secrets if kept.serves(target.name, target.port))
        if served not in self._forms:  # a guest can name hosts without end below a wildcard, and forms take time
            self._forms[served] = Forms(kept.value for kept in served)
        return self._forms[served]

    def swap(self, target: Target, path: str, headers: Headers, *, verified: bool) -> tuple[str, Headers]:
        """Return request target and headers with values put in. `verified`: over TLS whose certificate was checked.

        Raises Refusal when a request holds a placeholder of this sandbox whose secret is not for the target.
        """
        for kept in self._secrets:
            if not kept.stands_in(path, headers):
                continue
            if not kept.serves(target.name, target.port):
                raise _for_another_host(kept.name, target)
            if not verified:
                raise _without_tls(kept.name, target)
            path, headers = kept.swapped(path, headers)
        return path, headers


class _KeptSecret:
    """A secret with value and placeholder."""

    def __init__(self, secret: Secret, placeholder: str | None) -> None:
        self.name = secret.name
        self.value = reveal(secret)
        if len(self.value) < SHORTEST:
            raise PolicyError(
                f"the value of secret {secret.name} has fewer than {SHORTEST} characters: "
                "it could not be distinguished from other text in a response",
                key="secrets.value",
                fix="use a longer value",
            )
        made = _MARK.decode() + f"{secret.name}-{os.urandom(16).hex()}"
        self.placeholder = (placeholder or made).encode()
        self._hosts = tuple(parse_pattern(host) for host in secret.hosts)
        self._inject = frozenset(secret.inject)

    def __repr__(self) -> str:
        return f"_KeptSecret({self.name})"

    def serves(self, name: str, port: int) -> bool:
        return any(host.matches(name) and host.port in (None, port) for host in self._hosts)

    def stands_in(self, path: str, headers: Headers) -> bool:
        mark = self.placeholder
        return mark.decode() in path or any(
            mark in value or mark in (_basic(name, value) or b"") for name, value in headers
        )

    def swapped(self, path: str, headers: Headers) -> tuple[str, Headers]:
        if "query" in self._inject:
            before, mark, query = path.partition("?")
            path = before + mark + query.replace(self.placeholder.decode(), quote(self.value, safe=""))
        return path, [(name, self._in_header(name, value)) for name, value in headers]

    def _in_header(self, name: bytes, value: bytes) -> bytes:
        if not _may_carry(name):
            return value
        pair = _basic(name, value) if "basic" in self._inject else None
        if pair is not None and self.placeholder in pair:
            return b"Basic " + base64.b64encode(pair.replace(self.placeholder, self.value.encode()))
        return value.replace(self.placeholder, self.value.encode()) if "header" in self._inject else value


def holds_placeholder(data: bytes) -> bool:
    """Return whether bytes look as if they held a placeholder, of any sandbox."""
    return _MARK in data


def _may_carry(name: bytes) -> bool:
    lower = name.lower()
    return lower not in _NO_CREDENTIALS and not lower.startswith(_NO_CREDENTIAL_PREFIXES)


def _basic(name: bytes, value: bytes) -> bytes | None:
    """Return `user:password` of a basic Authorization header; None for any other header."""
    scheme, _, text = value.partition(b" ")
    if name.lower() != b"authorization" or scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        return None


def _for_another_host(name: str, target: Target) -> Refusal:
    message = f"the secret {name} is not for {target}: its placeholder was in a request to it"
    return Refusal("secret.other-host", message, allow=f'hosts = [..., "{target.name}"] in the secret {name}')


def _without_tls(name: str, target: Target) -> Refusal:
    return Refusal("secret.not-tls", f"the secret {name} goes out over TLS only, not in plain HTTP to {target}")


def leave_no_core() -> None:
    """Keep this process, and what it starts, out of core files from now on (I01). Idempotent.

    The service calls this before it reads a value. The process then writes no core file, and a core file that a tool
    makes holds no memory. A limit of 1 is too small for a core file, and tells the kernel to hand none to a program
    (`core_pattern` with a pipe), which a limit of 0 does not. PR_SET_DUMPABLE would hide the process from its own user,
    and then it could start no sandbox any more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    least = 1 if hard == resource.RLIM_INFINITY or hard >= 1 else 0
    if soft != least:
        resource.setrlimit(resource.RLIMIT_CORE, (least, hard))
    with contextlib.suppress(FileNotFoundError):  # not on this system
        fd = os.open(_CORE_FILTER, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _NO_MEMORY)
        finally:
            os.close(fd)
