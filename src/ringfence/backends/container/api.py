"""Finds a container engine on this host and talks to it. Nothing here makes a sandbox."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import threading
import time

from ringfence.errors import Missing, PolicyError, SandboxLostError, UnsupportedError
from ringfence.host import import_path, lifecycle, programs
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
_IDLE_S = 60  # without a request
_SETTINGS = ("CONTAINERS_*", "XDG_*", "STORAGE_DRIVER", "DBUS_SESSION_BUS_ADDRESS")  # where Podman has its things
_GONE_S = 2.0  # until one that was killed has ended
_AGAIN_S = 60.0  # until a service that did not start is tried again


class Service(Struct):
    """Podman's, which we started."""

    process: subprocess.Popen[bytes]
    socket: str


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
_service: list[Service] = []  # Podman's that we started: one for this process, whatever is asked for
_failures: list[tuple[float, str]] = []  # when it did not start the last time, and what it said


def find(name: str | None = None, socket: str | None = None, *, start: bool = True) -> Engine:
    """Raises UnsupportedError, with what is missing and how to get it; SandboxLostError for one that does not answer in
    time. The answer is kept.

    `start`: Podman's service may be started, when nothing answers. PolicyError for what names no engine.
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
    """Return the engine that answers. Starts nothing; None: Podman's service can be started.

    Raises as `find` does.
    """
    try:
        return find(name, socket, start=False)
    except UnsupportedError as error:
        podman = programs.look_up("podman").path is not None
        given = socket is not None or os.environ.get("DOCKER_HOST")
        if error.code != "engine-missing" or not podman or given or name == "docker":
            raise
        return None


def _has_ended(engine: Engine) -> bool:
    """Whether it was a service of ours. One that was killed may still be ending: it listens no more."""
    return any(one.socket == engine.socket and not _listens(one) for one in _service)


def was_killed(engine: Engine) -> bool:
    """Whether it was a service of ours, which has ended by now: another can be started."""
    for one in _service:
        if one.socket == engine.socket:
            try:
                one.process.wait(_GONE_S)
            except subprocess.TimeoutExpired:
                return False
            return True
    return False


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
            return True  # as one that has many waiting
    return True


def _forget_all() -> None:
    """In a forked child: the parent's connections and services are not ours. Closing them would take locks (D17)."""
    global _lock
    _lock = threading.Lock()
    _found.clear()
    _service.clear()


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
            late = error  # another may do; else that is the answer, for it may be otherwise the next time
            continue
        except _NoAnswerError as error:
            problems.append(Missing("container", f"an engine that answers at {path} ({error})", f"start {kind}"))
            continue
        if name in (None, found.name):
            return found
        found.api.close()
        problems.append(Missing("container", f"{name} at {path}: {found.name} answers there", f'engine="{found.name}"'))
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
        if any(isinstance(each, requests.exceptions.Timeout) for each in (error, error.__cause__)):
            if api is not None:
                api.close()
            text = f"the engine at {path} listens, and did not answer within {_TIMEOUT_S} s"
            raise SandboxLostError(text, code="engine", fix="try again when it is less busy") from None
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
            missing=[Missing("container", "the package docker", "pip install 'ringfence-sandbox[docker]'")],
        ) from None
    return docker


def _own_service(podman: str) -> Engine | str:
    """Podman has no daemon: its service is started by us, once for this process, and ends with us.

    Or why there is none. One that did not start is not started again by each sandbox that is asked for.
    """
    _package()  # before anything is started for it
    for one in _service:
        if one.process.poll() is None:
            try:
                return _connect(one.socket)
            except _NoAnswerError as error:
                try:
                    one.process.wait(_GONE_S)
                except subprocess.TimeoutExpired:  # others' sandboxes may be its
                    return f"the one that was started does not answer ({error})"
    if _failures and time.monotonic() < _failures[-1][0] + _AGAIN_S:
        return _failures[-1][1]
    started = _start_service(podman)
    _failures[:] = [(time.monotonic(), started)] if isinstance(started, str) else []
    return started


def _start_service(podman: str) -> Engine | str:
    folder = _own_folder()
    socket = f"{folder}/socket"
    process = _begin([podman, "system", "service", f"--time={_IDLE_S}", f"unix://{socket}"], folder)
    if isinstance(process, OSError):
        return f"it could not be started: {process.strerror}"
    _service[:] = [Service(process, socket)]
    import atexit

    atexit.register(_end, process, folder, os.getpid())
    deadline = time.monotonic() + _SERVICE_S
    while time.monotonic() < deadline and process.poll() is None:
        if os.path.exists(socket):
            try:
                return _connect(socket)
            except _NoAnswerError:
                pass  # it listens before it answers
        time.sleep(0.05)
    status = process.poll()
    _end(process, folder, os.getpid())
    return f"no answer within {_SERVICE_S:g} s" if status is None else f"it ended with status {status}"


def _begin(command: list[str], folder: str) -> subprocess.Popen[bytes] | OSError:
    """Start it from a thread that lasts as long as this process: with that thread the kernel ends the service too,
    however we end. A descriptor that it waited on would be held open by the caller's forks."""
    begun: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                programs.dying_with_us(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**programs.environment(command[0], *_SETTINGS), "TMPDIR": folder},  # it leaves files there
                cwd=folder,  # where its monitors leave an "oom"
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
    """For the service's socket and files. What libraries that are gone left is removed; their services end by then."""
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
