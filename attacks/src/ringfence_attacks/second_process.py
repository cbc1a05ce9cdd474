"""Run attacks in a second process beside this process. Threads would not do: cases change the state of a process.

The second process is sent ids and answers with rows. Should it die, this process runs the attacks left unanswered.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque

from ringfence.host.zygote_start import own_package
from ringfence_attacks.report import Row
from ringfence_attacks.witnesses import remove_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from ringfence_attacks.case import Attack

# Attacks measured by a clock, by CPU time, by the memory of this process or by what is left of a limit of the host's
# user: nothing runs beside them.
ALONE = frozenset(
    ["A33", "D13-cpu", "F08", "F16", "F16-monitor", "F24", "F33-inotify", "J06", "L02", "L08", "O21", "O22"]
)
_AHEAD = 3  # attacks sent before their answers are read, so that the second process never waits for this one


class Second:
    """The second process, as a context manager: `ask` sends an attack, `answer` reads a row."""

    def __init__(self) -> None:
        path = f"{own_package()}; sys.path += {sys.path!r}"  # the same packages as in this process
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", f"{path}; from ringfence_attacks.second_process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._owed: deque[Attack] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the process's input, at which it ends; kill the process when an interrupt left attacks unanswered."""
        if self._owed:
            self._process.kill()
        self._process.communicate()
        if self._process.returncode < 0:
            remove_folders(self._process.pid)

    @property
    def has_room(self) -> bool:
        return len(self._owed) < _AHEAD and self._process.poll() is None

    @property
    def owed(self) -> tuple[Attack, ...]:
        """The attacks that were sent and not answered."""
        return tuple(self._owed)

    def ask(self, attack: Attack) -> None:
        assert self._process.stdin is not None
        self._owed.append(attack)
        try:
            self._process.stdin.write(attack.id + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the process died: `answer` reports that

    def answer(self) -> Row | None:
        """Wait for the next row and return it. Return None when the process died: `owed` is then left to run."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return None
        self._owed.popleft()
        fields = json.loads(line)
        return Row(**{**fields, "succeeded": tuple(fields["succeeded"])})

    def answered(self) -> bool:
        """Return whether an answer can be read without waiting."""
        import select

        assert self._process.stdout is not None
        return bool(self._owed) and bool(select.select([self._process.stdout], [], [], 0)[0])


def serve() -> None:
    """Serve as the second process: read an id from each line of input, write a row for each."""
    import warnings

    from ringfence_attacks.harness import catalogue, run_one

    warnings.simplefilter("ignore")  # a weaker limit is for the matrix's reader
    known = {each.id: each for each in catalogue()}
    for line in sys.stdin:
        row = run_one(known[line.strip()])
        fields = {name: getattr(row, name) for name in Row.__fields__}
        sys.stdout.write(json.dumps({**fields, "arms": dict(row.arms)}) + "\n")
        sys.stdout.flush()
