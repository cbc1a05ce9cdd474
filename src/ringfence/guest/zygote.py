"""Owns the zygote: a small warm interpreter that monitors and their forkers are forked from. No guest code runs here.

It is started by exec with an empty environment, so nothing of the caller is in its memory (H12). It serves requests on
a packet socket: each is a view, and gets a monitor of its own.
"""

from __future__ import annotations

import gc
import os
import select
import sys

from . import after, forker, fresh, held, lean, monitor, node
from . import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import Any

    from .shapes import Hello, Template

CONTROL_FD = 3
LIBRARY_FD = 4  # pidfd of the library's process: its death is ours (D17)
_MAX_PACKET = 1 << 18
_MAX_FDS = 16
_QUIET_MS = 100  # the first run of a process is over by then
_FOR_JOBS = (
    *("fileworker", "guestd", "pycode", "session", "shell"),
    *("connector", "filesearch", "filestreams", "filewatch", "keeping", "restoring", "stepwise"),
)
_LIBRARY, _COMMAND = b"library", b"command"  # as in ringfence.spawn


def main() -> None:
    k.close_from(LIBRARY_FD + 1)
    k.set_name("rf-zygote")
    k.new_session_keyring()
    os.umask(0o022)
    os.chdir("/")
    hard = k.limits("NOFILE")[1]
    k.set_limits("NOFILE", hard, hard)  # a monitor holds a dozen for each sandbox
    lean.ignore_signals(lean.SIGINT, lean.SIGCHLD)  # Ctrl-C is for the caller, who then ends us
    k.become_subreaper()
    control = lean.from_fd(CONTROL_FD, lean.SOCK_SEQPACKET)
    purpose = control.recv(_MAX_PACKET)
    if purpose == _COMMAND:  # the library takes as long to start as we do
        _hold_rest()
    elif purpose == _LIBRARY:
        _load_rest()
    data = control.recv(_MAX_PACKET) if purpose else b""
    if not data:
        os._exit(0)  # begun ahead of time, and not needed
    hello: Hello = lean.loads(data)
    answer = lean.dumps(_preload(hello))
    try:
        control.send(answer)
    except OSError:
        pass  # the library went while we imported: what follows sees it, and cleans up
    gc.freeze()  # a collection in a fork would otherwise copy every page
    gc.enable()
    said_goodbye = _serve(control, _zygote_request, cold=purpose == _LIBRARY)
    if not said_goodbye:
        after.clean_up(hello, LIBRARY_FD)
    os._exit(0)


def _preload(hello: Hello) -> dict[str, object]:
    """Import what guests will want. Thread pools stay off: a fork takes one thread along (M6)."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    forker.preloaded = bool(hello["preload"])
    own = sys.path[:]  # for what is imported later, too; guests are given their path with each job
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


def _hold_rest() -> None:
    """A command mostly execs a program: what it may need besides is read, and not run."""
    held.Held().hold()
    node.prepare()
    fresh.prepare()


def _load_rest() -> None:
    """What jobs need, while the library makes its plan: a sandbox does not show where it lies."""
    for name in _FOR_JOBS:
        __import__(f"{__package__}.{name}")
    for name in ("_ast", "_sitebuiltins", "atexit"):
        __import__(name)
    fresh.prepare()
    node.prepare()


def _warm_up() -> None:
    """What most programs import anyway. 14 ms: the library's first template does not wait for it."""
    for name in ("threading", "traceback", "linecache", "json", "ctypes"):
        __import__(name)
    gc.collect()
    gc.freeze()
    forker.warm = True


def _serve(control: socket, handle: Callable[[socket, Any, list[int]], None], *, cold: bool) -> bool:
    """Requests until the library says goodbye (True) or is gone without. `cold`: there is time to warm up later."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(LIBRARY_FD, select.POLLIN)
    served = 0
    while True:
        ready = dict(poll.poll(_QUIET_MS if cold and served else None))
        if cold and served and LIBRARY_FD not in ready:
            cold = False
            _warm_up()
        if control.fileno() in ready:
            served += 1
            data, fds = _receive(control)
            request = lean.loads(data) if data else None
            if request is None or "bye" in request:
                return request is not None
            handle(control, request, fds)
            for fd in fds:
                os.close(fd)
        elif LIBRARY_FD in ready:
            return False


def _receive(control: socket) -> tuple[bytes, list[int]]:
    try:
        return lean.recv_fds(control, _MAX_PACKET, _MAX_FDS)
    except ConnectionError:  # the library died with an answer of ours unread
        return b"", []


def _zygote_request(control: socket, request: Template, fds: list[int]) -> None:
    if os.fork() == 0:
        os.dup2(fds[0], CONTROL_FD, inheritable=False)
        for fd in fds:
            os.close(fd)
        control.detach()
        monitor.run(lean.from_fd(CONTROL_FD, lean.SOCK_SEQPACKET), request, LIBRARY_FD)
