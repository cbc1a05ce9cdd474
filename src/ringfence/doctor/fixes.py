"""The commands that fix a host, for root to read and run. Ringfence runs no such command.

Each is a piece of POSIX shell. What no command can fix on this host is written as a comment.
"""

from __future__ import annotations

import os

from ringfence.host.kernel_refusals import DOCTOR, apparmor_profile, apparmor_restricts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.host.kernel_refusals import Cause

_PROFILE = "/etc/apparmor.d/ringfence-launch"
_DROP_IN = "/etc/systemd/system/user@.service.d/delegate.conf"


def for_cause(cause: Cause, launcher: str) -> tuple[str | None, str | None]:
    """Return the fix of a refused step: for a person, and for the script."""
    if cause.fix == DOCTOR:
        if apparmor_restricts() or apparmor_profile() is not None:
            return f"{DOCTOR} | sudo sh   # an AppArmor profile for {launcher} alone", profile_for(launcher)
        return None, None
    if cause.fix is None:
        return None, None
    if cause.fix.startswith("sudo sysctl -w "):
        return cause.fix, lasting_sysctl(cause.fix.removeprefix("sudo sysctl -w "))
    return cause.fix, comment(cause.fix)


def profile_for(launcher: str) -> str:
    """Return the commands that install an AppArmor profile for our launcher alone.

    A profile for python would free every script from AppArmor's limit, and the sysctl would free every program.
    """
    if not launcher.isprintable():
        return comment("install ringfence below a path without control characters, then ask doctor again")
    return (
        f"cat > {_PROFILE} <<'EOF'\n"
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n"
        f"profile ringfence-launch {_quoted(launcher)} flags=(unconfined) {{\n"
        "  userns,\n"
        "}\n"
        "EOF\n"
        f"apparmor_parser -r {_PROFILE}"
    )


def _quoted(path: str) -> str:
    """Return a path in AppArmor's quotes. A backslash takes the meaning from globs and quotes."""
    escaped = "".join(f"\\{c}" if c in '\\"*?[]{}^@' else c for c in path)
    return f'"{escaped}"'


def lasting_sysctl(setting: str) -> str:
    """Return the commands that make a setting now and at every start. `setting` is `name=value`."""
    name = setting.partition("=")[0].rpartition(".")[2]
    return f"echo '{setting}' > /etc/sysctl.d/60-ringfence-{name}.conf\nsysctl -w {setting}"


def delegate() -> str:
    """Return the commands that delegate more controllers to user managers. By default they have memory and pids."""
    return (
        f"mkdir -p {os.path.dirname(_DROP_IN)}\n"
        f"printf '[Service]\\nDelegate=cpu cpuset io memory pids\\n' > {_DROP_IN}\n"
        "systemctl daemon-reload\n"
        "# then log out and in again: a running user manager keeps its controllers"
    )


def linger(user: str) -> str:
    """Return the command that starts the systemd user manager of `user` without a login."""
    return f"loginctl enable-linger {user}"


def comment(text: str) -> str:
    """Return the text as comments of a shell script."""
    return "\n".join(f"# {line}" for line in text.splitlines())


def install(debian: str, fedora: str) -> str:
    """Return the command that installs a package on this distribution."""
    family = distribution()
    if "fedora" in family or "rhel" in family:
        return f"sudo dnf install {fedora}"
    if "debian" in family or "ubuntu" in family:
        return f"sudo apt-get install {debian}"
    return f"install {debian} (Debian), {fedora} (Fedora)"


def distribution() -> frozenset[str]:
    """Return the name of this distribution and the names of similar distributions: {"ubuntu", "debian"}."""
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                pairs = dict(line.strip().partition("=")[::2] for line in file if "=" in line)
        except OSError:
            continue
        words = f"{pairs.get('ID', '')} {pairs.get('ID_LIKE', '')}".replace('"', "")
        return frozenset(words.lower().split())
    return frozenset()
