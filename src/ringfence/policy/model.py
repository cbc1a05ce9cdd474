"""Defines policies as frozen values: Limits, Rule, Network, Mount, Policy; and Quota.

A value that exists is valid and in canonical form. Nothing here looks at this host.
"""

from __future__ import annotations

import sys

from ringfence.errors import PolicyError, unknown_attribute
from ringfence.policy.checks import (
    below,
    choice,
    each,
    environment,
    flag,
    guest_target,
    host_path,
    integer,
    items,
    listed,
    number,
    parse_size,
    program,
    seconds,
    shorten,
)
from ringfence.policy.hosts import HostPattern, parse_pattern
from ringfence.policy.http import cidr, host, method, path_prefix, reachable_host
from ringfence.policy.secrets import Secret
from ringfence.values import FrozenMap, Struct, fill, final, put, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal, NoReturn, Self

    from ringfence.policy.checks import Check
    from ringfence.values import GuestPath, HostPath, Isolation, MountMode, PresetName, Size, Strings


_KEEP: Any = ...  # a part that replace() leaves as it is
_COUNT = integer((1 << 31) - 1)
_CPUS = number(0.01, 4096)


def _one(value: object, key: str, kind: type[Struct]) -> object:
    if type(value) is kind:
        return value
    fix = f"write {kind.__name__}(…)"
    raise PolicyError(f"{key} must be a {kind.__name__}, not {type(value).__name__}", key=key, fix=fix)


def _typed(value: object, key: str, kind: type[Struct]) -> tuple[object, ...]:
    found = items(value, key)
    for index, item in enumerate(found):
        _one(item, f"{key}[{index}]", kind)
    return found


def allow_patterns(network: Network) -> tuple[HostPattern, ...]:
    """Return the patterns of `network.allow`; () for "public"."""
    return () if network.allow == "public" else tuple([parse_pattern(entry) for entry in network.allow])


def mount_path(mount: Mount) -> str:
    """Return where a mount appears inside."""
    return str(mount.source if mount.target is None else mount.target)


def _refuse_repeated_rules(network: Network) -> None:
    seen = list(allow_patterns(network))
    for index, rule in enumerate(network.rules):
        pattern = parse_pattern(rule.host)
        for other in seen:
            same = (pattern.name, pattern.wildcard) == (other.name, other.wildcard)
            if same and not _ports_of(network, pattern).isdisjoint(_ports_of(network, other)):
                key = f"network.rules[{index}].host"
                fix = "name a host once, in allow or in rules"
                raise PolicyError(f"{key}: {rule.host} is already named as {other}", key=key, fix=fix)
        seen.append(pattern)


def _ports_of(network: Network, pattern: HostPattern) -> set[int]:
    return set(network.ports) if pattern.port is None else {pattern.port}


def _refuse_shared_targets(mounts: tuple[Mount, ...]) -> None:
    seen: dict[str, int] = {}
    for index, mount in enumerate(mounts):
        path = mount_path(mount)
        if path in seen:
            key = f"mounts[{index}].target"
            fix = "give one of them another target"
            raise PolicyError(f"{key}: {shorten(path)} is taken by mounts[{seen[path]}]", key=key, fix=fix)
        seen[path] = index


LIMIT_CHECKS: dict[str, Check] = {
    "timeout_s": seconds,
    "cpu_time_s": seconds,
    "cpus": _CPUS,
    "memory": parse_size,
    "processes": integer(4_194_304),
    "open_files": integer(1_048_576),
    "disk": parse_size,
    "disk_files": _COUNT,
    "output": parse_size,
    "lifetime_s": seconds,
    "idle_s": seconds,
    "on_idle": choice("close", "pause"),
}


