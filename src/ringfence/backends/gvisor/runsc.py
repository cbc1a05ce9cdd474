"""What this host's `runsc` is and can do: where it is, its version, and which platform really runs something here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from ringfence.errors import Missing, UnsupportedError
from ringfence.host import programs
from ringfence.values import Struct, final

PLATFORMS = ("systrap", "kvm", "ptrace")  # fastest first; kvm only where it answers
_PROBE_S = 6.0
_WAY = 2  # of asking


@final
class Runsc(Struct):
    """A runsc that works here."""

    path: str
    version: str
    platform: str


_found: dict[str | None, Runsc] = {}


def find(platform: str | None = None) -> Runsc:
    """Raises UnsupportedError, with what is missing, where none works. Tried once for each process and program."""
    known = _found.get(platform)
    if known is None or programs.look_up("runsc").path != known.path:  # a guest could write there since
        known = _found[platform] = _find(platform)
    return known


@final
class Installed(Struct):
    """A runsc that may be used. Whether it runs something here is not known yet."""

    path: str
    version: str


_versions: dict[tuple[str, int], str] = {}  # by path and time of change


def installed() -> Installed:
    """Return the runsc of this host. Raises UnsupportedError where there is none that may be used."""
    found = programs.look_up("runsc")
    if found.path is None:
        raise UnsupportedError(
            f"gVisor is not installed: there is no runsc that may be used{found.remark}",
            code="gvisor-missing",
            missing=[Missing("gvisor", "runsc", "apt-get install runsc")],
        )
    key = (found.path, os.stat(found.path).st_mtime_ns)
    if key not in _versions:
        _versions[key] = _version(found.path)
    return Installed(found.path, _versions[key])


def _find(platform: str | None) -> Runsc:
    here = installed()
    path, version = here.path, here.version
    known = _remembered(path, version)
    tried = []
    for name in PLATFORMS if platform is None else (platform,):
        why = known[name] if name in known else _probe(path, name)
        known[name] = why
        if why is None:
            _remember(path, version, known)  # that none works may be of this moment, and is tried again
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
    """What an answer is good for: this boot and this runsc, and what the kernel lets processes like this one do."""
    from ringfence.host import kernel_refusals

    allowed = [kernel_refusals.sysctl(name) for name in ("kernel.random.boot_id", "user.max_user_namespaces")]
    here = [os.stat("/proc/self/ns/user").st_ino, kernel_refusals.is_filtered()]
    return [*allowed, *here, path, version, os.stat(path).st_mtime_ns, _WAY]


def _remembered(path: str, version: str) -> dict[str, str | None]:
    """A probe of kvm may take its whole deadline: each is made once in a boot."""
    try:
        with open(_note(), encoding="utf-8") as file:
            noted = json.load(file)
        return dict(noted["platforms"]) if noted["for"] == _boot(path, version) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _remember(path: str, version: str, known: dict[str, str | None]) -> None:
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
    """None when `true` ran under it. In a bundle, as every sandbox has: `runsc do` wants to write to /tmp."""
    from ringfence.host import process_id, state

    folder = (
        f"{state.disk_directory('gvisor')}/{process_id.name()}_{os.urandom(4).hex()}"  # as bundles are, for the sweep
    )
    os.makedirs(f"{folder}/root")
    os.chmod(f"{folder}/root", 0o755)  # whatever the caller's umask
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
    """kvm may hang, hence the deadline; what is left of it is killed with its group."""
    flags = [f"--root={folder}/state", f"--platform={platform}", "--network=none", "--ignore-cgroups", *rootless()]
    # The name is one of the host's network namespace, which may have another process of our number.
    command = [path, *flags, "run", f"--bundle={folder}", os.path.basename(folder)]
    try:
        process = subprocess.Popen(
            command,
            env=programs.environment(path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return str(error.strerror)
    try:
        _, said = process.communicate(timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"no answer within {_PROBE_S:g} s"
    if process.returncode == 0:
        return None
    return (said.strip().rpartition("\n")[2] or f"exit code {process.returncode}")[:200]


def rootless() -> list[str]:
    return [] if os.geteuid() == 0 else ["--rootless"]
