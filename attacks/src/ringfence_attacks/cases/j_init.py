"""J17: PID 1 and the spawner, which a guest can name, and must not write to, limit or choose."""

from __future__ import annotations

from ringfence.errors import RingfenceError
from ringfence_attacks.case import SPOOF, WRITE, Seen, attack, cases
from ringfence_attacks.tracer import Attempt, answers, host_pid, pid_told

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Sandbox
    from ringfence_attacks.arena import Arm


def goes_on(box: Sandbox) -> str:
    """The words "exit 5" when a command that ends so is seen to; otherwise what came instead."""
    try:
        result = box.exec(["sh", "-c", "exit 5"])
        return f"exit {result.exit_code}" if result.exit_code == 5 else f"false: {result.status} {result.exit_code}"
    except (RingfenceError, OSError) as error:
        return f"{type(error).__name__}: {error}"


_POKE = """
def poke(pid):
    with open(f"/proc/{pid}/maps") as file:
        line = next(line for line in file if "[stack]" in line)
    start = int(line.split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(mark.encode())
    tell(address=start)
attempt("mem", poke, target)
attempt("fd", lambda: [os.readlink(f"/proc/{target}/fd/{n}") for n in os.listdir(f"/proc/{target}/fd")])
tell(pid=os.getpid())
time.sleep(8)
"""


def _poked(arm: Arm, target: int) -> Seen:
    """A mark written to the unused end of its stack is looked for from outside."""
    box = arm.sandbox()
    _, said = pid_told(arm.spawn(_POKE, box=box, target=target, mark=arm.canary))
    words = "; ".join(line for line in said.splitlines() if "tried" in line)
    if '"address": ' not in said:
        return Seen(succeeded=False, what=words)
    address = int(said.partition('"address": ')[2].split("}")[0])
    with open(f"/proc/{host_pid(box, target)}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        found = memory.read(len(arm.canary)) == arm.canary.encode()
    return Seen(found, words)


@attack(
    "J17",
    "PID 1's memory is not written, nor its descriptors read: it is not dumpable",
    WRITE,
    off="not-dumpable",
    behind=("landlock-scopes", "landlock-files"),
)
def memory_of_init(arm: Arm) -> Seen:
    return _poked(arm, 1)


@attack(
    "J17-domain",
    "PID 1's memory is not written, nor its descriptors read: it is outside the guest's Landlock domain",
    WRITE,
    off=("landlock-scopes", "landlock-files"),
    behind="not-dumpable",
    needs="landlock",
)
def domain_of_init(arm: Arm) -> Seen:
    return _poked(arm, 1)


@attack("J17-spawner", "the spawner's memory is not written, nor its descriptors read", WRITE, off="not-dumpable")
def memory_of_the_spawner(arm: Arm) -> Seen:
    return _poked(arm, 2)


_CHOSEN = """
attempt("oom_score_adj", spill, f"/proc/{target}/oom_score_adj", "1000")
tell(pid=os.getpid())
time.sleep(8)
"""


def _chosen(arm: Arm, target: int) -> Seen:
    box = arm.sandbox()
    _, said = pid_told(arm.spawn(_CHOSEN, box=box, target=target))
    with open(f"/proc/{host_pid(box, target)}/oom_score_adj", encoding="ascii") as file:
        value = file.read().strip()
    return Seen(value == "1000", f"{said.splitlines()[0]}; oom_score_adj {value}")


@attack("J17-oom", "a guest does not choose PID 1 for the kernel to kill", SPOOF, off="not-dumpable")
def choose_init(arm: Arm) -> Seen:
    return _chosen(arm, 1)


@attack("J17-oom-spawner", "a guest does not choose the spawner for the kernel to kill", SPOOF, off="not-dumpable")
def choose_the_spawner(arm: Arm) -> Seen:
    return _chosen(arm, 2)


_LIMITED = """
import struct
attempt("prlimit", call, 302, target, 7, struct.pack("QQ", 3, 4), 0)
tell(pid=os.getpid())
time.sleep(8)
"""


def _limited(arm: Arm, target: int) -> Seen:
    box = arm.sandbox()
    _, said = pid_told(arm.spawn(_LIMITED, box=box, target=target))
    with open(f"/proc/{host_pid(box, target)}/limits", encoding="ascii") as file:
        soft = next(line for line in file if line.startswith("Max open files")).split()[3]
    return Seen(soft == "3", f"{said.splitlines()[0]}; soft limit of open files {soft}")


@attack("J17-prlimit", "PID 1's limits are not lowered", SPOOF, off="seccomp:prlimit")
def limits_of_init(arm: Arm) -> Seen:
    return _limited(arm, 1)


@attack("J17-prlimit-spawner", "the spawner's limits are not lowered", SPOOF, off="seccomp:prlimit")
def limits_of_the_spawner(arm: Arm) -> Seen:
    return _limited(arm, 2)


@attack("J17-signals", "no signal reaches PID 1", SPOOF, off="landlock-scopes", needs="landlock")
def signals_to_init(arm: Arm) -> Seen:
    """The kernel drops what PID 1 has no handler for; that a guest may send it at all is what Landlock refuses."""
    attempts = [Attempt(f"signal {number}", 62, (1, number)) for number in range(1, 65) if number not in (32, 33)]
    box = arm.sandbox()
    got = answers(arm, box, attempts)
    sent = [name for name, result in got.items() if result == 0]
    alive = goes_on(box) == "exit 5"
    return Seen(bool(sent) or not alive, f"{len(sent)} of {len(got)} sent; the sandbox goes on: {alive}")


CASES = cases(globals())
