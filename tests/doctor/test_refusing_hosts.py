"""Hosts that refuse a part of a sandbox: doctor names the part and its fix, and `run` raises with the same fix.

Each host is made for real around one process of a user without rights: a limit, a filter, a covered /proc. The open
host is the other arm: there the same lines are fine.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from accounts import OrdinaryUser
from ringfence.host import kernel_refusals

SITUATIONS = Path(__file__).with_name("situations.py").read_text()
PROBE = """
import json, ringfence
from ringfence.doctor import examine

report = examine(backends=["process"])
try:
    error = ringfence.run("print(1)", backend="process").status
except ringfence.UnsupportedError as refused:
    error = [refused.code, str(refused), refused.fix]
print(json.dumps({"report": report.to_dict(), "run": error}))
"""


class Found(NamedTuple):
    lines: dict[str, tuple[str, str, str | None]]  # what → state, detail, fix
    works: bool
    auto: str | None
    rejected: dict[str, str]
    fixes: list[str]
    run: str | list[str]  # the status of a run, or code, message and fix of its refusal


def probe(user: OrdinaryUser, situation: str) -> Found:
    done = user.run(SITUATIONS, situation, PROBE)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    report = said["report"]
    process = report["backends"][0]
    lines = {each["what"]: (each["state"], each["detail"], each["fix"]) for each in process["lines"]}
    return Found(lines, process["works"], report["auto"], report["rejected"], report["fixes"], said["run"])


def test_an_open_host_passes_every_trial(ordinary_user: OrdinaryUser) -> None:
    found = probe(ordinary_user, "open_host")
    assert {what: line for what, line in found.lines.items() if line[0] == "missing"} == {}
    assert (found.works, found.auto, found.run) == (True, "process", "ok")


REFUSALS = [
    pytest.param(
        "no_user_namespaces",
        "user namespaces",
        "userns-restricted",
        "user namespaces are switched off: user.max_user_namespaces is 0",
        "sudo sysctl -w user.max_user_namespaces=15000",
        id="user namespaces are off",
    ),
    pytest.param(
        "debian_switch",
        "user namespaces",
        "userns-restricted",
        "user namespaces are for root alone: kernel.unprivileged_userns_clone is 0",
        "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        id="user namespaces are for root",
    ),
    pytest.param(
        "container_filter",
        "user namespaces",
        "userns-restricted",
        "a filter around this process (a container's, mostly) refuses it",
        kernel_refusals.container_fix(),
        id="a container engine's filter",
    ),
    pytest.param(
        "masked_proc",
        "fresh /proc",
        "proc-masked",
        "parts of this container's /proc are covered, so the kernel refuses a fresh one inside the sandbox",
        kernel_refusals.proc_fix(),
        id="a covered proc",
    ),
]


@pytest.mark.parametrize(("situation", "what", "code", "why", "fix"), REFUSALS)
def test_a_refused_part_is_named_with_its_fix_by_doctor_and_by_run(
    ordinary_user: OrdinaryUser, situation: str, what: str, code: str, why: str, fix: str
) -> None:
    found = probe(ordinary_user, situation)
    state, detail, offered = found.lines[what]
    assert (state, detail.startswith(why), offered) == ("missing", True, fix)
    assert (found.works, found.auto in (None, "container", "gvisor")) == (False, True)
    assert why in found.rejected["process"]
    assert isinstance(found.run, list)
    assert (found.run[0], found.run[2]) == (code, fix)
    assert why in found.run[1]


def test_a_limit_of_namespaces_is_raised_now_and_for_the_next_start(ordinary_user: OrdinaryUser) -> None:
    assert probe(ordinary_user, "no_user_namespaces").fixes[0] == (
        "echo 'user.max_user_namespaces=15000' > /etc/sysctl.d/60-ringfence-max_user_namespaces.conf\n"
        "sysctl -w user.max_user_namespaces=15000"
    )


def test_apparmor_is_fixed_by_a_profile_for_the_launcher_alone(ordinary_user: OrdinaryUser) -> None:
    found = probe(ordinary_user, "apparmor")
    launcher = ordinary_user.source / "ringfence" / "guest" / "launch" / "launch"
    state, detail, fix = found.lines["user namespaces"]
    assert state == "missing"
    assert detail.startswith("AppArmor lets a user namespace be made and denies what is done in it: [Errno 13]")
    assert fix == f"ringfence doctor --fix | sudo sh   # an AppArmor profile for {launcher} alone"
    assert found.fixes[0] == (
        "cat > /etc/apparmor.d/ringfence-launch <<'EOF'\n"
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n"
        f'profile ringfence-launch "{launcher}" flags=(unconfined) {{\n'
        "  userns,\n"
        "}\n"
        "EOF\n"
        "apparmor_parser -r /etc/apparmor.d/ringfence-launch"
    )
    script = "\n".join(found.fixes)
    assert not re.search(r"apparmor_restrict|/python", script), "never the sysctl, never python"
    assert isinstance(found.run, list)
    assert (found.run[0], found.run[2]) == ("userns-restricted", "ringfence doctor --fix")


def test_a_host_without_landlock_still_works_and_says_what_is_weaker(ordinary_user: OrdinaryUser) -> None:
    found = probe(ordinary_user, "no_landlock")
    state, detail, fix = found.lines["Landlock"]
    assert (state, found.works, found.run) == ("weaker", True, "ok")
    assert detail.startswith("files are fenced by mounts alone, and PID 1 only by being non-dumpable: ")
    assert fix is not None
    assert fix.startswith("start the kernel with lsm=landlock,")


def test_a_launcher_that_cannot_be_executed_is_the_first_thing_missing(ordinary_user: OrdinaryUser) -> None:
    code = """
import ringfence.host.zygote_start as spawn
spawn.launcher = lambda: "/dev/null"
from ringfence.doctor import examine
print(*examine(backends=["process"]).backends[0].lines[2])
"""
    done = ordinary_user.run(code)
    assert done.stdout == (
        "launcher missing cannot start /dev/null: Permission denied "
        "reinstall ringfence where programs may be executed (not on a noexec mount)\n"
    )


def test_where_user_namespaces_are_refused_the_look_for_mapped_uids_leaves_no_process(
    ordinary_user: OrdinaryUser,
) -> None:
    code = "from ringfence.images.store import run_as_root\nprint(run_as_root(['true'], 20))"
    done = ordinary_user.run(SITUATIONS, "no_user_namespaces", code)
    assert (done.returncode, "unshare failed" in done.stdout, unshare_processes(ordinary_user)) == (0, True, [])


def unshare_processes(user: OrdinaryUser) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and entry.stat().st_uid == user.uid
                and b"unshare" in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found
