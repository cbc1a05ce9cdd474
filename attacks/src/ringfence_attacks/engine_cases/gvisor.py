"""Attacks on the limits around gVisor: the count of processes, and the cgroup of the sentry and its helpers."""

from __future__ import annotations

from ringfence import Limits, Policy
from ringfence.values import replace
from ringfence_attacks.case import DOS, Seen, attack, cases
from ringfence_attacks.engine_arena import wall_of
from ringfence_attacks.tracer import reported_pid
from ringfence_attacks.witnesses import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm

_LIMITS = Limits(timeout_s=30, memory="96M", processes=24, disk="1M", disk_files=200)
_FORKS = """
for i in range(60):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(12); os._exit(0)
tell(pid=os.getpid())
time.sleep(12)
"""


@attack("F06-sentry", "a fork bomb ends at limits.processes", DOS, off="process-limit")
def fork_bomb(arm: Arm) -> Seen:
    """Start 60 processes where 24 are permitted. gVisor has a process on the host for each address space inside: the
    host counts these processes.

    The memory limit has room for all of them: else the cgroup would end gVisor first.
    """
    box = arm.sandbox(Policy(limits=replace(_LIMITS, memory="768M")))
    reported_pid(arm.spawn(_FORKS, box=box))
    count = len(descendants(wall_of(box)._process.pid))  # noqa: SLF001  # no public name leads there
    return Seen(count > 24 + 24, f"{count} processes on the host")


@attack("F01-sentry", "memory ends at the cgroup around gVisor", DOS, off="cgroup", needs="cgroup")
def take_memory(arm: Arm) -> Seen:
    """Touch 400 MiB. The cgroup's limit is the guest's limit and what gVisor takes; above it the sandbox ends."""
    box = arm.sandbox(Policy(limits=_LIMITS))
    code = "held = bytearray(400 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\ntell(held=1)"
    report = arm.python(code, box=box, timeout_s=25)
    alive = wall_of(box)._process.poll() is None  # noqa: SLF001  # as above
    return Seen(report.said("held") == 1 and alive, f"{report.status}; gVisor {'runs' if alive else 'ended'}")


CASES = cases(globals())
