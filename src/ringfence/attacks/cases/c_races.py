"""C: races. Each is bounded in time and tells how often both sides came by; too few and it proves nothing."""

from __future__ import annotations

import os
import time

from ringfence import Policy, PolicyError
from ringfence.attacks.case import (
    DOS,
    ESCAPE,
    OURS,
    PERSIST,
    READ,
    WRITE,
    NotApplicable,
    Seen,
    attack,
    cases,
    not_applicable,
)
from ringfence.attacks.hosts import host_process
from ringfence.attacks.witnesses import host_folder, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Sandbox
    from ringfence.attacks.arena import Arm

_RACE_S = 0.8
_ENOUGH = 20  # attempts of the host while the guest swaps

# Swaps two names in a folder as fast as it can, atomically, and tells how often.
_SWAP = """
tell(ready=True)
end = time.monotonic() + seconds
count = 0
here = os.open(top, os.O_RDONLY)
while time.monotonic() < end:
    for _ in range(100):
        call(316, here, one, here, other, 2)
    count += 100
    tell(swaps=count)
"""


def _swapping(arm: Arm) -> Sandbox:
    """A sandbox that shows this arm's folder, with a guest in it that swaps `place` and `link`."""
    box = arm.sandbox(arm.shared())
    process = arm.spawn(_SWAP, box=box, top=arm.directory, one=b"place", other=b"link", seconds=_RACE_S + 3)
    next(iter(process))
    return box


def _goes_on(started: float, tries: int) -> bool:
    """For the time of a race; on a busy host for as long as it takes to try enough, while the guest still swaps."""
    passed = time.monotonic() - started
    return passed < _RACE_S or (tries < _ENOUGH and passed < _RACE_S + 2.5)


def _judge(wins: int, tries: int, what: str) -> Seen:
    if tries < _ENOUGH:
        raise AssertionError(f"only {tries} tries in {_RACE_S} s: the race proves nothing")
    return Seen(wins > 0, f"{what}: {wins} of {tries}")


def _race_folder(arm: Arm) -> str:
    """A shared folder with `place` (a real one) and `link` (to a folder of the host that is not shared)."""
    outside = arm.enter(host_folder())
    with open(f"{outside}/file", "w", encoding="utf-8") as file:
        file.write(arm.canary)
    os.chmod(outside, 0o777)
    os.chmod(f"{outside}/file", 0o666)
    place = f"{arm.directory}/place"
    os.mkdir(place)
    os.chmod(place, 0o777)
    with open(f"{place}/file", "w", encoding="utf-8") as file:
        file.write("harmless")
    os.chmod(f"{place}/file", 0o666)
    os.symlink(outside, f"{arm.directory}/link")
    return outside


@attack(
    "C01", "a folder swapped for a link does not lead a write of the host outside", WRITE, off=OURS, label="openat2"
)
def swapped_on_write(arm: Arm) -> Seen:
    """Off: a plain open on the host's side of the shared folder."""
    outside = _race_folder(arm)
    box = _swapping(arm)
    path = f"{arm.directory}/place/file"
    wins = tries = 0
    started = time.monotonic()
    while _goes_on(started, tries):
        tries += 1
        try:
            if arm.off:
                with open(path, "w", encoding="utf-8") as file:
                    file.write("mine")
            else:
                box.files.write(path, "mine")
        except OSError:
            pass
        if text_of(f"{outside}/file") != arm.canary or len(os.listdir(outside)) != 1:
            wins += 1
            with open(f"{outside}/file", "w", encoding="utf-8") as file:
                file.write(arm.canary)
    return _judge(wins, tries, "writes that landed outside")


@attack("C02", "a file swapped for a link does not lead a read of the host outside", READ, off=OURS, label="openat2")
def swapped_on_read(arm: Arm) -> Seen:
    _race_folder(arm)
    box = _swapping(arm)
    path = f"{arm.directory}/place/file"
    wins = tries = 0
    started = time.monotonic()
    while _goes_on(started, tries):
        tries += 1
        try:
            data = text_of(path) if arm.off else box.files.read_text(path)
        except OSError:
            continue
        wins += arm.canary in data
    return _judge(wins, tries, "reads that saw the canary")


