"""Backends are found by name. A wrong one of another distribution is an error for its caller, and harms no other."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import ringfence
from programs import read_program
from ringfence import Policy, PolicyError, UnsupportedError
from ringfence.backends import Process, registry
from ringfence.backends.auto import prepare
from ringfence.backends.contract import BackendReport, Finding
from ringfence.backends.registry import BuiltIn
from ringfence.cli import help as help_texts
from ringfence.cli import options
from ringfence.cli.doctor import table
from ringfence.doctor import Report, examination, examine
from ringfence.host import import_path
from ringfence.plan.model import FoundImage, SandboxPlan
from strangers import plant

WHOLE = read_program("backends/stranger.py")
LACKS_LAUNCH = WHOLE.replace("def launch", "def lunch")
UNKNOWN_WALL = WHOLE.replace("own-kernel", "very strong")
OTHER_NAME = WHOLE.replace('name = "strange"', 'name = "process"')
RAISES = "class Backend:\n    def __init__(self): raise RuntimeError('no licence')"
ITS_EXIT = "class Exit(BaseException):\n    def __str__(self): return 1 / 0\nraise Exit"
LOOK_RAISES = WHOLE.replace('name = "strange"', "name = property(lambda self: 1 / 0)")

LOOK_EXITS = WHOLE.replace('name = "strange"', "name = property(lambda self: exit(0))")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own backends are not tried: that takes seconds."""
    for name in registry.names():
        report = BackendReport(name, True, (Finding("pretended", "ok", ""),))
        monkeypatch.setattr(registry.load_class(name), "doctor", lambda _, report=report: report)


def reports(found: Report) -> dict[str, list[str]]:
    """What is wrong with each backend that does not work, with its fix."""
    return {
        each.name: [f"{one.detail}; fix: {one.fix}" for one in each.findings]
        for each in found.backends
        if not each.works
    }


