"""The library's side of a zygote: starts it by exec, asks it for templates, and templates for sandboxes."""

from __future__ import annotations

import os
import sys
import threading

from ringfence.errors import Missing, SandboxLostError, StartTimeoutError, UnsupportedError
from ringfence.guest import lean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from socket import socket

    from ringfence.backends.process.cgroup import Tree
    from ringfence.plan.interpreter import Interpreter
    from ringfence.plan.model import Op

_START_S = 30.0  # with preload of large modules on a slow machine
_BUILD_S = 10.0
_END_S = 2.0
_MAX_PACKET = 1 << 16


def launcher() -> str:
    """The one file after whose exec everything privileged happens."""
    import ringfence.guest

    return os.path.join(os.path.dirname(ringfence.guest.__file__), "launch")


class Zygote:
    """A warm interpreter. Safe from several threads."""

    def __init__(self, interpreter: Interpreter, preload: tuple[str, ...], tree: Tree | None) -> None:
        self._lock = threading.Lock()
        self._control, theirs = lean.pair(lean.SOCK_SEQPACKET)
        self._errors = os.memfd_create("zygote-stderr", os.MFD_CLOEXEC)
        self.pid = _spawn(interpreter, theirs.fileno(), self._errors, tree)
        theirs.close()
        self._control.settimeout(_START_S)
        try:
            self._control.send(lean.dumps({"sys_path": interpreter.sys_path, "preload": preload}))
            answer = self._answer(self._control)
            if "error" in answer:
                raise _preload_failed(answer)
            if tree is not None:
                tree.attach(self.pid)
        except BaseException:
            self.close()
            raise

    def template(self, ops: tuple[Op, ...], *, as_root: bool) -> Template:
        """A fork with a root of its own. Raises UnsupportedError when this host does not let us build one."""
        ours, theirs = lean.pair(lean.SOCK_SEQPACKET)
        request = lean.dumps({"as_root": as_root, "ops": ops})
        ours.settimeout(_BUILD_S)
        with self._lock:
            _send(self._control, request, [theirs.fileno()])
        theirs.close()
        try:
            answer = self._answer(ours)
            if "error" in answer:
                raise explain_refusal(str(answer["error"]), answer.get("errno"))
        except BaseException:
            ours.close()
            raise
        return Template(ours)

    def _answer(self, sock: socket) -> dict[str, object]:
        try:
            data = sock.recv(_MAX_PACKET)
        except TimeoutError:
            raise StartTimeoutError("the sandbox's zygote did not answer in time", fix="try again") from None
        if not data:
            raise SandboxLostError(f"the sandbox's zygote ended{self._last_words()}", fix="ringfence doctor")
        answer: dict[str, object] = lean.loads(data)
        return answer

    def _last_words(self) -> str:
        text = os.pread(self._errors, 4096, 0).decode("utf-8", "replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""

    @property
    def alive(self) -> bool:
        """False once it has ended; it is then reaped."""
        if self.pid < 0:
            return False
        try:
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # the caller reaps all children
            pid = 0 if os.path.exists(f"/proc/{self.pid}") else self.pid
        if pid:
            self.pid = -1
        return not pid

    def close(self) -> None:
        """End it. Running sandboxes go on: they belong to the library, not to the zygote."""
        self._control.close()
        if self.pid >= 0:
            _end(self.pid)
            self.pid = -1
        os.close(self._errors)

    def forget(self) -> None:
        """In a forked child of the library: let go without ending anything (D17)."""
        self._control.close()
        os.close(self._errors)
        self.pid = -1


class Template:
    """A zygote's fork with a policy's view. Sandboxes are made of it."""

    def __init__(self, control: socket) -> None:
        self._control = control
        self._lock = threading.Lock()

    def launch(self, plan: Mapping[str, object], fds: list[int]) -> None:
        """Have a sandbox made. It reports on its channel, which is the first descriptor."""
        with self._lock:
            _send(self._control, lean.dumps(dict(plan)), fds)

    def close(self) -> None:
        self._control.close()


def _send(control: socket, data: bytes, fds: list[int]) -> None:
    try:
        lean.send_fds(control, data, fds)
    except (BrokenPipeError, ConnectionResetError):
        raise SandboxLostError("the sandbox's zygote is gone", fix="try again: a new one is started") from None


def _spawn(interpreter: Interpreter, control: int, errors: int, tree: Tree | None) -> int:
    """posix_spawn: no copy of the caller's memory, an empty environment, descriptors 0–4 alone."""
    library = os.pidfd_open(os.getpid())
    prefix = tree.launch_prefix() if tree is not None else []
    argv = [*prefix, launcher(), interpreter.executable]
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, errors, 2),
    ]
    high = [_above(control), _above(library)]
    actions += [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
    try:
        # The caller's thread may block or ignore signals; a guest must not inherit that.
        return os.posix_spawn(
            argv[0], argv, {}, file_actions=actions, setsid=True, setsigmask=[], setsigdef=range(1, 32)
        )
    except OSError as error:
        raise UnsupportedError(
            f"cannot start {argv[0]}: {error.strerror}",
            missing=[Missing("process", "the launcher file can be executed", "reinstall ringfence")],
        ) from None
    finally:
        for fd in (*high, library):
            os.close(fd)


def _end(pid: int) -> None:
    """Its control socket is closed, so it ends by itself; one that hangs in a module's import is killed."""
    import select

    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # ended, and reaped by the caller
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_END_S * 1000):
            lean.signal_pidfd(pidfd, lean.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return
    finally:
        os.close(pidfd)


def _above(fd: int) -> int:
    """A copy with a number that the fixed descriptors of the zygote do not overwrite."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


def _preload_failed(answer: dict[str, object]) -> Exception:
    from ringfence.errors import ImageError

    module = answer.get("module")
    if module is None:
        return ImageError(
            f"preload: {answer['error']}", code="preload", fix="preload only modules that start no thread"
        )
    return ImageError(
        f"cannot preload {module}: {answer['error']}", code="preload", fix=f"install it for {sys.executable}"
    )


def explain_refusal(text: str, number: object) -> UnsupportedError:
    """The kernel refused a step: which one, and what the host's owner can do about it (M9, M14)."""
    from ringfence.backends.process.refusals import cause

    found = cause(text, number)
    return UnsupportedError(
        f"the sandbox could not be built: {found.why} ({text})",
        code=found.code,
        missing=[Missing("process", found.what, found.fix)],
    )
