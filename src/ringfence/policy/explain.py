"""Explains a policy in sentences, one a line; what is closed is named as plainly as what is open."""

from __future__ import annotations

from ringfence.policy.checks import format_size
from ringfence.policy.model import mount_path
from ringfence.policy.reach import permitted_and_denied
from ringfence.text import bare_or_in_quotes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Limits, Mount, Network, Policy, Rule
    from ringfence.policy.secrets import Secret

_MODES = {
    "ro": "can be read",
    "rw": "can be read and written",
    "copy": "can be read and written, on a copy; the host's files stay as they are",
}
_ISOLATION = {
    "runtime": "A language runtime alone is accepted as isolation.",
    "shared-kernel": "Isolation by the host's kernel is accepted; a language runtime alone is not.",
    "own-kernel": "Only isolation by a separate kernel (gVisor or a virtual machine) is accepted.",
}


def explain(policy: Policy) -> str:
    """Return what a guest under `policy` can do and use up. Names and hosts are quoted as written in the policy."""
    lines = [
        *network_lines(policy.network),
        *_mounts(policy.mounts),
        _commands(policy.commands),
        _env(policy),
        *(_secret(secret) for secret in policy.secrets),
        *_limits(policy.limits),
        _ISOLATION[policy.isolation],
        _strict(policy.strict),
    ]
    return "\n".join(lines)


def network_lines(network: Network) -> list[str]:
    """Return what can be reached, in sentences."""
    if not network.allow and not network.rules:
        return ["No network: nothing can be reached."]
    lines = []
    ports = _any([str(port) for port in network.ports])
    if network.allow == "public":
        lines.append(f"Every public address can be reached on port {ports}; private and metadata addresses cannot.")
    elif network.allow:
        lines.append(f"{_all(network.allow)} can be reached, on port {ports} where no port is named.")
    lines += [_rule(rule) for rule in network.rules]
    if network.deny:
        lines.append(f"{_all(network.deny)} can never be reached.")
        lines += [f"{host} is permitted and denied: it cannot be reached." for host in permitted_and_denied(network)]
    if network.private:
        lines.append(f"A permitted name may resolve to private addresses in {_all(network.private)}.")
    sizes = f"{format_size(network.upload)} may be sent and {format_size(network.download)} received"
    lines.append(f"At most {network.connections} connections are open at once; {sizes}.")
    return lines


def _rule(rule: Rule) -> str:
    if rule.protocol == "tcp":
        return f"{rule.host} can be reached over TCP; the data is not inspected."
    what = f"{_any(rule.methods)} requests" if rule.methods else "any request"
    where = f" to paths that start with {_any(rule.paths)}" if rule.paths else ""
    how = "its TLS is intercepted to see them" if rule.protocol == "tls" else "over plain HTTP"
    return f"{rule.host} can be reached for {what}{where}; {how}."


def _mounts(mounts: tuple[Mount, ...]) -> list[str]:
    if not mounts:
        return ["No host files are shown except the programs of the image."]
    return [_mount(mount) for mount in mounts]


def _mount(mount: Mount) -> str:
    path = mount_path(mount)
    at = "" if path == mount.source else f" is shown as {bare_or_in_quotes(path)} and"
    parts = [f"{bare_or_in_quotes(str(mount.source))}{at} {_MODES[mount.mode]}"]
    if mount.hide:
        emptied = f"with {_all(mount.hide)} shown as empty and read-only"  # no overlay, which would not write through
        parts.append(emptied if mount.mode == "rw" else f"without {_all(mount.hide)}")
    if mount.mode == "rw" and mount.protect:
        parts.append(f"with {_all(mount.protect)} read-only")
    if mount.credentials:
        parts.append("even if it holds credentials or sockets")
    return ", ".join(parts) + "."


def _commands(commands: tuple[str, ...] | str) -> str:
    if commands == "any":
        return "Every program of the image can be run."
    return f"Of the image's programs only {_all(tuple(commands))} exist." if commands else "No program exists inside."


def _env(policy: Policy) -> str:
    if not policy.env:
        return "No variable of the host enters."
    return f"No variable of the host enters; the policy sets {_all(tuple(sorted(policy.env)))}."


def _secret(secret: Secret) -> str:
    places = _any(secret.inject)
    return f"The guest sees a placeholder for {secret.name}; its value goes only to {_all(secret.hosts)}, as {places}."


def _limits(limits: Limits) -> list[str]:
    end = "closed" if limits.on_idle == "close" else "paused"
    return [
        f"Each run or exec has {_time(limits.timeout_s)}, and {_time(limits.cpu_time_s)} of CPU time.",
        f"CPUs: {limits.cpus:g}. Memory: {format_size(limits.memory)} and the file systems in memory, no swap.",
        f"Processes and threads: {limits.processes}, each with {limits.open_files} open files.",
        f"Disk: {format_size(limits.disk)} in {limits.disk_files} files. Output kept: {format_size(limits.output)}.",
        f"The sandbox lives {_time(limits.lifetime_s)} and is {end} after {_time(limits.idle_s)} without work.",
    ]


def _strict(strict: bool) -> str:
    if strict:
        return "Strict: a limit that only a weaker mechanism could enforce is refused."
    return "Not strict: a weaker mechanism may enforce a limit, and the result says so."


def _time(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _all(items: tuple[str, ...] | list[str]) -> str:
    return _join(items, "and")


def _any(items: tuple[str, ...] | list[str]) -> str:
    return _join(items, "or")


def _join(items: tuple[str, ...] | list[str], word: str) -> str:
    shown = [bare_or_in_quotes(item) for item in items]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {word} {shown[-1]}"
