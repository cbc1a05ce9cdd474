"""Owns how sandbox options become a policy and a way to run: the base policy first, the options on top."""

from __future__ import annotations

import os

from ringfence.cli.console import Problem
from ringfence.cli.shown import MODES, absolute, beneath, inside, mounts_from, source_of, start_folder
from ringfence.cli.tables import LIMITS, example

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.options import Given
    from ringfence.policy import Limits, Network, Policy
    from ringfence.values import BackendName, Isolation, PresetName


class Settings:
    """What the options of run and exec add up to."""

    __slots__ = (
        *("backend", "cwd", "explain", "image", "keep", "net_log", "policy", "raw", "report"),
        *("start_from", "tty"),
    )

    def __init__(self, given: Given, base: PresetName) -> None:
        """Raises Problem, or PolicyError, for the first thing that is wrong; starts nothing."""
        self.tty = given.has("--tty")
        if self.tty:
            check_terminal(given, "leave --tty out")
        self.keep: str | None = None
        self.start_from: str | None = None
        self.policy = policy_from(given, base)
        self.backend: BackendName = given.last("--backend") or "auto"  # type: ignore[assignment]  # its table checks it
        self.image = given.last("--image") or "host"
        self.cwd = _cwd(given.last("--cwd"), self.policy)
        self.report = self._ours("--report", given)
        self.net_log = self._ours("--net-log", given)
        self.explain = given.has("--explain")
        self.raw = given.has("--raw")

    def _ours(self, name: str, given: Given) -> str | None:
        """A file that we write: never where the guest could have put a link, or could write its own (J02, A04)."""
        path = given.last(name)
        if path is None:
            return None
        real = os.path.realpath(path)
        for mount in self.policy.mounts:
            if mount.mode == "rw" and beneath(real, os.path.realpath(source_of(mount))):
                raise Problem(
                    f"{name} {path} is in a folder that the guest may write: it could put its own there",
                    fix=f"name a file elsewhere: {name} /tmp/{os.path.basename(path)}",
                )
        return path


def check_terminal(given: Given, fix: str) -> None:
    """Raises Problem when there is none to give to the guest, or nothing else may be written to it."""
    if not given.has("--explain"):
        from ringfence.cli.terminal import require

        require(fix)
    if given.has("--json"):
        raise Problem("--json has no place on a terminal", fix="for the screen and the object: --report FILE")


def policy_from(given: Given, base: PresetName) -> Policy:
    """The policy named by --policy, else the preset `base`, with the options on top."""
    from ringfence.policy import Policy

    named = given.last("--policy")
    if named is None:
        policy = Policy.preset(base)
    else:
        from ringfence.cli.policies import find

        policy = find(named)
    if not given.options:
        return policy
    return _with_options(policy, given)


def _with_options(policy: Policy, given: Given) -> Policy:
    names = {name for name, _ in given.options}
    if names & {"--timeout", "--memory", "--limit"}:
        policy = policy.replace(limits=_limits(policy.limits, given))
    if names & {"--hide", *MODES}:
        policy = policy.replace(mounts=mounts_from(given.options, policy.mounts))
    if "--env" in names:
        policy = policy.replace(env={**policy.env, **_env(given)})
    if names & {"--allow-net", "--deny-net"}:
        policy = policy.replace(network=_network(policy.network, given))
    if "--secret" in names:
        policy = _with_secrets(policy, given)
    isolation: Isolation | None = given.last("--isolation")  # type: ignore[assignment]  # its table checks it
    if isolation is not None:
        policy = policy.replace(isolation=isolation)
    return policy.replace(strict=True) if "--strict" in names else policy


def _limits(limits: Limits, given: Given) -> Limits:
    from ringfence.errors import PolicyError
    from ringfence.values import replace

    said: set[str] = set()
    for name, raw in given.options:
        key, value = {"--timeout": ("timeout_s", raw), "--memory": ("memory", raw)}.get(name, ("", ""))
        if name == "--limit":
            key, _, value = raw.partition("=")
        if not key:
            continue
        try:
            limits = replace(limits, **{key: _limit_value(key, value)})
        except PolicyError as error:
            shown = "--timeout 90" if name == "--timeout" else f"--limit {example(key)}"
            fix = error.fix or f"for example: {shown}"
            raise Problem(f"{name} {raw}: {error}", fix=fix, code=error.code) from None
        said.add(key)
    if "timeout_s" in said:
        # Who gives it five minutes means five minutes: the clocks that nobody named must not end it sooner.
        longer = {key: limits.timeout_s for key in ("cpu_time_s", "lifetime_s") if key not in said}
        limits = replace(limits, **{key: max(value, getattr(limits, key)) for key, value in longer.items()})
    return limits


