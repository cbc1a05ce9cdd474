"""What the zygote does when the library ended without a word (SIGKILL, or a command in a hurry): it cleans up."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in lean
import fcntl
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .shapes import Hello

_GIVE_UP_S = 10
_TRIES = 400  # of 5 ms: a memory cgroup stays busy for a while after its last process


def clean_up(hello: Hello, library: int) -> None:
    """Called when the library's end of the socket is closed. Its monitors end by themselves; we wait, and remove."""
    _signal.alarm(_GIVE_UP_S)  # its default ends us: what is left then is for the next sweep
    poll = select.poll()
    poll.register(library, select.POLLIN)
    if not poll.poll(1000):
        return  # alive: it let go of us, no more
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
    """Placeholders on the host: the library's own sweep removes them, in an interpreter of its own."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ours = f"import sys; sys.path.append({root!r}); import ringfence; sys.path.pop()"  # as in __main__ (L12)
    text = f"{ours}; from ringfence.backends.process import state; state.sweep()"
    env = {"XDG_RUNTIME_DIR": os.path.dirname(os.path.dirname(os.path.dirname(record))), "HOME": home}
    try:
        pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", text], env)
        os.waitpid(pid, 0)
    except OSError:
        return  # ignored children are reaped for us


def _wait_for_children() -> None:
    """SIGCHLD is ignored, so this returns when the last one is gone. Orphaned monitors come to us: we are subreaper."""
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
    """Lock files of uids that no process holds any more. Whoever waits for one checks that it is still the file."""
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