@final
class Limits(Struct):
    """Limits of one sandbox. `timeout_s` is for each run or exec; `lifetime_s` for the sandbox."""

    timeout_s: float
    cpu_time_s: float
    cpus: float
    memory: int
    processes: int
    open_files: int
    disk: int
    disk_files: int
    output: int
    lifetime_s: float
    idle_s: float
    on_idle: Literal["close", "pause"]

    def __init__(
        self,
        *,
        timeout_s: float = 30,
        cpu_time_s: float = 30,
        cpus: float = 1,  # share of CPU time, and the number of CPUs the guest sees
        memory: Size = "512M",  # the whole tree, /tmp and /workspace in memory included; no swap
        processes: int = 128,  # threads count
        open_files: int = 1024,
        disk: Size = "100M",  # /workspace and every `copy` mount together
        disk_files: int = 10_000,
        output: Size = "1M",  # kept in a Result: first and last half; streams are not cut
        lifetime_s: float = 3600,  # not counted while paused
        idle_s: float = 3600,  # without a call and without a running process
        on_idle: Literal["close", "pause"] = "close",
    ) -> None:
        given = locals()
        fill(self, {name: check(given[name], f"limits.{name}") for name, check in LIMIT_CHECKS.items()})


RULE_CHECKS: dict[str, Check] = {
    "host": reachable_host,
    "methods": listed(method),
    "paths": listed(path_prefix),
    "protocol": choice("tls", "http", "tcp"),
}


@final
class Rule(Struct):
    """A host that is permitted for some requests only. Checking them needs TLS interception for the host."""

    host: str
    methods: Strings = ()  # empty: any
    paths: Strings = ()  # prefixes, empty: any
    protocol: Literal["tls", "http", "tcp"] = "tls"  # tcp: name pinned, address checked, bytes opaque

    def __post_init__(self) -> None:
        for name, check in RULE_CHECKS.items():
            put(self, name, check(getattr(self, name), f"network.rules.{name}"))
        if self.protocol == "tcp" and (self.methods or self.paths):
            key = "network.rules.protocol"
            fix = 'remove methods and paths, or write protocol = "tls"'
            raise PolicyError(f"the rule for {self.host} is tcp, where no requests are seen", key=key, fix=fix)


def _allow(value: object, key: str) -> tuple[str, ...] | str:
    if value == "public":
        return "public"
    if isinstance(value, str) and value.lower() == "public":
        raise PolicyError(f"{key}: {value!r} is not known", key=key, fix='did you mean "public"?')
    return each(value, key, _listed_host)


def _listed_host(value: object, key: str) -> str:
    host = reachable_host(value, key)
    if host == "public":
        name = key.partition("[")[0].rpartition(".")[2]  # allow, or allow_net as a short form
        fix = f'for every public host, without a list: {name} = "public"'
        raise PolicyError(f"{key}: {value!r} in a list would be a host of that name", key=key, fix=fix)
    return host


def _ports(value: object, key: str) -> tuple[int, ...]:
    if not items(value, key):
        raise PolicyError(f"{key} is empty", key=key, fix="name a port, such as 443")
    return each(value, key, integer(65_535))


NETWORK_CHECKS: dict[str, Check] = {
    "allow": _allow,
    "deny": listed(host),
    "ports": _ports,
    "private": listed(cidr),
    "connections": integer(65_535),
    "upload": parse_size,
    "download": parse_size,
}


@final
class Network(Struct):
    """The hosts that the guest may connect to, by name. Empty means none. `deny` wins."""

    allow: tuple[str, ...] | Literal["public"]
    rules: tuple[Rule, ...]
    deny: tuple[str, ...]
    ports: tuple[int, ...]
    private: tuple[str, ...]
    connections: int
    upload: int
    download: int

    def __init__(
        self,
        *,
        allow: Strings | Literal["public"] = (),  # "a.com", "a.com:8443", "*.a.com" (not a.com itself)
        rules: list[Rule] | tuple[Rule, ...] = (),  # a host is in allow or in rules, not in both
        deny: Strings = (),
        ports: list[int] | tuple[int, ...] = (443, 80),  # for entries that name no port
        private: Strings = (),  # CIDRs a permitted name may resolve to; metadata never
        connections: int = 64,  # open at once
        upload: Size = "100M",
        download: Size = "1G",
    ) -> None:
        given = locals()
        checked = {name: check(given[name], f"network.{name}") for name, check in NETWORK_CHECKS.items()}
        checked["rules"] = _typed(rules, "network.rules", Rule)
        fill(self, checked)
        _refuse_repeated_rules(self)

    @classmethod
    def open(cls) -> Self:
        """Return `Network(allow="public")`: any public address, but no private, loopback or metadata address."""
        return cls(allow="public")


