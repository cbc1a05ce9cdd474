"""D: attacks on terminals, the guest's own and the caller's."""

from __future__ import annotations

import errno
import os
import sys

from ringfence.host.zygote_start import own_package
from ringfence_attacks.case import BARE, ESCAPE, READ, NotApplicable, Seen, attack, cases
from ringfence_attacks.host_programs import under_terminal
from ringfence_attacks.tracer import Attempt, answers
from ringfence_attacks.witnesses import text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm


_TERMINAL = """
import fcntl, pty, tty
os.setsid() if os.getsid(0) != os.getpid() else None
main, other = pty.openpty()
tty.setraw(other)
os.dup2(other, 40)
fcntl.ioctl(40, 0x540E, 0)  # TIOCSCTTY
"""
_TYPE = """
for letter in canary:
    attempt("TIOCSTI", fcntl.ioctl, 40, 0x5412, letter.encode())
attempt("TIOCLINUX", fcntl.ioctl, 40, 0x541C, b"\\2")
attempt("TIOCCONS", fcntl.ioctl, 40, 0x541D, 0)
"""


@attack("D05", "nothing is typed into a terminal", ESCAPE, off="seccomp:terminal")
def terminal_injection(arm: Arm) -> Seen:
    """Type into a terminal of the guest's own, where the kernel permits what the filter refuses. Seen by the host: it
    opens that terminal and reads what was typed."""
    if text_of("/proc/sys/dev/tty/legacy_tiocsti").strip() == "0":
        raise NotApplicable("this kernel lets no process type into a terminal (dev.tty.legacy_tiocsti = 0)")
    pid, words = arm.waiting(_TERMINAL + _TYPE, box=arm.sandbox(), canary=arm.canary)
    fd = os.open(f"/proc/{pid}/fd/40", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        typed = os.read(fd, 4096)
    except BlockingIOError:
        typed = b""
    finally:
        os.close(fd)
    return Seen(arm.canary.encode() in typed, f"{len(typed)} bytes to read; {words}")


@attack("D05-discipline", "no terminal gets another line discipline", ESCAPE, off="seccomp:terminal")
def terminal_discipline(arm: Arm) -> Seen:
    """Pass an address that is not mapped, from which the kernel would read the discipline's number. The kernel's answer
    is read from the stopped guest."""
    attempt = Attempt("TIOCSETD", 16, (40, 0x5423, 1))
    got = answers(arm, arm.sandbox(), [attempt], before=_TERMINAL)
    if attempt.name not in got:
        raise AssertionError("the guest did not reach the call")
    answer = got[attempt.name]
    return Seen(answer != -attempt.filtered, f"TIOCSETD: {errno.errorcode.get(-answer, answer)}")


@attack("D06", "the caller's terminal is not read", READ, off=BARE)
def terminal_read(arm: Arm) -> Seen:
    """The command runs on a terminal on which the canary was typed."""
    read = "import os; fd = os.open('/dev/tty', os.O_RDWR); print(os.read(fd, 100))"
    argv = ["python3", "-I", "-c", read]
    start = f"{own_package()}; from ringfence.__main__ import main; sys.exit(main())"
    command = argv if arm.bare else [sys.executable, "-I", "-c", start, "exec", "--", *argv]
    output = under_terminal(command, typed=f"{arm.canary}\n")
    return Seen(f"b'{arm.canary}" in output, output.replace(arm.canary, "<canary>").strip()[-160:])


CASES = cases(globals())
