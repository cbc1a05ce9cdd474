"""Finds a container engine on this host, describes it and starts Podman's service. Nothing here makes a sandbox."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import threading
import time

from ringfence.errors import Missing, PolicyError, SandboxLostError, UnsupportedError
from ringfence.host import import_path, lifecycle
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CONTROLLERS = ("cpu", "memory", "pids")
_REPORTED_AS = {"cpu": "CpuCfsQuota", "memory": "MemoryLimit", "pids": "PidsLimit"}  # in an engine's description
_CGROUPS = "/sys/fs/cgroup/user.slice"
_TIMEOUT_S = 60
_SERVICE_S = 10.0
_IDLE_S = 60  # without a request
_SETTINGS = ("CONTAINERS_*", "XDG_*", "STORAGE_DRIVER", "DBUS_SESSION_BUS_ADDRESS")  # variables that Podman needs
_GONE_S = 2.0  # until a killed service has ended
_AGAIN_S = 60.0  # until a service that did not start is tried again
_HOLDERS = (b"catatonit\n", b"podman pause\n")  # the second where the first is not installed


class Service(Struct):
    """Podman's service, started by this process."""

    process: subprocess.Popen[bytes]
    socket: str


@final
class Engine(Struct):
    """A container engine that answered."""

    name: str  # docker or podman
    socket: str
    version: str
    api: Any  # docker.APIClient: the package has no types
    rootless: bool
    mapped: bool  # its containers have a user namespace, of 65536 users
    runtime: str  # the OCI runtime of a container for which none is named
    runtimes: tuple[str, ...]  # the runtimes that can be named
    cpus: int
    limits: tuple[str, ...]  # controllers by which the engine limits a container as a whole
    counts_swap: bool  # the limit of memory includes swap


_lock = threading.Lock()
_found: dict[tuple[str | None, str | None], Engine] = {}


class _Podman:
    """Podman's service as this process started it: at most one, whatever is asked for."""

    service: Service | None = None
    failed_at: float = 0.0
    failure: str | None = None  # why the service did not start the last time


_podman = _Podman()


def find(name: str | None = None, socket: str | None = None, *, start: bool = True) -> Engine:
    """Return the engine to use. The answer is kept.

    `start`: Podman's service may be started when no engine answers.
    Raises UnsupportedError, with what is missing and how to get it; SandboxLostError for an engine that does not answer
    in time; PolicyError for an unknown `name`.
    """
    if name not in (None, "docker", "podman"):
        raise PolicyError(f"unknown container engine {name!r}", key="backend", fix="docker or podman")
    if not isinstance(socket, str | None):
        raise TypeError(f"socket is a str, the path of an engine's, not {type(socket).__name__}")
    lifecycle.after_fork(_forget_all)
    with _lock:
        key = (name, socket)
        known = _found.get(key)
        if known is None or _has_ended(known):
            known = _found[key] = _find(name, socket, start=start)
        return known


def look(name: str | None = None, socket: str | None = None) -> Engine | None:
    """Return the engine that answers, or None where Podman's service can be started. Starts nothing.

    Raises as `find` does.
    """
    try:
        return find(name, socket, start=False)
    except UnsupportedError as error:
        from ringfence.host import programs

        podman = programs.look_up("podman").path is not None
        given = socket is not None or os.environ.get("DOCKER_HOST")
        if error.code != "engine-missing" or not podman or given or name == "docker":
            raise
        _package()  # raises where a launch would
        return None


def _has_ended(engine: Engine) -> bool:
    """Return whether the engine was our own Podman service and listens no more. Its process may still be ending."""
    service = _podman.service
    return service is not None and service.socket == engine.socket and not _listens(service)


def was_killed(engine: Engine) -> bool:
    """Return whether the engine was our own Podman service and has ended, so that another can be started."""
    service = _podman.service
    if service is None or service.socket != engine.socket:
        return False
    try:
        service.process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _listens(service: Service) -> bool:
    import socket

    if service.process.poll() is not None:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(service.socket)
        except (ConnectionError, FileNotFoundError):
            return False
        except OSError:
            return True  # such as a service with a full queue of connections
    return True


def _forget_all() -> None:
    """Drop the parent's engines and service in a forked child. Closing the connections would take locks (D17)."""
    global _lock
    _lock = threading.Lock()
    _found.clear()
    _podman.service = None