MOUNT_CHECKS: dict[str, Check] = {
    "source": host_path,
    "target": guest_target,
    "mode": choice("ro", "rw", "copy"),
    "hide": listed(below),
    "protect": listed(below),
    "credentials": flag,
}


@final
class Mount(Struct):
    """A host path shown inside. Without `target` the path inside is the same, so that tools keep working.

    A relative `source` is made absolute now, from the working directory; "~" is not expanded.
    """

    source: HostPath
    target: GuestPath | None = None
    mode: MountMode = "ro"
    hide: Strings = ()  # relative to source: shown as absent
    protect: Strings = ()  # kept read-only in an "rw" mount, besides the built-in list
    credentials: bool = False  # accept a source that holds credentials or sockets

    def __post_init__(self) -> None:
        for name, check in MOUNT_CHECKS.items():
            if name != "target" or self.target is not None:
                put(self, name, check(getattr(self, name), f"mounts.{name}"))
        if self.target is None:
            guest_target(self.source, "mounts.source")  # shown at the same path, which must be a possible target


def _commands(value: object, key: str) -> tuple[str, ...] | str:
    if isinstance(value, str) and value != "any":
        fix = f'write [{shorten(value)}], or "any"'
        raise PolicyError(f'{key} must be a list of names or "any", not {shorten(value)}', key=key, fix=fix)
    return "any" if value == "any" else each(value, key, program)


_known_isolation = choice("runtime", "shared-kernel", "own-kernel")


def _isolation(value: object, key: str) -> object:
    if value == "kernel":
        fix = 'isolation = "shared-kernel"'
        raise PolicyError(f'{key}: "kernel" is now called "shared-kernel"', key=key, fix=fix)
    return _known_isolation(value, key)


POLICY_CHECKS: dict[str, Check] = {
    "commands": _commands,
    "env": environment,
    "isolation": _isolation,
    "strict": flag,
}


