"""The `runsc` of this host: path, version, and the platform that really runs something here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from ringfence.errors import Missing, UnsupportedError
from ringfence.host import programs
from ringfence.values import Struct, final

PLATFORMS = ("systrap", "kvm", "ptrace")  # fastest first; kvm does not answer everywhere
_PROBE_S = 6.0
_PROBE_VERSION = 2  # of `_probe`: answers of another version are not used


@final
class Runsc(Struct):
    """A runsc that works here."""

    path: str
    version: str
    platform: str


_found: dict[str | None, Runsc] = {}


def find(platform: str | None = None) -> Runsc:
    """Return a runsc with a platform that works. Tried once for each process and program.

    Raises UnsupportedError, with what is missing, where no platform works.
    """
    known = _found.get(platform)
    if known is None or programs.look_up("runsc").path != known.path:  # a guest can write to the old path by now
        known = _found[platform] = _find(platform)
    return known


def installed() -> str:
    """Return the path of this host's runsc, which is not started. Raises UnsupportedError where none may be used."""
    found = programs.look_up("runsc")
    if found.path is None:
        raise UnsupportedError(
            f"gVisor is not installed: there is no runsc that may be used{found.remark}",
            code="gvisor-missing",
            missing=[Missing("gvisor", "runsc", "apt-get install runsc")],
        )
    return found.path


def _find(platform: str | None) -> Runsc:
    path = installed()
    version = _version(path)
    known = _remembered(path, version)
    tried = []
    for name in PLATFORMS if platform is None else (platform,):
        why = known[name] if name in known else _probe(path, name)
        known[name] = why
        if why is None:
            _remember(path, version, known)  # only a success: a failure of all may pass, and is tried again
            return Runsc(path, version, name)
        tried.append(f"{name}: {why}")
    raise UnsupportedError(
        f"runsc runs nothing here ({'; '.join(tried)})",
        code="gvisor-platform",
        missing=[Missing("gvisor", "a platform that works", "another host, or a newer runsc")],
    )


def _note() -> str:
    from ringfence.host import state

    return f"{state.directory('gvisor')}/platforms.json"


def _boot(path: str, version: str) -> list[object]:
    """Return the conditions of an answer: this boot, this runsc, and what the kernel permits to this process."""
    from ringfence.host import kernel_refusals

    allowed = [kernel_refusals.sysctl(name) for name in ("kernel.random.boot_id", "user.max_user_namespaces")]
    here = [os.stat("/proc/self/ns/user").st_ino, kernel_refusals.is_filtered()]
    return [*allowed, *here, path, version, os.stat(path).st_mtime_ns, _PROBE_VERSION]


def _remembered(path: str, version: str) -> dict[str, str | None]:
    """Return the noted answers by platform, which hold for a boot: a probe of kvm may take its whole deadline."""
    try:
        with open(_note(), encoding="utf-8") as file:
            noted = json.load(file)
        return dict(noted["platforms"]) if noted["for"] == _boot(path, version) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _remember(path: str, version: str, known: dict[str, str | None]) -> None:
    """Note the answers by platform for other processes."""
    new = f"{_note()}.{os.getpid()}-{os.urandom(3).hex()}"  # threads of one process may come here at once
    with open(new, "w", encoding="utf-8") as file:
        json.dump({"for": _boot(path, version), "platforms": known}, file)
    os.rename(new, _note())


def _version(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=programs.environment(path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.partition("\n")[0].removeprefix("runsc version").strip() or "unknown"


_PROBE = {
    "ociVersion": "1.0.2",
    "process": {"user": {"uid": 1000, "gid": 1000}, "args": ["/usr/bin/true"], "cwd": "/"},
    "root": {"path": "root", "readonly": True},
}


def _probe(path: str, platform: str) -> str | None:
    """Run `true` under a platform. Return None when it ran, otherwise why not.

    In a bundle, as for every sandbox: `runsc do` would write to /tmp.
    """
    from ringfence.host import process_id, state

    # Named as bundles are, so that the sweep removes it.
    folder = f"{state.disk_directory('gvisor')}/{process_id.name()}_{os.urandom(4).hex()}"
    os.makedirs(f"{folder}/root")
    os.chmod(f"{folder}/root", 0o755)  # because of the caller's umask
    mounts = []
    for name in ("usr", "bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{folder}/root/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{folder}/root/{name}")
            options = ["rbind", "ro"]
            mounts.append({"destination": f"/{name}", "type": "bind", "source": f"/{name}", "options": options})
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump({**_PROBE, "mounts": mounts}, file)
    try:
        return _ran(path, platform, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ran(path: str, platform: str, folder: str) -> str | None:
    """Run a bundle with a deadline, because kvm may hang. Return None, or why it failed."""
    flags = [f"--root={folder}/state", f"--platform={platform}", "--network=none", "--ignore-cgroups", *rootless()]
    # The name must be unique in the host's network namespace, where another process may have our number.
    command = [path, *flags, "run", f"--bundle={folder}", os.path.basename(folder)]
    try:
        process = subprocess.Popen(
            command,
            env=programs.environment(path),
            stdin=subprocess.PIPE,  # no /dev/null: runsc gives its streams to the user inside, and so the host's device
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return str(error.strerror)
    try:
        _, errors = process.communicate(timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"no answer within {_PROBE_S:g} s"
    if process.returncode == 0:
        return None
    return (errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}")[:200]


def rootless() -> list[str]:
    """Return the flag that runsc needs without root."""
    return [] if os.geteuid() == 0 else ["--rootless"]