def forget(engine: Engine) -> None:
    """Close the connection to a lost engine, so that the next `find` looks again."""
    with _lock:
        for key in [key for key, found in _found.items() if found is engine]:
            del _found[key]
    engine.api.close()


def check_runtime(engine: Engine, runtime: str | None) -> None:
    """Raise UnsupportedError for a runtime that this engine cannot use for one container."""
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
    late: SandboxLostError | None = None
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
        except SandboxLostError as error:
            late = error  # raised only where no other engine answers: this engine may answer the next time
            continue
        except _NoAnswerError as error:
            problems.append(Missing("container", f"an engine that answers at {path} ({error})", f"start {kind}"))
            continue
        if name in (None, found.name):
            return found
        found.api.close()
        problems.append(Missing("container", f"{name} at {path}: {found.name} answers there", f'engine="{found.name}"'))
    from ringfence.host import programs  # only where no engine answers

    podman = programs.look_up("podman")
    if name in (None, "podman") and given is None and start and podman.path is not None:
        started = _own_service(podman.path)
        if isinstance(started, Engine):
            return started
        problems.append(Missing("container", f"a service of Podman's: {started}", "podman system service"))
    if late is not None:
        raise late
    if not problems:
        what = f"a running Docker or Podman{'' if podman.path else podman.remark}"
        problems.append(Missing("container", what, "apt-get install podman"))
    raise UnsupportedError(f"no container engine: {problems[0].what}", code="engine-missing", missing=problems)


def _no_permission(kind: str, path: str) -> Missing:
    fix = "use rootless Podman, or join the group docker, whose members are root in all but name"
    return Missing("container", f"the right to use {kind} at {path}", fix)


def _candidates(name: str | None, given: str | None) -> list[tuple[str, str]]:
    """Return the engines to try, with their sockets: only the engine that the caller or DOCKER_HOST names, if any."""
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
    """Return whether this user owns the runtime directory.

    Root by `su` may have another user's directory, whose engine would see and answer everything that root runs.
    """
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
        if any(isinstance(each, requests.exceptions.Timeout) for each in (error, error.__cause__)):
            if api is not None:
                api.close()
            text = f"the engine at {path} listens, and did not answer within {_TIMEOUT_S} s"
            raise SandboxLostError(text, code="engine", fix="try again when it is less busy") from None
        said = str(error)
    except (AttributeError, KeyError, TypeError, ValueError):  # a proxy, or another program
        said = "its answers are not an engine's"
    if api is not None:
        api.close()
    raise _NoAnswerError(said[:200])


def _described(path: str, api: Any, version: Any, info: Any) -> Engine:
    """Return the engine behind `api`, from its answers to `version` and `info`."""
    parts = " ".join(str(part.get("Name", "")) for part in version.get("Components", ()))
    name = "podman" if "podman" in parts.lower() else "docker"
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    rootless = bool(info.get("Rootless")) or any(option.startswith("name=rootless") for option in options)
    mapped = rootless or any(option.startswith("name=userns") for option in options)
    runtime = str(info.get("DefaultRuntime") or "runc")
    known = () if name == "podman" else tuple(sorted(info.get("Runtimes") or ()))  # Podman's API takes none
    number = str(version.get("Version", "unknown"))
    limits = _controllers(info, rootless)
    swap = bool(info.get("SwapLimit"))
    return Engine(name, path, number, api, rootless, mapped, runtime, known, int(info["NCPU"]), limits, swap)


def _controllers(info: Any, rootless: bool) -> tuple[str, ...]:
    """Return the controllers by which an engine can limit a container.

    A rootless engine has the controllers that systemd delegates to its user, and none on cgroup v1. An engine of root
    has its host's, and leaves out a limit that it cannot set, with a warning.
    """
    if not rootless:
        return tuple(name for name in CONTROLLERS if info.get(_REPORTED_AS[name]))
    if str(info.get("CgroupVersion")) != "2":
        return ()
    user = os.geteuid()
    try:
        with open(f"{_CGROUPS}/user-{user}.slice/user@{user}.service/cgroup.controllers", encoding="ascii") as file:
            delegated = file.read().split()
    except OSError:
        return ()
    return tuple(name for name in CONTROLLERS if name in delegated)


