"""Run attacks in a second process beside this one: cases change what belongs to a process, hence no threads.

It is asked by id and answers with rows. Should it die, what it owed is run here.
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

# Measured by a clock, by CPU time, by our memory or by what the whole host's user has left: nothing runs beside these.
ALONE = frozenset(
    ["A33", "D13-cpu", "F08", "F16", "F16-monitor", "F24", "F33-inotify", "J06", "L02", "L08", "O21", "O22"]
)
_AHEAD = 3  # asked for before the answers are fetched, so that it never waits for us


class Second:
    """The second process, as a context manager."""

    def __init__(self) -> None:
        ours = f"{own_package()}; sys.path += {sys.path!r}"  # where the packages are that this process has
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", f"{ours}; from ringfence_attacks.second_process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._owed: deque[Attack] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the process end, which it does at the end of its input; kill it where an interrupt left it in a case."""
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
        """The attacks that were asked for and not answered."""
        return tuple(self._owed)

    def ask(self, attack: Attack) -> None:
        assert self._process.stdin is not None
        self._owed.append(attack)
        try:
            self._process.stdin.write(attack.id + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it died: `answer` says so

    def answer(self) -> Row | None:
        """Wait for the next row. None: the process died, and `owed` is what is left to do."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return None
        self._owed.popleft()
        fields = json.loads(line)
        return Row(**{**fields, "succeeded": tuple(fields["succeeded"])})

    def answered(self) -> bool:
        """Return whether an answer is there now."""
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
