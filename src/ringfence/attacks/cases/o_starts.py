"""O: what goes wrong while the host starts a sandbox, and what must not follow from it."""

from __future__ import annotations

from ringfence.attacks.case import OURS, SPOOF, Seen, attack, cases
from ringfence.attacks.hosts import host_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.attacks.arena import Arm

# One start fails as it does where a helper of ours was killed. No engine is to be met: the road to one is what counts.
_ONE_FAULT = """
import os
os.environ["DOCKER_HOST"] = "unix:///nowhere"
import ringfence
from ringfence import choosing
from ringfence.backends.process import zygote
from ringfence.errors import UnsupportedError
{careless}
built, faults, others = zygote.Template.wait_built, ["PID 1 could not be set up: it ended"], []
def wait_built(template):
    if faults:
        raise zygote.explain_refusal(faults.pop(), None)
    built(template)
zygote.Template.wait_built = wait_built
begin = choosing.Others.__init__
def begun(*args):
    others.append("others")
    begin(*args)
choosing.Others.__init__ = begun
try:
    print(ringfence.run("1").backend, *others)
except UnsupportedError as error:
    print("refused", *others)
"""
_CARELESS = "zygote.explain_refusal = lambda text, number: UnsupportedError(text, code='build')"


@attack(
    "O27", "a failure that may pass is no reason for another wall", SPOOF, off=OURS, label="facts of the host alone"
)
def another_wall(arm: Arm) -> Seen:
    """Whoever can make one start fail, by filling a table or by a name that goes at the right moment, could choose the
    wall of the next sandbox of a caller who asked for the best. Off: every failed start is a refusal of the host.

    Seen by the host's own result, and by whether another wall was asked for at all.
    """
    done = host_process(_ONE_FAULT.format(careless=_CARELESS if arm.off else ""), timeout_s=60)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-300:])
    said = done.stdout.split()
    return Seen(said != ["process"], f"the next sandbox: {' '.join(said)}")


CASES = cases(globals())
