"""O: what goes wrong while the host starts a sandbox, and what must not follow from it."""

from __future__ import annotations

from ringfence_attacks.case import DOS, HOST_CODE, SPOOF, Seen, attack, cases
from ringfence_attacks.host_programs import host_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm

# One start fails as it does where a helper process was killed. No engine is to be met: the road to one is what counts.
_ONE_FAULT = """
import os
os.environ["DOCKER_HOST"] = "unix:///nowhere"
import ringfence
from ringfence.backends import auto
from ringfence.backends.process import zygote
from ringfence.errors import UnsupportedError
{careless}
built, faults, others = zygote.Template.wait_built, ["PID 1 could not be set up: it ended"], []
def wait_built(template):
    if faults:
        raise zygote.explain_refusal(faults.pop(), None)
    built(template)
zygote.Template.wait_built = wait_built
pass_over = auto.Launcher._pass_over
def passed_over(*args):
    others.append("others")
    pass_over(*args)
auto.Launcher._pass_over = passed_over
try:
    print(ringfence.run("1").backend, *others)
except UnsupportedError as error:
    print("refused", *others)
"""
_CARELESS = "zygote.explain_refusal = lambda text, number: UnsupportedError(text, code='build')"


@attack(
    "O27",
    "a failure that may pass is no reason for another backend",
    SPOOF,
    off=HOST_CODE,
    label="facts of the host alone",
)
def another_wall(arm: Arm) -> Seen:
    """An attacker who makes a start fail, by filling a table or by removing a name at the right moment, could choose
    the backend of the next sandbox of a caller who asked for the best. Off: every failed start is a refusal of the
    host.

    Seen by the host's own result, and by whether another backend was asked for at all.
    """
    done = host_process(_ONE_FAULT.format(careless=_CARELESS if arm.off else ""), timeout_s=60)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-300:])
    said = done.stdout.split()
    return Seen(said != ["process"], f"the next sandbox: {' '.join(said)}")


# Every process of the library is killed between two runs of one caller.
_KILLED = """
import os, signal
import ringfence
from ringfence.backends.process import pool, zygote
{careless}
def ours(parent):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{{name}}/stat") as file:
                row = file.read()
        except OSError:
            continue
        if int(row.rpartition(")")[2].split()[1]) == parent and "(rf-" in row:
            found += [int(name), *ours(int(name))]
    return found
ringfence.run("1").check()
killed = ours(os.getpid())
assert killed
for pid in killed:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
try:
    print(ringfence.run("print(6 * 7)").stdout.strip())
except (ringfence.RingfenceError, OSError) as error:
    print(type(error).__name__, getattr(error, "code", error))
"""
_TRUSTING = "pool._may_pass = lambda error: False; zygote.Zygote.alive = property(lambda one: True)"


@attack(
    "O28", "a killed process of ours does not cost the next call", DOS, off=HOST_CODE, label="a dead helper is replaced"
)
def killed_helpers(arm: Arm) -> Seen:
    """An attacker who fills the host's memory until the kernel kills a helper would end the caller's work too, or have
    the failure reported as something else. Off: the host takes a helper for alive, and tries once. Seen by the host's
    own next call, of which nothing had run.
    """
    done = host_process(_KILLED.format(careless=_TRUSTING if arm.off else ""), timeout_s=60)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-300:])
    said = done.stdout.strip()
    return Seen(said != "42", f"the next call: {said}")


CASES = cases(globals())
