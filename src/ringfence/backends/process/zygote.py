"""The library's side of a zygote: the start by exec, the templates, and the sandboxes that templates make."""

from __future__ import annotations

import _thread
import errno
import os
import sys

from ringfence.errors import Missing, SandboxError, SandboxLostError, StartTimeoutError, UnsupportedError
from ringfence.host import state, zygote_start
from ringfence.plan.model import rows
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from socket import socket

    from ringfence.host.cgroups import Tree
    from ringfence.plan.model import LinuxPlan
    from ringfence.plan.rootfs.interpreter import Interpreter

_START_S = 30.0  # with preload of large modules on a slow machine
_BUILD_S = 10.0
_END_S = 2.0
_MAX_PACKET = 1 << 16
_BOTH_WAYS = 2
_AGAIN = "try again: a new one is started"
_NO_LAUNCHER = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENOEXEC,
    errno.ENOTDIR,
    errno.ELOOP,
)  # errors that the installation causes


class Zygote:
    """A warm interpreter that templates are forked from. Safe from several threads."""

    def __init__(self, interpreter: Interpreter, preload: tuple[str, ...], tree: Tree | None) -> None:
        """Start the interpreter without waiting: the first template waits until the interpreter is ready."""
        self._lock = _thread.allocate_lock()
        begun = _start(interpreter.executable, [])
        try:
            adopted = tree is None or tree.adopt(begun.pid)
        except BaseException:
            zygote_start.end(begun)
            raise
        if tree is not None and not adopted:
            zygote_start.end(begun)
            begun = _start(interpreter.executable, tree.launch_prefix())
        self.pid, self._control, self._errors = begun.pid, begun.control, begun.errors
        self._control.settimeout(_START_S)
        self._tree = tree
        # The zygote is moved before its first fork, which would otherwise stay outside the cgroup.
        self._moves = tree is not None and tree.moves_zygotes
        self._ready = False
        self._made_any = False
        self._cut = False  # the zygote has closed its end of the control socket: it ends, or has ended
        hello = {
            "sys_path": _untouched(interpreter.sys_path) if preload else (),
            "preload": preload,
            "cgroups": tree.owner_directories() if tree is not None else [],
            "record": state.record(),
            "uids": state.directory("uid") if os.geteuid() == 0 else None,
            "stakes": f"{state.lasting_place('placeholders')}/stakes",
            "home": os.path.expanduser("~"),
        }
        self._say(fast_stdlib.dumps(hello), [])

    def _say(self, data: bytes, fds: list[int]) -> None:
        try:
            fast_stdlib.send_fds(self._control, data, fds)
        except OSError as error:
            closed = self._control.fileno() < 0  # by another thread, which noticed first
            if not closed and not isinstance(error, BrokenPipeError | ConnectionResetError):
                raise
            raise self._gone() from None

    def _gone(self) -> SandboxLostError:
        """Return the error for a zygote that has ended, and make `alive` False at once.

        The process may still be ending; the next sandbox gets a new zygote.
        """
        self._cut = True
        message = f"the zygote, our process that makes sandboxes, has ended{self._how_it_ended()}"
        return SandboxLostError(f"{message}{self._last_words()}; sandboxes that run go on", fix=_AGAIN)

    def _how_it_ended(self) -> str:
        """Return the signal or status in words, or "" where the caller has reaped our child."""
        try:
            pid = self.pid
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) if pid > 0 else None
        except ChildProcessError:
            info = None
        if info is None:
            return ""
        return f" with status {info.si_status}" if info.si_code == os.CLD_EXITED else f" by signal {info.si_status}"

    def wait_ready(self) -> None:
        """Wait until the imports are done. Raises ImageError for a preload that failed, and closes the zygote."""
        with self._lock:
            if self._ready:
                return
            try:
                answer = self._answer(self._control)
                if "error" in answer:
                    raise _preload_failed(answer)
                if self._tree is not None:
                    self._tree.attach(self.pid)
            except BaseException:
                self.close()
                raise
            self._ready = True

    def template(self, plan: LinuxPlan) -> Template:
        """Return a fork with a root of its own. `launch` can be called at once, `wait_built` waits for the root."""
        if self._moves:
            self.wait_ready()
        ours, theirs = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
        request = fast_stdlib.dumps({"ops": rows(plan.template), "as_root": plan.as_root, "foreign": plan.foreign})
        ours.settimeout(_BUILD_S)
        try:
            with self._lock:
                young, self._made_any = not self._made_any, True
                self._say(request, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Template(ours, self, young=young)

    def built(self, sock: socket) -> None:
        """Wait until the template behind `sock` is built. Raises what `explain_refusal` returns."""
        self.wait_ready()
        answer = self._answer(sock)
        if "error" in answer:
            raise explain_refusal(str(answer["error"]), answer.get("errno"))

    def _answer(self, sock: socket) -> dict[str, object]:
        try:
            try:
                data = sock.recv(_MAX_PACKET)
            except ConnectionResetError:  # it ended with a request unread; its last answer comes after this error
                data = sock.recv(_MAX_PACKET)
        except TimeoutError:
            raise StartTimeoutError("the sandbox's zygote did not answer in time", fix="try again") from None
        except OSError:
            data = b""  # closed by another thread, which noticed first
        if not data:
            raise self._gone() if sock is self._control else _monitor_gone()
        answer: dict[str, object] = fast_stdlib.loads(data)
        return answer

    def _last_words(self) -> str:
        try:
            said = os.pread(self._errors, 4096, 0) if self._errors >= 0 else b""
        except OSError:
            said = b""  # closed by another thread, which noticed first
        text = said.decode("utf-8", "replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""

    @property
    def alive(self) -> bool:
        """Whether the zygote has not ended. Reaps a zygote that has."""
        if self.pid < 0 or self._cut:
            return False
        try:
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # the caller reaps all children
            pid = 0 if os.path.exists(f"/proc/{self.pid}") else self.pid
        if pid:
            self.pid = -1
        return not pid

    def close(self) -> None:
        """End the zygote. Idempotent. Running sandboxes go on: they belong to the library, not to the zygote."""
        if self._errors < 0:
            return
        try:
            self._say(b'{"bye":true}', [])
        except (SandboxLostError, OSError):
            pass  # gone already
        self._control.close()
        if self.pid >= 0:
            _end(self.pid)
            self.pid = -1
        errors, self._errors = self._errors, -1
        os.close(errors)

    def disown_descriptors(self) -> None:
        """Wait for the process to end, and close no descriptor: the caller closed them all."""
        self._control.detach()
        self._errors = -1
        pid, self.pid = self.pid, -1
        if pid >= 0:
            _end(pid)

    def after_fork(self) -> None:
        """Close this copy of the descriptors in a forked child of the library, without ending the zygote (D17)."""
        self._control.close()
        os.close(self._errors)
        self.pid = -1


class Template:
    """A zygote's fork with a policy's view, which makes sandboxes."""

    def __init__(self, control: socket, zygote: Zygote, *, young: bool) -> None:
        self.young = young  # made before the zygote had loaded what most programs import
        self.zygote = zygote  # all its forks have the same memory addresses
        self._control = control
        self._lock = _thread.allocate_lock()
        self._building = _thread.allocate_lock()
        self._built: bool | Exception = False
        self._plans: dict[int, LinuxPlan] = {}  # those the forker has, kept so that no other plan gets the same id()

    def wait_built(self) -> None:
        """Wait until the template is built. Raises what `Zygote.built` raises, to every thread that waits."""
        if self._built is True:
            return
        with self._building:
            if self._built is False:
                try:
                    self.zygote.built(self._control)
                    self._built = True
                except Exception as error:
                    self._built = error
                    raise
            if isinstance(self._built, Exception):
                raise self._built

    def launch(self, plan: LinuxPlan, request: Mapping[str, object], fds: list[int]) -> None:
        """Have a sandbox made. The sandbox reports on its channel, which is the first descriptor."""
        try:
            with self._lock:
                new = id(plan) not in self._plans
                whole = {**request, "plan_id": id(plan), "plan": plan.encoded() if new else None}
                _send(self._control, fast_stdlib.dumps(whole), fds)
                self._plans[id(plan)] = plan
        except SandboxLostError:
            self.wait_built()  # raises the reason where the template could not be built
            raise

    def give(self, number: int, fd: int) -> None:
        """Hand a memory image to sandbox `number`."""
        with self._lock:
            _send(self._control, fast_stdlib.dumps({"box": number, "protect": None}), [fd])

    def protect_again(self, number: int, paths: list[tuple[str, int, int]], fd: int) -> None:
        """Have paths inside sandbox `number` made read-only once more. The outcome is written to `fd`."""
        with self._lock:
            _send(self._control, fast_stdlib.dumps({"box": number, "protect": paths}), [fd])

    def close(self) -> None:
        """Close the socket to the template, after waking the threads that wait for it to be built.

        A thread whose socket is only closed would wait on.
        """
        try:
            self._control.shutdown(_BOTH_WAYS)
        except OSError:
            pass  # closed already, or its monitor is gone
        with self._building, self._lock:
            self._control.close()

    def after_fork(self) -> None:
        """Close this copy of the socket in a forked child of the library.

        Takes no lock: a thread of the parent may have held it at the fork (D17).
        """
        self._control.close()

    def disown_descriptors(self) -> None:
        """Drop the socket without closing the descriptor: the caller did that, and may have reused the number."""
        self._control.detach()


def _untouched(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders that no guest can write to (L12): preloaded modules run with the caller's rights."""
    from ringfence.host import import_path

    return import_path.untouched(folders)


def _send(control: socket, data: bytes, fds: list[int]) -> None:
    """Send a request to a monitor. Raises SandboxLostError where the monitor has ended."""
    try:
        fast_stdlib.send_fds(control, data, fds)
    except OSError as error:
        closed = control.fileno() < 0  # by another thread, which noticed first
        if not closed and not isinstance(error, BrokenPipeError | ConnectionResetError):
            raise
        raise _monitor_gone() from None


def _monitor_gone() -> SandboxLostError:
    return SandboxLostError(
        "the monitor, our process that watches the sandboxes of one view, was killed before this sandbox was made; or "
        "their forker was",
        fix=_AGAIN,
    )


def _start(executable: str, prefix: list[str]) -> zygote_start.Started:
    begun = zygote_start.take("" if prefix else executable)
    try:
        return begun or zygote_start.start(executable, prefix)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            words = "no room for another process of this user: raise the limit (ulimit -u), or end some"
            raise OSError(error.errno, words) from None
        if error.errno not in _NO_LAUNCHER:
            raise  # it may pass, and says nothing about the host
        missing = Missing("process", "the launcher file can be executed", "reinstall ringfence")
        raise UnsupportedError(
            f"cannot start {[*prefix, zygote_start.launcher()][0]}: {error.strerror}", missing=[missing]
        ) from None


def _end(pid: int) -> None:
    """Wait for a zygote whose control socket is closed; kill a zygote that hangs in a module's import."""
    import select

    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # ended, and reaped by the caller
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_END_S * 1000):
            fast_stdlib.signal_pidfd(pidfd, fast_stdlib.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return
    finally:
        os.close(pidfd)


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


def explain_refusal(text: str, number: object, *, out_of_memory: bool = False) -> UnsupportedError | SandboxError:
    """Return the error for a step that failed, with what the host's owner can do about it (kernel facts 9 and 14).

    UnsupportedError for a fact of this host or of the policy; SandboxError for a failure that may pass, and for a mount
    whose source is not what the plan looked at: no other backend is tried after our own refusal.
    """
    from ringfence.host.kernel_refusals import cause, mounts_changed

    if number == errno.ESTALE:
        return mounts_changed(text)
    found = cause(text, number, out_of_memory=out_of_memory)
    if found.passes:
        return SandboxError(
            f"the sandbox could not be built: {found.why} ({text})", code=found.code, fix=found.fix, retryable=True
        )
    return UnsupportedError(
        f"the sandbox could not be built: {found.why} ({text})",
        code=found.code,
        missing=[Missing("process", found.what, found.fix)],
    )