def _limit_value(key: str, raw: str) -> str | int | float:
    kind = LIMITS[key]
    if kind == "size":
        return int(raw) if raw.isascii() and raw.lstrip("-").isdigit() else raw
    if kind == "word":
        return raw
    value = float(raw)
    return int(value) if value == int(value) else value


def _env(given: Given) -> dict[str, str]:
    env: dict[str, str] = {}
    for option, raw in given.options:
        if option == "--env":
            name, equals, value = raw.partition("=")
            if not equals:
                value = _host_variable("--env", name, f"give it one: --env {name}=VALUE")
            env[name] = value
    return env


def _host_variable(option: str, name: str, fix: str) -> str:
    value = os.environ.get(name)
    if value is None:
        from ringfence.cli.names import nearest

        near = nearest(name, os.environ)
        raise Problem(
            f"{option} {name}: there is no variable {name} here to take the value from",
            fix=f"did you mean {near}?" if near else fix,
            code="variable-missing",
        )
    return value


def _network(network: Network, given: Given) -> Network:
    from ringfence.values import replace

    allow = network.allow
    for name, host in given.options:
        if name != "--allow-net":
            continue
        if host != "public" and host.lower() == "public":
            raise Problem(f"--allow-net {host} is not known", fix="did you mean --allow-net public?")
        if host == "public":
            allow = "public"
        elif allow == "public":
            if ":" in host:
                raise Problem(
                    f"--allow-net {host} and --allow-net public cannot be together: public has its own ports",
                    fix="leave public out, or set [network] ports in a policy file",
                )
        elif host not in allow:
            allow = (*allow, host)
    deny = (*network.deny, *(host for name, host in given.options if name == "--deny-net"))
    return replace(network, allow=allow, deny=tuple(dict.fromkeys(deny)))


def _with_secrets(policy: Policy, given: Given) -> Policy:
    from ringfence.errors import PolicyError
    from ringfence.policy import Secret

    secrets = {secret.name: secret for secret in policy.secrets}
    for option, raw in given.options:
        if option == "--secret":
            name, _, hosts = raw.partition("@")
            _check_secret_name(name, given)
            _host_variable("--secret", name, f"set it first, without typing it here: read -rs {name}; export {name}")
            secrets[name] = Secret.from_env(name, hosts=hosts.split(","))
    try:
        return policy.replace(secrets=tuple(secrets.values()))
    except PolicyError as error:
        _say_unreachable(policy.network, given)
        raise error from None


def _check_secret_name(name: str, given: Given) -> None:
    if "=" in name:  # whatever stands behind it may be the value: not shown again
        shown = name.partition("=")[0]
        message = f"--secret {shown}: a value is never given here, where everybody on this machine can read it"
        fix = f"set a variable and name it: read -rs {shown}; export {shown}; … --secret {shown}@HOST"
        raise Problem(message, fix=fix)
    if sum(raw.partition("@")[0] == name for option, raw in given.options if option == "--secret") > 1:
        raise Problem(f"--secret {name} is given twice", fix=f"name its hosts together: --secret {name}@HOST,HOST")


def _say_unreachable(network: Network, given: Given) -> None:
    """The host of a secret that nothing lets the guest reach, in the words of the options."""
    for option, raw in given.options:
        for host in raw.partition("@")[2].split(",") if option == "--secret" else ():
            if network.allow != "public" and host not in network.allow:
                raise Problem(f"--secret {raw}: {host} is not reachable", fix=f"add --allow-net {host}", code="policy")


def _cwd(path: str | None, policy: Policy) -> str | None:
    if path is None:
        return start_folder(policy.mounts)
    if path.startswith("/"):
        return path
    whole = absolute(path)
    there = inside(whole, policy.mounts)
    if there is None:
        raise Problem(f"--cwd {path}: {whole} is not shown inside", fix=f"add --ro {path}, or name a place inside")
    return there
