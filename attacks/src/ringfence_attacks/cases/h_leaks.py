"""H: leaks: what a guest could learn about the host, the supervisor and other sandboxes."""

from __future__ import annotations

import os
import subprocess
import sys

from ringfence import Sandbox
from ringfence._sync import compat
from ringfence.host import import_path
from ringfence.host.zygote_start import own_package
from ringfence_attacks.arena import POLICY
from ringfence_attacks.case import HOST_CODE, LEAK, NotApplicable, Seen, attack, cases, not_applicable
from ringfence_attacks.witnesses import replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence_attacks.arena import Arm

_ENVIRONS = """
for name in os.listdir("/proc"):
    if name.isdigit():
        steal(f"/proc/{name}/environ")
loot(repr(dict(os.environ)))
"""


@attack("H01", "no variable of the supervisor is in a guest's environment", LEAK, off=HOST_CODE)
def variables(arm: Arm) -> Seen:
    """Off: a child that inherits the environment, as subprocess gives it."""
    arm.environ()
    if not arm.off:
        return arm.stolen(arm.python(_ENVIRONS, box=arm.sandbox(whole=True)))
    code = "print(open('/proc/self/environ').read())"
    out = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True).stdout.decode()
    return Seen(arm.canary in out, "an inherited environment")


# The supervisor has the canary in its arguments, environment and heap; a guest searches all of its own memory for the
# canary. The search has the canary in two halves and never joins them: else it would find itself.
_SUPERVISOR = """
import os, sys
canary = sys.argv[1]
search = '''
half, rest = first_half.encode(), second_half[::-1].encode()
found = False
with open("/proc/self/maps") as maps:
    areas = [line.split() for line in maps]
memory = os.open("/proc/self/mem", os.O_RDONLY)
for area in areas:
    start, end = (int(part, 16) for part in area[0].split("-"))
    if "r" not in area[1] or area[-1] in ("[vvar]", "[vsyscall]", "[vvar_vclock]"): continue
    while start < end:
        try: data = os.pread(memory, min(1 << 20, end - start) , start)
        except OSError: break
        if not data: break
        at = data.find(half)
        while at >= 0:
            if data[at + 16 : at + 32] == rest: found = True
            at = data.find(half, at + 1)
        start += max(1, len(data) - 64) if len(data) > 64 else len(data)
print("found" if found else "clean")
'''
head = "import os\\nfirst_half = %r\\nsecond_half = %r\\n" % (canary[:16], canary[:15:-1])
code = head + search
if sys.argv[2] == "off":
    pid = os.fork()
    if pid == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
else:
    import ringfence
    print(ringfence.run(code).stdout)
"""


@attack("H12", "a guest's memory has no part of the supervisor's memory, arguments or environment", LEAK, off=HOST_CODE)
def memory_of_the_supervisor(arm: Arm) -> Seen:
    """Off: a plain fork of the supervisor."""
    env = {"RINGFENCE_ATTACK_CANARY": arm.canary, "PATH": os.environ.get("PATH", "/usr/bin:/bin")}
    argv = [sys.executable, "-I", "-c", f"{own_package()}\n{_SUPERVISOR}", arm.canary, arm.name]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=60, check=False)
    said = done.stdout.decode().strip()
    if said not in ("found", "clean"):
        raise RuntimeError(f"the search did not end: {said} {done.stderr.decode()[-300:]}")
    return Seen(said == "found", said)


