"""ringfence doctor draws what the examination found; the examination is pretended here."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ringfence.cli import main
from ringfence.policy import Policy

PROCESS = SimpleNamespace(
    name="process",
    works=True,
    lines=[
        ("user namespaces", "ok", "a mount inside one worked", None),
        ("memory", "weaker", "RLIMIT_AS: per process", "systemctl enable x\nreboot"),
    ],
)
GVISOR = SimpleNamespace(name="gvisor", works=False, lines=[("qemu", "missing", "no program", "apt-get install qemu")])


class Report:
    def __init__(self, auto: str | None, fixes: list[str]) -> None:
        self.backends = [PROCESS, GVISOR]
        self.auto = auto
        self.rejected = {"gvisor": "no qemu"}
        self._fixes = fixes

    def fixes(self) -> list[str]:
        return self._fixes

    def to_dict(self) -> dict[str, object]:
        return {"auto": self.auto}


asked: list[Policy] = []


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Report:
    found = Report("process", ["apt-get install qemu"])
    module = ModuleType("ringfence.doctor")

    def examine(policy: Policy, backends: list[str]) -> Report:
        asked.append(policy)
        return found

    module.examine = examine  # type: ignore[attr-defined]  # a pretended module
    monkeypatch.setitem(sys.modules, "ringfence.doctor", module)
    return found


TABLE = """\
process: works
  ok       user namespaces  a mount inside one worked
  weaker   memory           RLIMIT_AS: per process
           fix: systemctl enable x
                reboot

gvisor: does not work here
  missing  qemu  no program
           fix: apt-get install qemu

auto: process keeps the policy 'offline'
  gvisor was not taken: no qemu
all fixes as a script: ringfence doctor --fix
"""


def test_the_table_has_a_line_for_each_thing_tried(report: Report, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capfd.readouterr() == (TABLE, "")
    assert asked[-1] == Policy()


def test_named_backends_alone_are_shown_and_judged(report: Report, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "gvisor"]) == 1
    assert capfd.readouterr().out.startswith("gvisor: does not work here\n")
    assert main(["doctor", "gvisor", "process"]) == 0


def test_a_named_backend_that_works_and_does_not_keep_the_policy_is_1(report: Report) -> None:
    report.auto, report.rejected = None, {"process": "shares the host's kernel", "gvisor": "no qemu"}
    assert main(["doctor", "process"]) == 1


def test_none_that_keeps_the_policy_is_1(report: Report, capfd: pytest.CaptureFixture[str]) -> None:
    report.auto = None
    assert main(["doctor", "--policy", "hostile"]) == 1
    assert "auto: no backend keeps the policy 'hostile'\n" in capfd.readouterr().out
    assert asked[-1] == Policy.preset("hostile")


def test_fix_prints_a_script_and_changes_nothing(report: Report, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--fix"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("#!/bin/sh\n")
    assert out.endswith("set -eu\napt-get install qemu\n")
    report._fixes = []
    main(["doctor", "--fix"])
    assert capfd.readouterr().out == "#!/bin/sh\n# no command here would fix anything\n"


def test_json_is_everything(report: Report, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"auto": "process"}


def test_colours_are_for_terminals(
    report: Report, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.isatty", lambda _: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["doctor"])
    assert "\x1b[32mok     \x1b[0m" in capfd.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["doctor"])
    assert capfd.readouterr().out == TABLE