@final
class Policy(Struct):
    """The rights and limits of one sandbox. The default is closed: no network, no host files, no variables."""

    limits: Limits
    network: Network
    mounts: tuple[Mount, ...]
    commands: tuple[str, ...] | Literal["any"]
    env: Mapping[str, str]
    secrets: tuple[Secret, ...]
    isolation: Isolation
    strict: bool
    _digest: str | None

    def __init__(
        self,
        *,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        network: Network = Network(),  # noqa: B008  # frozen
        mounts: list[Mount] | tuple[Mount, ...] = (),
        commands: Strings | Literal["any"] = "any",  # programs that exist for the guest
        env: Mapping[str, str] = FrozenMap(),
        secrets: list[Secret] | tuple[Secret, ...] = (),
        isolation: Isolation = "shared-kernel",
        strict: bool = False,  # True: refuse a limit that only a weaker mechanism can enforce
    ) -> None:
        given = locals()
        checked = {name: check(given[name], name) for name, check in POLICY_CHECKS.items()}
        checked["limits"] = _one(limits, "limits", Limits)
        checked["network"] = _one(network, "network", Network)
        checked["mounts"] = _typed(mounts, "mounts", Mount)
        checked["secrets"] = _typed(secrets, "secrets", Secret)
        fill(self, checked)
        if mounts:
            _refuse_shared_targets(self.mounts)
        if secrets:
            from ringfence.policy.reach import check_secrets

            check_secrets(self)

    @classmethod
    def preset(cls, name: PresetName) -> Self:
        """Return a preset: `offline` is `Policy()`; `dev` has room to build; `hostile` needs own-kernel and strict."""
        return preset(name)

    @classmethod
    def load(cls, path: HostPath) -> Self:
        """Read TOML. Relative mounts start at the file's folder. Raises PolicyError with the line."""
        from ringfence.policy.load import load

        return load(path)

    @classmethod
    def loads(cls, text: str) -> Self:
        """Read TOML. Mounts must be absolute: a text has no folder. Raises PolicyError with the line."""
        from ringfence.policy.load import loads

        return loads(text)

    def to_toml(self) -> str:
        """Return the policy as TOML. Raises PolicyError for a secret without `from_env` or `from_file`."""
        from ringfence.policy.load import to_toml

        return to_toml(self)

    def explain(self) -> str:
        """Return the policy in sentences."""
        from ringfence.policy.explain import explain

        return explain(self)

    def replace(
        self,
        *,
        limits: Limits = _KEEP,
        network: Network = _KEEP,
        mounts: list[Mount] | tuple[Mount, ...] = _KEEP,
        commands: Strings | Literal["any"] = _KEEP,
        env: Mapping[str, str] = _KEEP,
        secrets: list[Secret] | tuple[Secret, ...] = _KEEP,
        isolation: Isolation = _KEEP,
        strict: bool = _KEEP,
    ) -> Self:
        """Return a copy with some parts changed, checked as a whole."""
        given = locals()
        return replace(self, **{name: given[name] for name in Policy.__fields__ if given[name] is not _KEEP})

    def must_allow(self, request: Policy) -> Self:
        """Return `request` if this policy allows all of it; else raise PolicyError naming each part that does not fit.

        Paths are compared as text: a manager follows links too, before it starts a sandbox.
        """
        from ringfence.policy.narrow import must_allow

        return must_allow(self, request)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown_attribute(self, name, {"narrow": "must_allow"})

    @property
    def digest(self) -> str:
        """SHA-256 over the policy's canonical JSON without secret values, in hex. Computed once."""
        if self._digest is None:
            put(self, "_digest", _sha256(canonical(self).encode("ascii")))
        return str(self._digest)


# ── the digest: SHA-256 over canonical JSON, without json and hashlib, which the launch path does not load ────────

_PLAIN = frozenset(map(chr, range(32, 127))) - frozenset('"\\')


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


# ── presets: they differ in limits and isolation alone, never in network or mounts ────────────────

NAMES = ("offline", "dev", "hostile")


def preset(name: object) -> Policy:
    """Return the preset of a name. Raises PolicyError, with the nearest name, for an unknown name."""
    match choice(*NAMES)(name, "preset"):
        case "dev":
            return Policy(limits=_DEV)
        case "hostile":
            return Policy(isolation="own-kernel", strict=True)
        case _:
            return Policy()


# Room for a build: an hour of wall clock on four CPUs, with CPU time to use all four.
_DEV = Limits(
    timeout_s=3600,
    cpu_time_s=4 * 3600,
    cpus=4,
    memory="4G",
    processes=2048,
    open_files=65_536,
    disk="2G",
    disk_files=500_000,
    output="16M",
    lifetime_s=8 * 3600,
)


# ── the quota of one agent or tenant, over all its sandboxes ──────────────────────────────────────

QUOTA_CHECKS: dict[str, Check] = {
    "sandboxes": integer((1 << 31) - 1),
    "cpus": number(0.01, 65_536),
    "memory": parse_size,
    "disk": parse_size,
    "upload": parse_size,
    "runs_per_minute": integer((1 << 31) - 1),
}


@final
class Quota(Struct):
    """Limits on the sums over all sandboxes of an agent, or of a tenant of a server."""

    sandboxes: int = 8
    cpus: float = 4
    memory: Size = "4G"
    disk: Size = "10G"
    upload: Size = "1G"
    runs_per_minute: int = 600

    def __post_init__(self) -> None:
        for name, check in QUOTA_CHECKS.items():
            put(self, name, check(getattr(self, name), f"quota.{name}"))
