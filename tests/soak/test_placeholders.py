"""Many sandboxes of many threads and programs on a folder, some killed: no sandbox is harmed, nothing is left."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from accounts import OrdinaryUser, let_others_through
from ringfence.host import placeholders

PROGRAM = Path(__file__).parent.parent / "programs" / "many_sandboxes.py"
SOURCE = Path(__file__).parent.parent.parent / "src"
THREADS = 10  # of the process that is not killed
INNOCENT = ["ok", "done", "0 made", []]


class Storm:
    """Programs that make sandboxes on one folder, each guest spinning on protected names; some are killed at random."""

    def __init__(self, folder: Path, user: OrdinaryUser | None) -> None:
        self._folder, self._user = folder, user
        self._over = threading.Event()
        self._random = random.Random(16)
        self.kills = 0
        self.commands: collections.Counter[tuple[int, str]] = collections.Counter()

    def start(self, *words: str) -> subprocess.Popen[str]:
        user = self._user
        env = user.environment() if user else {**os.environ, "PYTHONPATH": str(SOURCE)}
        return subprocess.Popen(
            [user.python if user else sys.executable, "-P", *words],
            cwd=self._folder,
            env=env,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def program(self, threads: int, each: int) -> subprocess.Popen[str]:
        return self.start(str(PROGRAM), str(self._folder), str(threads), str(each))

    def run_commands(self, *, killed: bool) -> None:
        code = PROGRAM.read_text()
        while not self._over.is_set():
            words = ["-m", "ringfence", "exec", "--quiet", "--rw", ".", "--", "python3", "-c", code, "guest"]
            process = self.start(*words, str(self._folder), "0.1")
            if killed and self._random.random() < 0.6:
                time.sleep(self._random.uniform(0.02, 0.3))
                process.kill()
                self.kills += 1
                process.communicate()
            else:
                said, errors = process.communicate()
                self.commands[process.returncode, said.strip() + errors[-300:]] += 1

    def kill_programs(self) -> None:
        while not self._over.is_set():
            process = self.program(4, 1000)
            time.sleep(self._random.uniform(0.3, 1.2))
            process.kill()
            self.kills += 1
            process.communicate()

    def rage(self, each: int) -> list[object]:
        """Return how the sandboxes of the process that is not killed ended, each kind with a count."""
        main = self.program(THREADS, each)
        others = [threading.Thread(target=self.run_commands, kwargs={"killed": each}) for each in (False, True, True)]
        others.append(threading.Thread(target=self.kill_programs))
        for thread in others:
            thread.start()
        try:
            said, errors = main.communicate(timeout=170)
        finally:
            self._over.set()
            for thread in others:
                thread.join()
        assert main.returncode == 0, errors[-2000:]
        return list(json.loads(said))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("each", [10, pytest.param(50, marks=pytest.mark.proof)])  # sandboxes of each thread
@pytest.mark.parametrize("whose", ["ours", "of an ordinary user"])
def test_many_sandboxes_on_one_folder_harm_nobody_and_leave_nothing(
    whose: str, each: int, tmp_path_factory: pytest.TempPathFactory, ordinary_user: OrdinaryUser
) -> None:
    """Ten threads of one program, three commands and further programs, many of which are killed with SIGKILL. No
    placeholder is left, no protected name was written, no sandbox is lost, no start refused."""
    user = ordinary_user if whose != "ours" else None
    folder = tmp_path_factory.mktemp("project")
    let_others_through(folder)
    if user is not None:
        os.chown(folder, user.uid, user.gid)
    storm = Storm(folder, user)
    assert storm.rage(each) == [[THREADS * each, INNOCENT]]
    assert {key: count for key, count in storm.commands.items() if key != (0, "0 made")} == {}
    assert storm.kills > each // 2
    deadline = time.monotonic() + 20
    while list(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.5)  # zygotes of the killed sweep when the last guest is gone; else the next start does
        if user is not None:
            assert user.run("import ringfence; print(ringfence.run('1').status)").stdout == "ok\n"
        else:
            placeholders.sweep()
    assert list(folder.iterdir()) == []
