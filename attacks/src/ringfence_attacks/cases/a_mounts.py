"""A: host folders that a guest may write to, and the protected files in these folders, which a guest must not write."""

from __future__ import annotations

import os
import stat
import time

from ringfence_attacks.case import ESCAPE, WRITE, Seen, attack, cases
from ringfence_attacks.witnesses import holds, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm


def _repository(arm: Arm) -> str:
    arm.host_file(".git/config", "[core]\n", mode=0o666)
    arm.host_file(".git/HEAD", "ref: refs/heads/main\n", mode=0o666)
    arm.host_file(".git/commondir", ".\n", mode=0o666)  # else there would be a placeholder, which is watched
    os.mkdir(f"{arm.directory}/.git/hooks")
    for directory in (f"{arm.directory}/.git", f"{arm.directory}/.git/hooks"):
        os.chmod(directory, 0o777)
    return arm.directory


_RENAME = """
os.chdir(top)
attempt("rename .git", os.rename, ".git", ".git2")
attempt("mkdir .git", os.makedirs, ".git/hooks", exist_ok=True)
attempt("write a hook", spill, ".git/hooks/post-checkout", canary, os.O_CREAT)
attempt("rename hooks", os.rename, ".git/hooks", ".git/old")
attempt("exchange", call, 316, AT_FDCWD, b".git/hooks", AT_FDCWD, b".git/HEAD", 2)
"""


def _renaming(arm: Arm) -> Seen:
    """Seen by the host: a file with the canary anywhere in the repository."""
    top = _repository(arm)
    box = arm.sandbox(arm.shared())
    report = arm.python(_RENAME, box=box, top=top, canary=arm.canary)
    return Seen(holds(top, arm.canary), report.words())


A12 = attack("A12", "a protected folder is not renamed away", WRITE, off=("protect", "pin"), behind="watch")(_renaming)
A32 = attack("A32", "a folder above a protected one is not renamed away", WRITE, off="pin", behind="watch")(_renaming)


_MAKE = """
os.chdir(top)
for name in (".mcp.json", ".envrc", ".git/hooks/post-checkout", ".git/config", ".vscode/tasks.json"):
    attempt(name, spill, name, canary, os.O_CREAT)
attempt("link", os.symlink, "/tmp/x", ".bashrc")
"""


def _half_repository(arm: Arm) -> None:
    arm.host_file(".git/HEAD", "ref: refs/heads/main\n", mode=0o666)
    os.chmod(f"{arm.directory}/.git", 0o777)


@attack("A13", "a protected path that does not exist is not made", WRITE, off="protect")
def made_anew(arm: Arm) -> Seen:
    _half_repository(arm)
    box = arm.sandbox(arm.shared())
    report = arm.python(_MAKE, box=box, top=arm.directory, canary=arm.canary)
    return Seen(holds(arm.directory, arm.canary), report.words())


@attack(
    "A13-second",
    "a second sandbox, which finds the first one's placeholders, makes no protected path either",
    WRITE,
    off="protect",
)
def made_in_a_second(arm: Arm) -> Seen:
    _half_repository(arm)
    arm.sandbox(arm.shared(), whole=True)
    box = arm.sandbox(arm.shared())
    report = arm.python(_MAKE, box=box, top=arm.directory, canary=arm.canary)
    return Seen(holds(arm.directory, arm.canary), report.words())


# set-id bits on the host


def _set_id(arm: Arm, code: str) -> Seen:
    """Seen by the host: the set-id bits of the files in the shared folder."""
    box = arm.sandbox(arm.shared())
    report = arm.python(code, box=box, top=arm.directory)
    marked = [name for name in os.listdir(arm.directory) if _is_set_id(f"{arm.directory}/{name}")]
    for name in marked:
        os.chmod(f"{arm.directory}/{name}", 0o600)
    return Seen(bool(marked), report.words())


@attack("A31", "no set-user-id or set-group-id file is made in a host folder", ESCAPE, off="seccomp:setid-bits")
def set_id_file(arm: Arm) -> Seen:
    return _set_id(
        arm,
        """
        os.chdir(top)
        os.umask(0)
        for name in ("a", "b", "c"):
            spill(name, "#!/bin/sh\\n", os.O_CREAT)
        attempt("chmod", os.chmod, "a", 0o4755)
        attempt("fchmod", lambda: os.fchmod(os.open("b", os.O_RDONLY), 0o2755))
        attempt("fchmodat2", call, 452, AT_FDCWD, b"c", 0o6755, 0)
        attempt("open", os.open, "d", os.O_CREAT | os.O_WRONLY, 0o4755)
        attempt("creat", call, 85, b"e", 0o4755)
        attempt("mknod", os.mknod, "f", 0o104755)
        attempt("high bits", call, 90, b"a", (1 << 32) | 0o4755)
        """,
    )


@attack("A31-openat2", "no set-user-id file is made by openat2", ESCAPE, off="seccomp:openat2")
def set_id_by_openat2(arm: Arm) -> Seen:
    return _set_id(
        arm,
        """
        os.umask(0)
        directory = os.open(top, os.O_RDONLY)
        how = (os.O_CREAT | os.O_WRONLY).to_bytes(8, "little") + (0o4755).to_bytes(8, "little") + bytes(8)
        attempt("openat2", call, 437, directory, b"g", how, 24)
        """,
    )


@attack("A31-layer", "guest code has one more filter than the worker that opens files", ESCAPE, off="last-layer")
def set_id_without_last_layer(arm: Arm) -> Seen:
    return set_id_by_openat2.play(arm)


@attack("A33", "when the host replaces a protected file, the sandbox is stopped at once", WRITE, off="watch")
def replaced_on_host(arm: Arm) -> Seen:
    """An editor on the host writes a new file and renames it over the protected file: the kernel then detaches the
    guest's read-only mount.

    The attack succeeds when a write of the guest lands later than `_STOP_S` after the rename. Earlier writes are
    reported, not judged: no order of events closes that window (docs/attacks.md).
    """
    top = _repository(arm)
    box = arm.sandbox(arm.shared())
    process = arm.spawn(
        """
        tell(ready=True)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            attempt("write", spill, top + "/.git/config", canary)
            time.sleep(0.001)
        """,
        box=box,
        top=top,
        canary=arm.canary,
    )
    next(iter(process))
    _replace(top)
    time.sleep(_STOP_S)
    early = arm.canary in text_of(f"{top}/.git/config")
    _replace(top)
    time.sleep(0.2)
    late = arm.canary in text_of(f"{top}/.git/config")
    return Seen(late, f"a write landed within {_STOP_S * 1000:.0f} ms: {early}, after it: {late}")


_STOP_S = 0.25


def _replace(top: str) -> None:
    new = f"{top}/.git/config.lock"
    with open(new, "w", encoding="utf-8") as file:
        file.write("[core]\n")
    os.chmod(new, 0o666)
    os.rename(new, f"{top}/.git/config")


def _is_set_id(path: str) -> bool:
    info = os.lstat(path)
    return stat.S_ISREG(info.st_mode) and bool(info.st_mode & 0o6000)


CASES = cases(globals())
