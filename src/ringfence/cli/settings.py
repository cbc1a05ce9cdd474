"""Turn sandbox options into a policy and settings of a run: the base policy first, the options on top."""

from __future__ import annotations

import os

from ringfence.cli.console import Problem
from ringfence.cli.options import LIMITS, example
from ringfence.policy.model import mount_path
from ringfence.shared.paths import is_within
from ringfence.text import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.options import CommandLine
    from ringfence.policy import Limits, Mount, Network, Policy
    from ringfence.values import BackendName, Isolation, MountMode, PresetName

MODES: dict[str, MountMode] = {"--ro": "ro", "--rw": "rw", "--copy": "copy"}
PRESETS: tuple[PresetName, ...] = ("offline", "dev", "hostile")
FOLDER = "~/.config/ringfence/policies"


class Settings:
    """The options of run, exec and shell, checked and combined."""

    __slots__ = (
        *("backend", "cwd", "explain", "image", "keep", "net_log", "policy", "raw", "report"),
        *("start_from", "tty"),
    )

    def __init__(self, given: CommandLine, base: PresetName) -> None:
        """Check all options. Raises Problem or PolicyError for the first mistake; starts nothing."""
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

    def _ours(self, name: str, given: CommandLine) -> str | None:
        """Return the path of an output file. Raises Problem for a folder that the guest may write (J02, A04)."""
        path = given.last(name)
        if path is None:
            return None
        real = os.path.realpath(path)
        for mount in self.policy.mounts:
            if mount.mode == "rw" and is_within(real, os.path.realpath(source_of(mount))):
                raise Problem(
                    f"{name} {path} is in a folder that the guest may write, so the guest could replace the file",
                    fix=f"name a file elsewhere: {name} /tmp/{os.path.basename(path)}",
                )
        return path


def check_terminal(given: CommandLine, fix: str) -> None:
    """Raise Problem when there is no terminal for the guest, or --json would write to the same terminal."""
    if not given.has("--explain"):
        from ringfence.cli.terminal import require

        require(fix)
    if given.has("--json"):
        raise Problem("--json has no place on a terminal", fix="to get the object in a file: --report FILE")


def policy_from(given: CommandLine, base: PresetName) -> Policy:
    """Return the policy named by --policy, else the preset `base`, with the options on top."""
    from ringfence.policy import Policy

    named = given.last("--policy")
    if named is None:
        policy = Policy.preset(base)
    else:
        policy = find_policy(named)
    if not given.options:
        return policy
    return _with_options(policy, given)


def _with_options(policy: Policy, given: CommandLine) -> Policy:
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


def _limits(limits: Limits, given: CommandLine) -> Limits:
    from ringfence.errors import PolicyError
    from ringfence.values import replace

    named: set[str] = set()
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
        named.add(key)
    if "timeout_s" in named:
        # A user who sets five minutes means five minutes: clocks that no option names must not end the run sooner.
        longer = {key: limits.timeout_s for key in ("cpu_time_s", "lifetime_s") if key not in named}
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


def _env(given: CommandLine) -> dict[str, str]:
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
        near = nearest(name, os.environ)
        raise Problem(
            f"{option} {name}: there is no variable {name} here to take the value from",
            fix=f"did you mean {near}?" if near else fix,
            code="variable-missing",
        )
    return value


def _network(network: Network, given: CommandLine) -> Network:
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


def _with_secrets(policy: Policy, given: CommandLine) -> Policy:
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


def _check_secret_name(name: str, given: CommandLine) -> None:
    if "=" in name:  # the text after = may be the secret's value: do not show it again
        shown = name.partition("=")[0]
        message = f"--secret {shown}: never give the value here, where every user of this machine can read it"
        fix = f"set a variable and name it: read -rs {shown}; export {shown}; … --secret {shown}@HOST"
        raise Problem(message, fix=fix)
    if sum(raw.partition("@")[0] == name for option, raw in given.options if option == "--secret") > 1:
        raise Problem(f"--secret {name} is given twice", fix=f"name its hosts together: --secret {name}@HOST,HOST")


