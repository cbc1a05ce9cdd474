"""Attacks on limits that guestd keeps by what the engine counts."""

from __future__ import annotations

from ringfence import Limits, Policy
from ringfence_attacks.case import DOS, HOST_CODE, Seen, attack, cases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm


@attack("F10-tree", "CPU time of many short processes ends at limits.cpu_time_s", DOS, off=HOST_CODE)
def burn_in_children(arm: Arm) -> Seen:
    """The processes together pass the limit that none reaches alone. Without a limit the script ends by itself."""
    cpu_s = 20 if arm.off else 0.5
    code = """
    def burn(seconds):
        while time.process_time() < seconds:
            pass
    for i in range(8):
        if os.fork() == 0:
            burn(0.3); os._exit(0)
        os.wait()
    """
    told = arm.python(code, box=arm.sandbox(Policy(limits=Limits(timeout_s=30, cpu_time_s=cpu_s))), timeout_s=25)
    return Seen(told.status == "ok", f"{told.status}, limit {cpu_s} s")


CASES = cases(globals())
