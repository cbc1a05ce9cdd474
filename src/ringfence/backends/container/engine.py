"""Finds a container engine on this host and talks to it. Nothing here makes a sandbox."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time

from ringfence import import_path
from ringfence.errors import Missing, PolicyError, UnsupportedError
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CONTROLLERS = ("cpu", "memory", "pids")
_HELD = {"cpu": "CpuCfsQuota", "memory": "MemoryLimit", "pids": "PidsLimit"}  # as an engine tells that it can
_CGROUPS = "/sys/fs/cgroup/user.slice"
_TIMEOUT_S = 60
_SERVICE_S = 10.0
_IDLE_S = 60  # without a request: so it ends when we were killed


@final
class Engine(Struct):
    """One that answered."""

    name: str  # docker or podman
    socket: str
    version: str
    api: Any  # docker.APIClient: the package has no types
    rootless: bool
    mapped: bool  # its containers have a user namespace, of 65536 users
    runtime: str  # that it starts containers with when none is named
    runtimes: tuple[str, ...]  # that can be named
    cpus: int  # that it has
    limits: tuple[str, ...]  # controllers by which it limits a container as a whole
    counts_swap: bool  # within the limit of memory


_lock = threading.Lock()
_found: dict[tuple[str | None, str | None], Engine] = {}
_registered: list[bool] = []
_services: dict[str, subprocess.Popen[bytes]] = {}  # Podman's that we started, by socket


def find(name: str | None = None, socket: str | None = None, *, start: bool = True) -> Engine:
    """Raises UnsupportedError, with what is missing and how to get it. The answer is kept.

    `start`: Podman's service may be started, when nothing answers. PolicyError for what names no engine.
    """
    if name not in (None, "docker", "podman"):
        raise PolicyError(f"unknown container engine {name!r}", key="backend", fix="docker or podman")
    if not isinstance(socket, str | None):
        raise TypeError(f"socket is a str, the path of an engine's, not {type(socket).__name__}")
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_forget_all)
    with _lock:
        key = (name, socket)
        service = _services.get(_found[key].socket) if key in _found else None
        if key not in _found or (service is not None and service.poll() is not None):
            _found[key] = _find(name, socket, start=start)
        return _found[key]


def _forget_all() -> None:
    """In a forked child: the parent's connections and services are not ours. Closing them would take locks (D17)."""
    global _lock
    _lock = threading.Lock()
    _found.clear()
    _services.clear()


def forget(engine: Engine) -> None:
    """After it was lost: look again the next time."""
    with _lock:
        for key in [key for key, found in _found.items() if found is engine]:
            del _found[key]
    engine.api.close()


def check_runtime(engine: Engine, runtime: str | None) -> None:
    """Raises UnsupportedError for one that this engine cannot be asked for."""
    if runtime is None or runtime in engine.runtimes:
        return
    if engine.name == "podman":
        fix = f"podman --runtime={runtime} system service, and no runtime here"
        raise UnsupportedError("Podman's API takes no runtime for one container", code="runtime", fix=fix)
    raise UnsupportedError(
        f"{engine.name} has no runtime {runtime!r}; it has {', '.join(engine.runtimes)}",
        code="runtime",
        fix=f"name it in the daemon's settings: dockerd --add-runtime {runtime}=PATH",
    )


def _find(name: str | None, socket: str | None, *, start: bool) -> Engine:
    problems = []
    given = socket if socket is not None else os.environ.get("DOCKER_HOST") or None
    for kind, path in _candidates(name, given):
        if not os.path.exists(path):
            if given is not None:
                problems.append(Missing("container", f"an engine at {path}: nothing is there", f"start {kind}"))
            continue
        if not os.access(path, os.R_OK | os.W_OK):
            problems.append(_no_permission(kind, path))
            continue
        try:
            found = _connect(path)
        except _NoAnswerError as error:
            problems.append(Missing("container", f"an engine that answers at {path} ({error})", f"start {kind}"))
            continue
        if name in (None, found.name):
            return found
        found.api.close()
        problems.append(Missing("container", f"{name} at {path}: {found.name} answers there", f'engine="{found.name}"'))
    if name in (None, "podman") and given is None and start:
        started = _start_podman()
        if started is not None:
            return started
    if not problems:
        problems.append(Missing("container", "a running Docker or Podman", "apt-get install podman"))
    raise UnsupportedError(f"no container engine: {problems[0].what}", code="engine-missing", missing=problems)


def _no_permission(kind: str, path: str) -> Missing:
    fix = "use rootless Podman, or join the group docker, whose members are root in all but name"
    return Missing("container", f"the right to use {kind} at {path}", fix)


def _candidates(name: str | None, given: str | None) -> list[tuple[str, str]]:
    """Engine and path of its socket. One that was named, here or by DOCKER_HOST, is the only one."""
    if given is not None:
        scheme, remote, _ = given.partition("://")
        if remote and scheme != "unix":
            raise UnsupportedError(
                f"the engine at {given} is not on this host: files are shown inside by their paths here",
                code="engine-remote",
                fix="name a unix socket, or run ringfence where the engine is",
            )
        return [(name or ("podman" if "podman" in given else "docker"), given.removeprefix("unix://"))]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found: list[tuple[str, str]] = []
    if runtime and _is_mine(runtime):
        found += [("docker", f"{runtime}/docker.sock"), ("podman", f"{runtime}/podman/podman.sock")]
    found += [("docker", "/var/run/docker.sock"), ("podman", "/run/podman/podman.sock")]
    return [(kind, path) for kind, path in found if name in (None, kind)]