def _say_unreachable(network: Network, given: CommandLine) -> None:
    """Raise Problem for a secret whose host the guest cannot reach, in the words of the options."""
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


# Which host paths are shown inside (--ro, --rw, --copy, --hide), and in which folder a guest starts.


def mounts_from(options: list[tuple[str, str]], base: tuple[Mount, ...]) -> tuple[Mount, ...]:
    """Return the policy's mounts with the options on top: a mount at the same place is replaced, --hide goes to all."""
    from ringfence.errors import PolicyError
    from ringfence.policy import Mount
    from ringfence.values import replace

    added: dict[str, Mount] = {}
    for name, raw in options:
        if name in MODES:
            source, target = _split(name, raw)
            try:
                mount = Mount(source, target, mode=MODES[name])
            except PolicyError as error:
                fix = error.fix if target is not None else "it is never shown; name the folder that is needed"
                raise Problem(f"{name} {raw}: {error}", fix=fix, code=error.code) from None
            if mount_path(mount) in added:
                raise Problem(f"{name} {raw}: {mount_path(mount)} is shown twice", fix="leave one of the two out")
            added[mount_path(mount)] = mount
    mounts = [mount for mount in base if mount_path(mount) not in added] + list(added.values())
    for name, raw in options:
        if name == "--hide":
            for index, relative in _holders(raw, mounts):
                mounts[index] = replace(mounts[index], hide=(*mounts[index].hide, relative))
    return tuple(mounts)


def source_of(mount: Mount) -> str:
    """Return the host path of a mount."""
    return os.fspath(mount.source)


def absolute(path: str) -> str:
    """Return a host path from the root on, with its links as named.

    Where `..` would cross a link, links are followed if only root could have made them (L16).
    """
    here = "/" if os.path.isabs(path) else working_folder()
    if here is None:
        raise Problem(
            f"{path}: the folder this shell is in was removed",
            fix="cd to a folder that exists, or write /…",
        )
    whole = os.path.join(here, path)
    if ".." not in path.split("/"):
        return os.path.normpath(whole)
    from ringfence.policy.host_paths import LinkError, without_links

    try:
        return without_links(whole)
    except LinkError as error:
        raise Problem(f"{path}: {error.strerror}", fix=error.fix, code="link") from None
    except OSError:
        return os.path.normpath(whole)  # the path does not exist, which is reported where it is used


def working_folder() -> str | None:
    """Return the folder this process was started in, or None when that folder was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def inside(path: str, mounts: tuple[Mount, ...]) -> str | None:
    """Return where the host's `path` is inside, below the deepest mount around it. None when not shown."""
    holders = [mount for mount in mounts if is_within(path, source_of(mount))]
    if not holders:
        return None
    mount = max(holders, key=lambda each: len(source_of(each)))
    if is_hidden(path, (mount,)):
        return None
    return os.path.normpath(os.path.join(mount_path(mount), os.path.relpath(path, source_of(mount))))


def is_hidden(path: str, mounts: tuple[Mount, ...]) -> bool:
    """Return whether --hide or the policy hides the host's `path`."""
    return any(is_within(path, os.path.join(source_of(mount), hidden)) for mount in mounts for hidden in mount.hide)


def start_folder(mounts: tuple[Mount, ...]) -> str | None:
    """Return this folder's path inside if the folder, or a part, is shown; else None, which means /workspace."""
    here = working_folder()
    if here is None:
        return None
    there = inside(here, mounts)
    if there is not None:
        return there
    return here if any(is_within(mount_path(mount), here) for mount in mounts) and here != "/" else None