@attack("C03", "a folder swapped for a link does not lead a removal outside", WRITE, off=OURS, label="unlinkat")
def swapped_on_removal(arm: Arm) -> Seen:
    """Off: names are listed first and removed by path, as `os.walk` with `os.remove` does."""
    outside = _race_folder(arm)
    box = _swapping(arm)
    place = f"{arm.directory}/place"
    wins = tries = 0
    started = time.monotonic()
    while _goes_on(started, tries):
        tries += 1
        try:
            if arm.off:
                for name in os.listdir(place):
                    os.remove(f"{place}/{name}")
            else:
                box.files.remove(f"{place}/file")
        except OSError:
            pass
        if not os.path.exists(f"{outside}/file"):
            wins += 1
            with open(f"{outside}/file", "w", encoding="utf-8") as file:
                file.write(arm.canary)
    return _judge(wins, tries, "removals outside")


C04 = not_applicable(
    "C04", "a connect that is looked at is not swapped", ESCAPE, "no call of a guest is looked at and then run again"
)
C05 = not_applicable("C05", "a path that is looked at is not swapped", ESCAPE, "no broker opens files for a guest")


@attack(
    "C06", "a policy file that changes while it is read is one policy or an error", ESCAPE, off=OURS, label="one read"
)
def changing_policy(arm: Arm) -> Seen:
    """Two writers' texts differ in two keys; a mixture has one of each. Off: the file is read a key at a time."""
    import threading

    texts = [f"[limits]\nprocesses = {n}\nopen_files = {n}\n" for n in (11, 77)]
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
    mixed = tries = 0
    try:
        started = time.monotonic()
        while _goes_on(started, tries):
            tries += 1
            mixed += _reads_mixture(path, careless=arm.off)
    finally:
        stop.set()
        writer.join()
    return _judge(mixed, tries, "mixtures")


def _reads_mixture(path: str, *, careless: bool) -> bool:
    if careless:
        first = text_of(path).splitlines()[1:2]
        time.sleep(0.0005)
        second = text_of(path).splitlines()[2:3]
        return bool(first and second) and first[0].split("=")[-1] != second[0].split("=")[-1]
    try:
        limits = Policy.load(path).limits
    except PolicyError:
        return False
    return limits.processes != limits.open_files


C08 = not_applicable(
    "C08",
    "a signal never reaches a process that took a dead one's number",
    DOS,
    "guests are signalled by pidfd alone; a numbered pid is used only for our own child, before it is waited for",
)


@attack(
    "C09",
    "a state folder that somebody else laid out is refused",
    PERSIST,
    off=OURS,
    label="state: owner, mode, no link",
)
def squatted_state(arm: Arm) -> Seen:
    """As another user could in a shared place: the folder is a link to one of theirs. Off: made with exist_ok."""
    if os.geteuid() == 0:
        raise NotApplicable("root's state is in /run, where nobody else can make a name")
    theirs = f"{arm.directory}/theirs"
    runtime = f"{arm.directory}/runtime"
    os.mkdir(theirs)
    os.mkdir(runtime, 0o700)
    os.symlink(theirs, f"{runtime}/ringfence")
    if arm.off:
        os.makedirs(f"{runtime}/ringfence/owners", exist_ok=True)
        return Seen(bool(os.listdir(theirs)), "the link was followed")
    done = host_process(f"import os; os.environ['XDG_RUNTIME_DIR'] = {runtime!r}\nimport ringfence; ringfence.run('1')")
    return Seen(bool(os.listdir(theirs)), done.stderr.strip()[-160:] or "it ran without it")


C10 = not_applicable("C10", "no socket file is squatted", ESCAPE, "there is none: every channel is a socket pair")

CASES = cases(globals())