def _is_mine(path: str) -> bool:
    """Root that came by `su` may have another user's there, whose engine would see and answer all that root runs."""
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


class _NoAnswerError(Exception):
    pass


def _connect(path: str) -> Engine:
    docker = _package()
    import requests.exceptions

    api = None
    try:
        api = docker.APIClient(base_url=f"unix://{path}", version="auto", timeout=_TIMEOUT_S)
        return _described(path, api, api.version(), api.info())
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        said = str(error)
    except (AttributeError, KeyError, TypeError, ValueError):  # what a proxy before it, or another program, made of it
        said = "its answers are not an engine's"
    if api is not None:
        api.close()
    raise _NoAnswerError(said[:200])


def _described(path: str, api: Any, version: Any, told: Any) -> Engine:
    parts = " ".join(str(part.get("Name", "")) for part in version.get("Components", ()))
    name = "podman" if "podman" in parts.lower() else "docker"
    options = [str(option) for option in told.get("SecurityOptions") or ()]
    rootless = bool(told.get("Rootless")) or any(option.startswith("name=rootless") for option in options)
    mapped = rootless or any(option.startswith("name=userns") for option in options)
    runtime = str(told.get("DefaultRuntime") or "runc")
    known = () if name == "podman" else tuple(sorted(told.get("Runtimes") or ()))  # Podman's API takes none
    number = str(version.get("Version", "unknown"))
    held = _controllers(told, rootless)
    swap = bool(told.get("SwapLimit"))
    return Engine(name, path, number, api, rootless, mapped, runtime, known, int(told["NCPU"]), held, swap)


def _controllers(told: Any, rootless: bool) -> tuple[str, ...]:
    """Without root an engine has what systemd delegates to its user, and nothing by the first version of cgroups.

    With root it has what its host has, and a limit that it cannot set it leaves out with a warning.
    """
    if not rootless:
        return tuple(name for name in CONTROLLERS if told.get(_HELD[name]))
    if str(told.get("CgroupVersion")) != "2":
        return ()
    user = os.geteuid()
    try:
        with open(f"{_CGROUPS}/user-{user}.slice/user@{user}.service/cgroup.controllers", encoding="ascii") as file:
            delegated = file.read().split()
    except OSError:
        return ()
    return tuple(name for name in CONTROLLERS if name in delegated)


def _package() -> Any:
    import_path.guard()  # it looks for packages of its own that may be missing (L12)
    try:
        import docker
        import docker.errors
        import docker.types
    except ImportError:
        raise UnsupportedError(
            "the container backend needs the Engine SDK, which is not installed",
            code="extra-missing",
            missing=[Missing("container", "the package docker", "pip install 'ringfence[docker]'")],
        ) from None
    return docker


def _start_podman() -> Engine | None:
    """Podman has no daemon: its service is started by us, and ends with us."""
    path = shutil.which("podman")
    if path is None:
        return None
    folder = _own_folder()
    socket = f"{folder}/socket"
    command = [path, "system", "service", f"--time={_IDLE_S}", f"unix://{socket}"]
    service = _services[socket] = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": folder},  # it leaves files there, and its monitors an "oom" where they run
        cwd=folder,
        start_new_session=True,
    )
    import atexit

    atexit.register(_end, service, folder, os.getpid())
    deadline = time.monotonic() + _SERVICE_S
    while time.monotonic() < deadline and service.poll() is None:
        if os.path.exists(socket):
            try:
                return _connect(socket)
            except _NoAnswerError:
                pass  # it listens before it answers
        time.sleep(0.05)
    _end(service, folder, os.getpid())
    return None


def _own_folder() -> str:
    """For the service's socket and files. What libraries that are gone left is removed; their services end by then."""
    from ringfence.backends.process import owners, state

    root = state.disk_directory("podman")
    _end_holders(root, owners.is_dead)
    for name in os.listdir(root):
        if owners.is_dead(name):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
    os.makedirs(f"{root}/{owners.name()}", 0o700, exist_ok=True)
    return f"{root}/{owners.name()}"


def _end(service: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of its owner
    if service.poll() is None:
        os.killpg(service.pid, signal.SIGTERM)  # without root it is two processes
        try:
            service.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(service.pid, signal.SIGKILL)
    root, _, name = folder.rpartition("/")
    _end_holders(root, lambda found: found == name)
    shutil.rmtree(folder, ignore_errors=True)


_HOLDERS = (b"catatonit\n", b"podman pause\n")  # the second where the first is not installed


def _end_holders(root: str, is_over: Callable[[str], bool]) -> None:
    """Without root, and without a runtime directory of the user's, Podman leaves a process for each service of ours.

    It is known by the runtime directory that it was given, below `root`: Podman's own note of it is not always written.
    """
    if os.geteuid() == 0:
        return
    start = f"XDG_RUNTIME_DIR={root}/".encode()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue  # gone
        try:
            if _content(f"/proc/{pid}/comm") in _HOLDERS:
                given = [word for word in _content(f"/proc/{pid}/environ").split(b"\0") if word.startswith(start)]
                if given and is_over(os.fsdecode(given[0][len(start) :]).partition("/")[0]):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError:
            continue  # another user's
        finally:
            os.close(handle)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