def _split(name: str, raw: str) -> tuple[str, str | None]:
    if os.path.lexists(raw):
        return absolute(raw), None
    source, colon, target = raw.rpartition(":")
    if colon and source and os.path.lexists(source):
        if not target.startswith("/"):
            fix = f"the place inside starts with /: {name} {source}:/{target.lstrip('./') or 'data'}"
            raise Problem(f"{name} {raw}: {target!r} is not a whole path", fix=fix)
        return absolute(source), target
    missing = source if colon and target.startswith("/") else raw
    fix = f"check the name, or make it first: mkdir -p {missing}"
    if missing.startswith("~"):
        fix = f"the shell left ~ as it is: write {name} {missing} with a space between, or the whole path"
    raise Problem(f"{name} {missing}: there is no such file or folder on this machine", fix=fix, code="mount-missing")


def _holders(raw: str, mounts: list[Mount]) -> list[tuple[int, str]]:
    """Return every mount that shows a path, with the path below each: a forgotten mount would show a hidden file."""
    path = absolute(raw)
    found = [(index, below) for index, mount in enumerate(mounts) if (below := _below(path, source_of(mount)))]
    if any(below == "." for _, below in found):
        raise Problem(f"--hide {raw}: the same path is shown", fix="leave one of the two options out")
    if not found:
        raise Problem(
            f"--hide {raw}: no folder around it is shown, so it is absent already",
            fix="leave it out, or show its folder: --ro, --rw or --copy FOLDER",
        )
    return [(index, below) for index, below in found if not _covered(index, below, mounts)]


def _below(path: str, folder: str) -> str | None:
    """Return `path` relative to `folder`, by name or after following links. None when `path` is elsewhere."""
    if is_within(path, folder):
        return os.path.relpath(path, folder)
    parent, name = os.path.split(path)
    real, folder = os.path.join(os.path.realpath(parent), name), os.path.realpath(folder)
    return os.path.relpath(real, folder) if is_within(real, folder) else None


def _covered(index: int, below: str, mounts: list[Mount]) -> bool:
    """Return whether another mount covers that place of the mount `index`."""
    own = mount_path(mounts[index])
    place = os.path.normpath(os.path.join(own, below))
    over = [mount_path(mount) for mount in mounts if is_within(place, mount_path(mount))]
    return max(over, key=len) != own


# Policies by name: a preset, a file in the user's own folder, or a named file. The working directory is not searched.


def find_policy(name: str) -> Policy:
    """Return the policy that NAME|FILE means. Raises Problem when there is none, PolicyError for a wrong policy."""
    from ringfence.policy import Policy

    for preset in PRESETS:
        if name == preset:
            return Policy.preset(preset)
    from ringfence.errors import PolicyError

    path = path_of(name)
    try:
        return Policy.load(path)
    except PolicyError as error:
        if error.line is None:
            raise
        raise Problem(f"{path}:{error.line}: {error}", fix=error.fix, code=error.code) from None


def path_of(name: str) -> str:
    """Return the existing policy file that NAME|FILE means. Raises Problem."""
    own = own_policies()
    if name in own:
        return own[name]
    if name.endswith(".toml"):
        return _checked_file(name)
    if os.path.exists(name):
        raise Problem(f"{name!r} is not a policy file", fix="a policy file's name ends in .toml")
    near = nearest(name, [*PRESETS, *own])
    fix = f"did you mean {near}? " if near else ""
    raise Problem(
        f"there is no policy {name!r}",
        fix=f"{fix}presets are {', '.join(PRESETS)}; yours are in {FOLDER}; the name of a file ends in .toml",
        code="policy-not-found",
    )


def own_policies() -> dict[str, str]:
    """Return name and path of each policy in the user's folder."""
    folder = os.path.expanduser(FOLDER)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    own = {name.removesuffix(".toml"): f"{folder}/{name}" for name in names if name.endswith(".toml")}
    return {name: path for name, path in own.items() if name}


def _checked_file(path: str) -> str:
    if os.path.isdir(path):
        raise Problem(
            f"{path!r} is a folder, not a policy file", fix="name a .toml file in it", code="policy-not-found"
        )
    if not os.path.exists(path):
        raise Problem(
            f"there is no file {path!r}",
            fix="to write one: ringfence policy show dev > FILE.toml; to see your policies: ringfence policy list",
            code="policy-not-found",
        )
    return path
