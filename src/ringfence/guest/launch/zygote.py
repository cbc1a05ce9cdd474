"""Owns the zygote: a small warm interpreter that monitors and their forkers are forked from. No guest code runs here.

The zygote is started by exec with an empty environment, so that none of the caller's data is in its memory (H12). It
serves requests on a packet socket: each request is a view, and gets a monitor of its own.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in lean
import fcntl
import gc
import os
import select
import sys
import time

from ringfence.guest import job_modules
from ringfence.guest.interpreter import exec_commands
from ringfence.guest.launch import forker, monitor
from ringfence.shared import fast_stdlib, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

    from ringfence.guest.guestd.protocols import Hello, TemplateForm


CONTROL_FD = 3
LIBRARY_FD = 4  # pidfd of the library's process: when that ends, this process does (D17)
_MAX_PACKET = 1 << 18
_MAX_FDS = 16
_GIVE_UP_S = 10
_TRIES = 400  # of 5 ms: a memory cgroup stays busy for a while after its last process
_QUIET_MS = 100  # the first run of a process is over by then
_LIBRARY, _COMMAND = (
    b"library",
    b"command",
)  # the words of ringfence.host.zygote_start


def main() -> None:
    syscalls.close_from(LIBRARY_FD + 1)
    syscalls.set_name("rf-zygote")
    syscalls.new_session_keyring()
    os.umask(0o022)
    os.chdir("/")
    hard = syscalls.limits("NOFILE")[1]
    syscalls.set_limits("NOFILE", hard, hard)  # a monitor has a dozen descriptors for each sandbox
    fast_stdlib.ignore_signals(fast_stdlib.SIGINT, fast_stdlib.SIGCHLD)  # Ctrl-C is the caller's
    syscalls.become_subreaper()
    control = fast_stdlib.from_fd(CONTROL_FD, fast_stdlib.SOCK_SEQPACKET)
    purpose = control.recv(_MAX_PACKET)
    if purpose in (_LIBRARY, _COMMAND):  # a single program needs none of these modules
        _load_rest()
    data = control.recv(_MAX_PACKET) if purpose else b""
    if not data:
        os._exit(0)  # begun ahead of time, and not needed
    hello: Hello = fast_stdlib.loads(data)
    interpreter = forker.ZygoteInterpreter(preloaded=bool(hello["preload"]))
    answer = fast_stdlib.dumps(_preload(hello))
    try:
        control.send(answer)
    except OSError:
        pass  # the library went while we imported: what follows sees it, and cleans up
    gc.freeze()  # a collection in a fork would otherwise copy every page
    gc.enable()
    if not _serve(control, interpreter, cold=purpose == _LIBRARY):
        clean_up(hello, LIBRARY_FD)
    os._exit(0)


def _preload(hello: Hello) -> dict[str, object]:
    """Import what guests will want. Thread pools stay off: a fork takes one thread along (kernel fact 6)."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    own = sys.path[:]  # restored below, for later imports; guests get their path with each job
    sys.path[:] = hello["sys_path"] or own
    for name in hello["preload"]:
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001  # the module's own import may raise anything
            return {"error": f"{type(error).__name__}: {error}", "module": name}
    sys.path[:] = own
    os.environ.clear()
    threads = len(os.listdir("/proc/self/task"))
    return {"ok": True} if threads == 1 else {"error": f"{threads} threads after preload", "module": None}


def _load_rest() -> None:
    """Load what jobs need while the library makes its plan: a sandbox does not show where our package lies."""
    job_modules.load()
    __import__("ringfence.guest.guestd.daemon")  # the monitor imports it late, while a command's forker builds
    exec_commands.prepare()


def _warm_up(interpreter: forker.ZygoteInterpreter) -> None:
    """Import what most programs import: 14 ms that the library's first template does not wait for."""
    for name in ("threading", "traceback", "linecache", "json", "ctypes"):
        __import__(name)
    gc.collect()
    gc.freeze()
    interpreter.warm = True


