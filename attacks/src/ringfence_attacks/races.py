"""Races for a name: a guest swaps a folder with a link in a loop while the host uses that name, for a limited time."""

from __future__ import annotations

import os
import time

from ringfence_attacks.case import Seen
from ringfence_attacks.witnesses import host_folder, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence import Sandbox
    from ringfence_attacks.arena import Arm

_RACE_S = 0.8
_LONGER_S = 5.0  # added on a busy host, until there were enough tries and one of them was not refused
_ENOUGH = 10  # tries

_SWAP = """
tell(ready=True)
end = time.monotonic() + seconds
here = os.open(top, os.O_RDONLY)
while time.monotonic() < end:
    for _ in range(100):
        call(316, here, one, here, other, 2)
"""


class Race:
    """A race: counts the host's tries, the guest's wins and the refusals."""

    def __init__(self) -> None:
        self.tries = self.wins = self.refused = 0
        self._started = time.monotonic()

    def goes_on(self) -> bool:
        """Return whether to try again: the time is not over, or too little was proven and the longer time is not."""
        passed = time.monotonic() - self._started
        proves = self.tries >= _ENOUGH and self.refused < self.tries
        return passed < _RACE_S or (not proves and passed < _RACE_S + _LONGER_S)

    def attempt(self, work: Callable[[], bool | None], refusal: type[Exception] = OSError) -> None:
        """Do `work` once and count the try. `work` may return whether the guest won; a refusal is no win."""
        self.tries += 1
        try:
            self.wins += work() is True
        except refusal:
            self.refused += 1

    def judge(self, what: str) -> Seen:
        """Judge the race. AssertionError when there were too few tries or all were refused: that proves nothing."""
        if self.tries < _ENOUGH:
            raise AssertionError(f"only {self.tries} tries: the race proves nothing")
        if self.refused == self.tries:
            raise AssertionError(f"all {self.tries} tries failed: the race proves nothing")
        return Seen(self.wins > 0, f"{what}: {self.wins} of {self.tries}, {self.refused} refused")


class Swapping:
    """A folder shared with a sandbox, in which a guest swaps `place` with a link to a folder that is not shared."""

    def __init__(self, arm: Arm, *, whole: bool = False) -> None:
        self._canary = arm.canary
        self._outside = arm.enter(host_folder())
        os.chmod(self._outside, 0o777)
        self._put_canary()
        os.chmod(f"{self._outside}/file", 0o666)
        self.place = f"{arm.directory}/place"
        os.mkdir(self.place)
        os.chmod(self.place, 0o777)
        with open(f"{self.place}/file", "w", encoding="utf-8") as file:
            file.write("harmless")
        os.chmod(f"{self.place}/file", 0o666)
        os.symlink(self._outside, f"{arm.directory}/link")
        self.box: Sandbox = arm.sandbox(arm.shared(), whole=whole)
        seconds = _RACE_S + _LONGER_S + 1
        process = arm.spawn(_SWAP, box=self.box, top=arm.directory, one=b"place", other=b"link", seconds=seconds)
        next(iter(process))

    def _put_canary(self) -> None:
        with open(f"{self._outside}/file", "w", encoding="utf-8") as file:
            file.write(self._canary)

    def was_changed(self) -> bool:
        """Return whether the file outside was changed, and put it back."""
        if os.listdir(self._outside) == ["file"] and text_of(f"{self._outside}/file") == self._canary:
            return False
        self._put_canary()
        return True
