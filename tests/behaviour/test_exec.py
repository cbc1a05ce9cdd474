"""exec() where the process backend differs; what holds for every backend is in ringfence.testing.checks.commands."""

from __future__ import annotations

from ringfence import Sandbox


def test_a_killed_spawner_is_replaced(box: Sandbox) -> None:
    """Guest processes share the spawner's domain and may signal it; the next command must still start."""
    code = """
import os, signal
for p in filter(str.isdigit, os.listdir("/proc")):
    if int(p) not in (1, os.getpid()): os.kill(int(p), signal.SIGKILL)
"""
    box.run(code)
    assert box.exec(["echo", "on"]).stdout == "on\n"
    box.run(code.replace("SIGKILL", "SIGSTOP"))
    assert box.exec(["echo", "on"], timeout_s=20).stdout == "on\n"


def test_a_python_run_in_a_sandbox_keeps_its_state_and_shares_files(box: Sandbox) -> None:
    assert box.run("x = 1\nopen('a', 'w').write('t')\nx").value == "1"
    result = box.run("import os\n('x' in globals(), os.listdir())")
    assert (result.value, result.state_kept) == ("(True, ['a'])", True)