def _serve(control: socket, interpreter: forker.ZygoteInterpreter, *, cold: bool) -> bool:
    """Serve requests until the library says goodbye (True) or is gone without a word (False).

    `cold`: warm up in a quiet moment after the first request.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(LIBRARY_FD, select.POLLIN)
    served = 0
    while True:
        ready = dict(poll.poll(_QUIET_MS if cold and served else None))
        if cold and served and LIBRARY_FD not in ready:
            cold = False
            _warm_up(interpreter)
        if control.fileno() in ready:
            served += 1
            data, fds = _receive(control)
            request = fast_stdlib.loads(data) if data else None
            if request is None or "bye" in request:
                return request is not None
            _begin_monitor(control, request, fds, interpreter)
            for fd in fds:
                os.close(fd)
        elif LIBRARY_FD in ready:
            return False


def _receive(control: socket) -> tuple[bytes, list[int]]:
    try:
        return fast_stdlib.recv_fds(control, _MAX_PACKET, _MAX_FDS)
    except ConnectionError:  # the library died before it read an answer
        return b"", []


def _begin_monitor(
    control: socket, request: TemplateForm, fds: list[int], interpreter: forker.ZygoteInterpreter
) -> None:
    """Fork the monitor of a view."""
    if os.fork() == 0:
        os.dup2(fds[0], CONTROL_FD, inheritable=False)
        for fd in fds:
            os.close(fd)
        control.detach()
        requests = fast_stdlib.from_fd(CONTROL_FD, fast_stdlib.SOCK_SEQPACKET)
        monitor.run(requests, request, LIBRARY_FD, interpreter)


# ── after the library ────────────────────────────────────────────────────────────────────────────


def clean_up(hello: Hello, library: int) -> None:
    """Remove what is left when the library's end of the socket is closed.

    The library's monitors end by themselves; this waits until they have.
    """
    _signal.alarm(_GIVE_UP_S)  # by default the signal ends this process; the next sweep removes the rest
    poll = select.poll()
    poll.register(library, select.POLLIN)
    if not poll.poll(1000):
        return  # the library lives and has only closed its end
    _wait_for_children()
    for owner in hello["cgroups"]:
        _remove_groups(owner)
    if hello["uids"] is not None:
        _remove_unheld(hello["uids"])
    if os.path.exists(hello["record"]) or _has_entries(hello["stakes"]):
        _sweep(hello["record"], hello["home"])


def _has_entries(directory: str) -> bool:
    try:
        return bool(os.listdir(directory))
    except OSError:
        return False


def _sweep(record: str, home: str) -> None:
    """Remove placeholders on the host by the library's own sweep, in a separate interpreter."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    ours = f"import sys; sys.path.append({root!r}); import ringfence; sys.path.pop()"  # as in __main__ (L12)
    text = f"{ours}; from ringfence.host import state; state.sweep()"
    env = {"XDG_RUNTIME_DIR": os.path.dirname(os.path.dirname(os.path.dirname(record))), "HOME": home}
    try:
        pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", text], env)
        os.waitpid(pid, 0)
    except OSError:
        return  # the kernel reaps ignored children


def _wait_for_children() -> None:
    """Wait until the last child is gone: SIGCHLD is ignored. Orphaned monitors are children too, of a subreaper."""
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _remove_groups(owner: str) -> None:
    try:
        groups = [entry.path for entry in os.scandir(owner) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in (*groups, owner, os.path.dirname(owner)):
        for _ in range(_TRIES):
            try:
                os.rmdir(path)
                break
            except FileNotFoundError:
                break
            except OSError:
                if path == os.path.dirname(owner):
                    break  # another library's groups are in it
                time.sleep(0.005)


def _remove_unheld(directory: str) -> None:
    """Remove lock files of uids that no process holds. A process that waits for a lock checks the file's identity."""
    for name in os.listdir(directory):
        path = f"{directory}/{name}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except OSError:
            pass  # held, or removed by another
        finally:
            os.close(fd)