def _same_text(arm: Arm, path: str, *, least: int = 4) -> Seen:
    """The attack succeeds when the guest reads at `path` the text that the host reads there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            here = file.read(4096).strip()
    except OSError:
        here = ""
    if len(here) < least:
        raise NotApplicable(f"the host has no {path}")
    report = arm.python("steal(path)\nsteal('/mnt' + path)", path=path)  # /mnt: where the view is all of the host
    return Seen(here in report.looted, report.words())


@attack("H02", "a guest cannot read the host's name", LEAK, off="uts-namespace")
def host_name(arm: Arm) -> Seen:
    report = arm.python("loot(os.uname().nodename)")
    return Seen(report.looted == os.uname().nodename, f"the guest reads {report.looted!r}")


@attack("H02-boot", "a guest cannot read the boot's id", LEAK, off="proc-masks")
def boot_id(arm: Arm) -> Seen:
    return _same_text(arm, "/proc/sys/kernel/random/boot_id")


@attack("H02-cmdline", "a guest cannot read the kernel's command line", LEAK, off="proc-masks")
def kernel_command_line(arm: Arm) -> Seen:
    return _same_text(arm, "/proc/cmdline")


@attack("H02-machine", "a guest cannot read the machine's id", LEAK, off="view")
def machine_id(arm: Arm) -> Seen:
    return _same_text(arm, "/etc/machine-id")


@attack("H03", "a guest's traceback names no file of Ringfence", LEAK, off=HOST_CODE)
def tracebacks(arm: Arm) -> Seen:
    if arm.off:
        text = _traceback_of_a_runner()
    else:
        result = arm.run(arm.sandbox(whole=True), "1 / 0")
        text = result.stderr + (result.exception.traceback if result.exception else "")
    return Seen("ringfence" in text, text.strip().splitlines()[-1])


def _traceback_of_a_runner() -> str:
    import traceback

    try:
        int("x")  # a failure below library code, as in a runner of one process
    except ValueError:
        return traceback.format_exc()
    return ""


@attack("H04", "a guest cannot read the host's accounts", LEAK, off="view")
def accounts(arm: Arm) -> Seen:
    return _same_text(arm, "/etc/passwd", least=40)


@attack("H05", "a guest cannot read what the host's disks and other tenants do", LEAK, off="proc-masks")
def load_of_others(arm: Arm) -> Seen:
    with open("/proc/diskstats", encoding="ascii") as file:
        names = {line.split()[2] for line in file}
    if not names:
        raise NotApplicable("the host has no disks")
    report = arm.python("for name in ('diskstats', 'vmstat', 'interrupts', 'pressure/cpu'): steal('/proc/' + name)")
    return Seen(any(f" {name} " in report.looted for name in names), report.words())


@attack("H06", "a new sandbox finds no file of an earlier sandbox", LEAK, off=HOST_CODE)
def remains(arm: Arm) -> Seen:
    """Off: the second script runs in the first sandbox."""
    leave = "for d in ('/workspace', '/tmp', '/dev/shm'):\n    open(d + '/left', 'w').write(canary)"
    look = """
    for top in ("/workspace", "/tmp", "/dev/shm"):
        for place, folders, names in os.walk(top):
            # A mount is the caller's Python, which is in every sandbox.
            folders[:] = [one for one in folders if not os.path.ismount(os.path.join(place, one))]
            for name in names: steal(os.path.join(place, name))
    """
    first = arm.sandbox(whole=True)
    arm.python(leave, box=first, canary=arm.canary)
    second = first if arm.off else arm.sandbox(whole=True)
    return arm.stolen(arm.python(look, box=second))


_RANDOM = """
import os, random, ssl, sys, tempfile, uuid
print("random", random.random())
print("ssl", ssl.RAND_bytes(8).hex())
print("uuid", uuid.uuid4())
print("tempfile", tempfile.mktemp())
if "numpy" in sys.modules:
    import numpy
    print("numpy", numpy.random.rand())
    print("numpy generator", numpy.random.default_rng().random())
"""
_FORKING = """
import os, sys
for name in sys.argv[1].split(","): __import__(name)
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        %s
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    print("--", flush=True)
"""


@attack("H11", "two sandboxes of one zygote have different randomness: random, numpy, OpenSSL", LEAK, off=HOST_CODE)
def randomness(arm: Arm) -> Seen:
    """Off: two plain forks of one process that has imported the same modules."""
    preload = ["random", "ssl", "tempfile", "uuid"]
    if not import_path.is_installed("numpy"):
        raise NotApplicable("numpy is not installed: no other generator keeps its state over a fork")
    preload.append("numpy.random")
    if arm.off:
        body = _RANDOM.strip().replace("\n", "\n        ")
        program = f"import sys; sys.path += {sys.path!r}\n{_FORKING % body}"
        argv = [sys.executable, "-I", "-c", program, ",".join(preload)]
        both = subprocess.run(argv, capture_output=True, check=True).stdout.decode().split("--")[:2]
    else:
        both = [_random_of(preload), _random_of(preload)]
    first, second = (dict(line.rsplit(" ", 1) for line in text.strip().splitlines()) for text in both)
    same = [name for name in first if first[name] == second.get(name)]
    words = f"{len(first)} sources; the same: {', '.join(same) or 'none'}"
    return Seen(bool(same) or len(first) != len(second), words)


def _random_of(preload: list[str]) -> str:
    from ringfence import Image, run

    return run(_RANDOM, image=Image(preload=preload)).check().stdout


ELSEWHERE = [
    not_applicable("H07", "configuration of the host's package managers is not shown", LEAK, "tried as A01"),
    not_applicable("H08", "clock, uptime and timing", LEAK, "documented: the kernel is shared"),
    not_applicable("H09", "one tenant's id leads no one to another's data", LEAK, "there is no server in this version"),
]


_ASKS = """
import sys, traceback
try:
    lookup()
except Exception as error:
    print(repr(error), error.args, error.__cause__, error.__context__, vars(error))
    traceback.print_exc(file=sys.stdout)
"""


@attack(
    "H10",
    "a guest does not get the text of the host's exceptions",
    LEAK,
    off=HOST_CODE,
    label="kind of the exception alone",
)
def exception_text(arm: Arm) -> Seen:
    """A function of the caller fails with a text that only the host knows. Off: the guest gets that text too."""

    def lookup() -> str:
        raise OSError(f"no answer from {arm.canary}")

    def careless(tool: Callable[[], object], _: object) -> tuple[bool, object]:
        try:
            return True, tool()
        except OSError as error:
            return False, repr(error)

    if arm.off:
        arm.enter(replaced(compat, "_outcome", careless))
    box = arm.enter(Sandbox(policy=POLICY, backend="process", tools={"lookup": lookup}))
    result = box.run(_ASKS)
    return Seen(arm.canary in result.stdout, result.stdout.partition("\n")[0][:160])


CASES = cases(globals())