def _package() -> Any:
    """Return the Engine SDK, the package `docker`. Raises UnsupportedError where it is not installed."""
    import_path.guard()  # the SDK tries to import packages that may be missing (L12)
    try:
        import docker
        import docker.errors
        import docker.types
    except ImportError:
        raise UnsupportedError(
            "the container backend needs the Engine SDK, which is not installed",
            code="extra-missing",
            missing=[Missing("container", "the package docker", "pip install 'ringfence-sandbox[docker]'")],
        ) from None
    return docker


def _own_service(podman: str) -> Engine | str:
    """Return Podman's service, started once for this process, or say why there is none.

    Podman has no daemon; our service ends with this process. A service that failed to start is not tried again by every
    sandbox.
    """
    _package()  # raises before anything is started
    service = _podman.service
    if service is not None and service.process.poll() is None:
        try:
            return _connect(service.socket)
        except _NoAnswerError as error:
            try:
                service.process.wait(_GONE_S)
            except subprocess.TimeoutExpired:  # sandboxes of other threads may run in it
                return f"the one that was started does not answer ({error})"
    if _podman.failure is not None and time.monotonic() < _podman.failed_at + _AGAIN_S:
        return _podman.failure
    started = _start_service(podman)
    _podman.failed_at = time.monotonic()
    _podman.failure = started if isinstance(started, str) else None
    return started


def _start_service(podman: str) -> Engine | str:
    folder = _own_folder()
    socket = f"{folder}/socket"
    process = _begin([podman, "system", "service", f"--time={_IDLE_S}", f"unix://{socket}"], folder)
    if isinstance(process, OSError):
        return f"it could not be started: {process.strerror}"
    _podman.service = Service(process, socket)
    import atexit

    atexit.register(_end, process, folder, os.getpid())
    deadline = time.monotonic() + _SERVICE_S
    while time.monotonic() < deadline and process.poll() is None:
        if os.path.exists(socket):
            try:
                return _connect(socket)
            except _NoAnswerError:
                pass  # the service listens before it answers
        time.sleep(0.05)
    status = process.poll()
    _end(process, folder, os.getpid())
    return f"no answer within {_SERVICE_S:g} s" if status is None else f"it ended with status {status}"


def _begin(command: list[str], folder: str) -> subprocess.Popen[bytes] | OSError:
    """Start a service that ends when this process does, however it ends.

    A thread that lasts as long as this process starts the service: the kernel ends the service with that thread. Forks
    of the caller would hold open a descriptor that the service could wait on instead.
    """
    from ringfence.host import programs

    begun: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                programs.dying_with_us(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**programs.environment(command[0], *_SETTINGS), "TMPDIR": folder},  # files are left there
                cwd=folder,  # and here an "oom" from each of Podman's monitors
                start_new_session=True,
            )
        except OSError as error:
            begun.put(error)
            return
        begun.put(process)
        process.wait()

    threading.Thread(target=keep, name="ringfence-podman", daemon=True).start()
    return begun.get()


def _own_folder() -> str:
    """Return the folder for the service's socket and files, and remove the folders of processes that are gone."""
    from ringfence.host import process_id, state

    root = state.disk_directory("podman")
    _end_holders(root, process_id.is_dead)
    for name in os.listdir(root):
        if process_id.is_dead(name):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
    os.makedirs(f"{root}/{process_id.name()}", 0o700, exist_ok=True)
    return f"{root}/{process_id.name()}"


def _end(service: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a fork of the owner
    if service.poll() is None:
        os.killpg(service.pid, signal.SIGTERM)  # the group: a rootless service is two processes
        try:
            service.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(service.pid, signal.SIGKILL)
    root, _, name = folder.rpartition("/")
    _end_holders(root, lambda found: found == name)
    shutil.rmtree(folder, ignore_errors=True)


def _end_holders(root: str, is_over: Callable[[str], bool]) -> None:
    """Kill the processes that rootless Podman leaves behind for our services whose folders `is_over` accepts by name.

    Podman leaves a process for each service where the user has no runtime directory. The process is recognized by the
    runtime directory that it was given, below `root`: Podman's own note of its number is not always written.
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
