"""C: races. Each is limited in time and reports how many tries there were; too few tries prove nothing."""

from __future__ import annotations

import os
import time

from ringfence import Policy, PolicyError
from ringfence_attacks.case import (
    DOS,
    ESCAPE,
    HOST_CODE,
    PERSIST,
    READ,
    WRITE,
    NotApplicable,
    Seen,
    attack,
    cases,
    not_applicable,
)
from ringfence_attacks.host_programs import host_process
from ringfence_attacks.races import Race, Swapping
from ringfence_attacks.witnesses import text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm


@attack(
    "C01",
    "a folder swapped for a link does not lead a write of the host outside",
    WRITE,
    off=HOST_CODE,
    label="openat2",
)
def swapped_on_write(arm: Arm) -> Seen:
    """Off: a plain open on the host's side of the shared folder."""
    race, swapping = Race(), Swapping(arm)
    path = f"{swapping.place}/file"

    def write() -> None:
        if arm.off:
            with open(path, "w", encoding="utf-8") as file:
                file.write("mine")
        else:
            swapping.box.files.write(path, "mine")

    while race.goes_on():
        race.attempt(write)
        race.wins += swapping.was_changed()
    return race.judge("writes that landed outside")


@attack(
    "C02", "a file swapped for a link does not lead a read of the host outside", READ, off=HOST_CODE, label="openat2"
)
def swapped_on_read(arm: Arm) -> Seen:
    race, swapping = Race(), Swapping(arm)
    path = f"{swapping.place}/file"

    def read() -> bool:
        return arm.canary in (text_of(path) if arm.off else swapping.box.files.read_text(path))

    while race.goes_on():
        race.attempt(read)
    return race.judge("reads that saw the canary")


@attack("C03", "a folder swapped for a link does not lead a removal outside", WRITE, off=HOST_CODE, label="unlinkat")
def swapped_on_removal(arm: Arm) -> Seen:
    """Off: names are listed first and removed by path, as `os.walk` with `os.remove` does."""
    race, swapping = Race(), Swapping(arm)

    def remove() -> None:
        if arm.off:
            for name in os.listdir(swapping.place):
                os.remove(f"{swapping.place}/{name}")
        else:
            swapping.box.files.remove(f"{swapping.place}/file")

    while race.goes_on():
        race.attempt(remove)
        race.wins += swapping.was_changed()
    return race.judge("removals outside")


C04 = not_applicable(
    "C04",
    "the address of a connect is not swapped after a check",
    ESCAPE,
    "no call of a guest is looked at and then run again",
)
C05 = not_applicable("C05", "a path is not swapped after a check", ESCAPE, "no broker opens files for a guest")


@attack(
    "C06",
    "a policy file that changes while it is read is one policy or an error",
    ESCAPE,
    off=HOST_CODE,
    label="one read",
)
def changing_policy(arm: Arm) -> Seen:
    """A thread writes two texts in turn, which differ in two keys; a mixture has one key of each text.

    Off: the file is read once for each key.
    """
    import threading

    texts = [f"version = 1\n[limits]\nprocesses = {n}\nopen_files = {n}\n" for n in (11, 77)]
    path = arm.host_file("policy.toml", texts[0])
    stop = threading.Event()

    def write() -> None:
        fd = os.open(path, os.O_WRONLY)
        while not stop.is_set():
            for text in texts:
                os.pwrite(fd, text.encode(), 0)
        os.close(fd)

    writer = threading.Thread(target=write)
    writer.start()
    race = Race()
    try:
        while race.goes_on():
            race.attempt(lambda: _reads_mixture(path, careless=arm.off), refusal=PolicyError)
    finally:
        stop.set()
        writer.join()
    return race.judge("mixtures")


def _reads_mixture(path: str, *, careless: bool) -> bool:
    if careless:
        first = text_of(path).splitlines()[2:3]
        time.sleep(0.0005)
        second = text_of(path).splitlines()[3:4]
        return bool(first and second) and first[0].split("=")[-1] != second[0].split("=")[-1]
    limits = Policy.load(path).limits
    return limits.processes != limits.open_files


C08 = not_applicable(
    "C08",
    "a signal never reaches a process that got the pid of a dead process",
    DOS,
    "guests are signalled by pidfd alone; a numbered pid is used only for our own child, before it is waited for",
)


@attack(
    "C09",
    "a state folder that another user made is refused",
    PERSIST,
    off=HOST_CODE,
    label="state: owner, mode, no link",
)
def squatted_state(arm: Arm) -> Seen:
    """Another user has made the name a link to a folder of that user. Off: the folder is made with exist_ok."""
    if os.geteuid() == 0:
        raise NotApplicable("root's state is in /run, where no other user can make a name")
    theirs = f"{arm.directory}/theirs"
    runtime = f"{arm.directory}/runtime"
    os.mkdir(theirs)
    os.mkdir(runtime, 0o700)
    os.symlink(theirs, f"{runtime}/ringfence")
    if arm.off:
        os.makedirs(f"{runtime}/ringfence/owners", exist_ok=True)
        return Seen(bool(os.listdir(theirs)), "the link was followed")
    done = host_process(f"import os; os.environ['XDG_RUNTIME_DIR'] = {runtime!r}\nimport ringfence; ringfence.run('1')")
    return Seen(bool(os.listdir(theirs)), done.stderr.strip()[-160:] or "it ran without the folder")


C10 = not_applicable(
    "C10", "no socket file is made by another user first", ESCAPE, "there is none: every channel is a socket pair"
)

CASES = cases(globals())