@pytest.mark.parametrize(
    ("source", "value", "said"),
    [
        pytest.param("", "nowhere:Backend", "cannot be loaded: ModuleNotFoundError: No module", id="no module"),
        pytest.param("", "", "cannot be loaded: AttributeError", id="no class"),
        pytest.param("1 / 0", "", "cannot be loaded: ZeroDivisionError", id="raises on import"),
        pytest.param("class", "", "cannot be loaded: SyntaxError", id="is no Python"),
        pytest.param("raise SystemExit(3)", "", "cannot be loaded: SystemExit: 3", id="exits"),
        pytest.param(ITS_EXIT, "", "cannot be loaded: Exit", id="raises what has no text"),
        pytest.param("Backend = 5", "", "cannot be made: TypeError", id="is no class"),
        pytest.param(RAISES, "", "cannot be made: RuntimeError: no licence", id="raises when it is made"),
        pytest.param(LACKS_LAUNCH, "", "does not keep the contract: it has no method launch", id="lacks a method"),
        pytest.param(UNKNOWN_WALL, "", "its isolation is 'very strong', not one of runtime", id="unknown isolation"),
        pytest.param(OTHER_NAME, "", "its name is 'process', not 'strange'", id="another name"),
        pytest.param(LOOK_RAISES, "", "a look at it raised ZeroDivisionError", id="a property raises"),
        pytest.param(LOOK_EXITS, "", "a look at it raised SystemExit: 0", id="a property exits"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_wrong_backend_is_an_error_that_names_its_distribution(
    folder: Path, source: str, value: str, said: str
) -> None:
    plant(folder, "strange-box", "strange", source, value)
    with pytest.raises(UnsupportedError) as caught:
        ringfence.Sandbox(backend="strange")  # type: ignore[arg-type]  # another distribution's name
    assert said in str(caught.value)
    assert "the backend 'strange' of strange-box" in str(caught.value)
    assert caught.value.fix == "reinstall strange-box, or report it to its makers"
    found = examine()
    assert reports(found) == {"strange": [f"{caught.value}; fix: {caught.value.fix}"]}
    assert found.auto in registry.names()
    sys.modules.pop("strange_box", None)


BOX_HALF = """
class Box:
    ended = []
    close = kill = lambda self: Box.ended.append(self)
"""
PLANS = "return __import__('ringfence.plan.model').plan.model.SandboxPlan(policy, image, None)"


@pytest.mark.parametrize(
    ("source", "method", "body", "said"),
    [
        (WHOLE, "facts", "raise SystemExit(0)", "facts() raised SystemExit: 0"),
        (WHOLE, "facts", "return 1 / 0", "facts() raised ZeroDivisionError: division by zero"),
        (WHOLE, "plan", "return None", "plan() returned None, not a SandboxPlan"),
        (WHOLE, "plan", "return 'x'", "plan() returned a str, not a SandboxPlan"),
        (WHOLE, "plan", "raise GeneratorExit", "plan() raised GeneratorExit"),
        (WHOLE, "launch", "raise SystemExit(0)", "launch() raised SystemExit: 0"),
        (WHOLE, "launch", "raise StopIteration", "launch() raised StopIteration"),
        (WHOLE, "launch", "return None", "launch() returned None, without channel, listeners"),
        (WHOLE + BOX_HALF, "launch", "return Box()", "launch() returned a Box, without channel, listeners"),
    ],
)
def test_a_backend_that_does_not_do_what_the_contract_says_is_named(
    folder: Path, source: str, method: str, body: str, said: str
) -> None:
    """An exit of its own would else end the command with its number, as if the code had run."""
    methods = {"facts": "return 1", "plan": PLANS, method: body}
    for name, instead in methods.items():
        source = source.replace(f"raise NotImplementedError({name!r})".replace("'", '"'), instead)
    plant(folder, "strange-box", "strange", source)
    with pytest.raises(UnsupportedError) as caught:
        ringfence.run("1", backend="strange")  # type: ignore[arg-type]  # another distribution's name
    assert f"the backend 'strange' does not keep the contract: {said}" in str(caught.value)
    assert caught.value.fix == "report it to the makers of strange_box"
    module = sys.modules.pop("strange_box")
    if "Box()" in body:
        assert len(module.Box.ended) == 2, "what it started is ended as far as it can be"


@pytest.mark.usefixtures("quick")
def test_a_name_that_two_distributions_bring_is_refused(folder: Path) -> None:
    plant(folder, "one-box", "strange", WHOLE)
    plant(folder, "other-box", "strange", WHOLE)
    with pytest.raises(UnsupportedError, match=r"comes from \w+-box and \w+-box: which of them") as caught:
        registry.get("strange")
    assert "one-box" in str(caught.value)
    assert "other-box" in str(caught.value)
    assert str(caught.value.fix).startswith("uninstall o")
    assert list(reports(examine())) == ["strange"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["process", "auto"])
def test_a_name_of_our_own_is_never_taken_from_us(folder: Path, name: str) -> None:
    plant(folder, "strange-box", name, f"open({str(folder / 'ran')!r}, 'w').close()")
    assert type(registry.get("process")) is Process
    assert registry.stranger_names() == ()
    text = f"strange-box brings a backend named '{name}', a name of Ringfence's own: it is not used"
    assert reports(examine()) == {"strange-box": [f"{text}; fix: uninstall strange-box, or have its backend renamed"]}
    assert prepare("auto", "host", Policy()).name in registry.names()
    assert not (folder / "ran").exists()


def test_an_object_with_a_name_of_our_own_is_refused() -> None:
    double = SimpleNamespace(name="process", isolation="own-kernel", **dict.fromkeys(registry._METHODS, print))
    with pytest.raises(PolicyError, match="its name 'process' is one of Ringfence's own"):
        registry.get(double)
    with pytest.raises(PolicyError, match="Process is a class, not an object"):
        registry.get(Process)  # type: ignore[arg-type]  # the same


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "doctor",
    [
        "1 / 0",
        "raise SystemExit(3)",
        "raise GeneratorExit",
        "return 'fine'",
        "return BackendReport('x', True, ())",
        "return BackendReport('strange', True, (5,))",
        "return BackendReport('strange', True, (Finding('a', 'splendid', 'b'),))",
    ],
)
def test_a_doctor_that_fails_is_its_backends_report(folder: Path, doctor: str) -> None:
    plant(folder, "strange-box", "strange", WHOLE.replace("raise NotImplementedError('doctor')", doctor))
    (said,) = reports(examine())["strange"]
    assert said.endswith("; fix: report it to the makers of strange_box")
    sys.modules.pop("strange_box", None)


@pytest.mark.usefixtures("quick")
def test_a_backend_that_makes_no_report_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_PATIENCE_S", 0.2)
    plant(folder, "slow-box", "slow", "__import__('time').sleep(3)")
    assert reports(examine())["slow"] == ["it made no report within 0.2 s; fix: report it to its makers"]


@pytest.mark.usefixtures("quick")
def test_an_interrupt_that_a_backend_raises_is_its_report(folder: Path) -> None:
    plant(folder, "interrupting-box", "interrupting", "raise KeyboardInterrupt")
    assert reports(examine())["interrupting"] == ["it raised KeyboardInterrupt; fix: report it to its makers"]


def test_a_report_of_another_distribution_writes_no_escapes_to_a_terminal() -> None:
    finding = Finding("a\x1b[31m", "missing", "b\x1b[2J", "c\x1b[2J\nd")
    shown = table(Report((BackendReport("x\x1b[31m", False, (finding,)),), None, {}), "offline", [], coloured=False)
    assert "\x1b" not in shown
    assert shown.count("fix: c") == 1


@pytest.mark.usefixtures("quick")
def test_auto_takes_no_backend_of_another_distribution(folder: Path) -> None:
    """However strong it says it is, and though nothing of ours may keep the policy."""
    plant(folder, "strange-box", "strange", f"open({str(folder / 'ran')!r}, 'w').close()\n{WHOLE}")
    launcher = prepare("auto", "host", Policy(isolation="own-kernel"))
    assert {launcher.name, *launcher.rejected} == {*registry.names()}
    assert not (folder / "ran").exists()
    found = examine(Policy(isolation="own-kernel"))
    assert (found.auto in (None, *registry.names()), [each.name for each in found.backends][-1]) == (True, "strange")


def test_the_command_runs_no_backend_that_a_guest_planted_in_the_working_folder(tmp_path: Path) -> None:
    """L12: the command runs what is installed, not what the last guest left where somebody works."""
    plant(tmp_path, "strange-box", "strange", "open('ran', 'w').close()")
    command = [sys.executable, "-m", "ringfence", "run", "--json", "--backend", "strange", "-c", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["message"]) == (125, "--backend 'strange' is not known")
    assert not (tmp_path / "ran").exists()


# ── one more backend of our own ──────────────────────────────────────────────────────────────────


class Vm:
    """A backend as a later version may have one."""

    name = "vm"
    isolation = "own-kernel"

    def facts(self) -> None:
        return None

    def plan(self, policy: Policy, image: FoundImage, facts: None) -> SandboxPlan:
        assert facts is None
        enforcement = prepare("process", "host", Policy()).plan().enforcement
        return SandboxPlan(policy, image, enforcement)

    def launch(self, plan: SandboxPlan, *, controls: object = None) -> None:
        raise NotImplementedError

    def doctor(self) -> BackendReport:
        return BackendReport("vm", True, (Finding("kvm", "ok", "/dev/kvm"),))


@pytest.fixture
def vm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One line in the table of our own backends, and its package."""
    module = ModuleType("ringfence_vm_backend")
    Vm.__module__ = module.__name__
    monkeypatch.setattr(module, "Vm", Vm, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = {"vm": BuiltIn(module.__name__, "Vm", "own-kernel")}
    monkeypatch.setattr(registry, "BUILT_IN", row | registry.BUILT_IN)
    yield
    monkeypatch.undo()
    importlib.reload(help_texts)


@pytest.mark.usefixtures("vm")
def test_one_line_makes_a_backend_known_to_the_command() -> None:
    text = importlib.reload(help_texts).TEXTS["exec"]
    names = ", ".join(("auto", *registry.names()))
    assert f"--backend NAME    {names}\n" in text
    assert options.backend_name("--backend", "vm") == "vm"
    with pytest.raises(Exception, match="--backend 'wm' is not known") as caught:
        options.backend_name("--backend", "wm")
    assert "did you mean --backend vm?" in str(caught.value.fix)  # type: ignore[attr-defined]  # a Problem


@pytest.mark.usefixtures("quick", "vm")
def test_one_line_makes_a_backend_known_to_the_doctor() -> None:
    found = examine(Policy(isolation="own-kernel"))
    assert (found.auto, found.backends[0]) == ("vm", Vm().doctor())
    assert table(found, "own", [], coloured=False).startswith("vm: works\n  ok       kvm  /dev/kvm\n")


@pytest.mark.usefixtures("vm")
def test_one_line_makes_a_backend_known_to_auto() -> None:
    plan = ringfence.Sandbox(policy=Policy(isolation="own-kernel")).plan()
    assert (plan.backend, plan.rejected["process"]) == ("vm", "it shares the host's kernel")
    assert isinstance(registry.get("vm"), Vm)


def test_no_backend_comes_from_a_folder_that_a_guest_can_write(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry point may lead to any installed function, which a look at the backends would call (L12)."""
    called: list[str] = []
    monkeypatch.setattr(subprocess, "list2cmdline", lambda: called.append("by the guest"))
    monkeypatch.setattr(import_path, "_written", import_path.WritableFolders())
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    plant(folder, "guests", "guests", "", value="subprocess:list2cmdline")
    assert registry.stranger_names() == ("guests",)
    import_path.shown_writable([str(folder)])
    assert registry.stranger_names() == ()
    assert "guests" not in [each.name for each in examine().backends]
    with pytest.raises(PolicyError, match="unknown backend 'guests'"):
        prepare("guests", "host", Policy())
    assert not called
