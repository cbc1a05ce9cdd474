"""`ringfence attack` finds the attempts by their entry point and draws the matrix. Most tests pretend the attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import ringfence_attacks
from ringfence.cli import main
from ringfence.cli.attack import GROUP, installed_suite

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.attack import Suite

ROOT = Path(__file__).resolve().parents[2]

CATALOGUE = [
    SimpleNamespace(id="A01", outcome="READ", title="reads the home folder"),
    SimpleNamespace(id="A02", outcome="READ", title="follows a link out"),
    SimpleNamespace(id="G07-four", outcome="ESCAPE", title="dials a private address"),
]


def row(name: str, verdict: str, detail: str = "") -> SimpleNamespace:
    (attack,) = (each for each in CATALOGUE if each.id.startswith(name))
    arms = {"off": "read", "on": "ENOENT"}
    return SimpleNamespace(**vars(attack), control="view", verdict=verdict, detail=detail, arms=arms)


class Attacks(ModuleType):
    """A module that stands in for ringfence_attacks: gives `rows`, keeps what it was asked."""

    rows: list[SimpleNamespace]
    asked: tuple[list[str], str | None]

    def catalogue(self, backend: str | None = None) -> list[SimpleNamespace]:
        del backend
        return CATALOGUE

    def run(
        self,
        ids: Iterable[str] = (),
        *,
        backend: str | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> SimpleNamespace:
        ids = list(ids)
        self.asked = (ids, backend)
        for number, each in enumerate(ids):
            assert progress is not None
            progress(number, len(ids), each)
        return SimpleNamespace(
            backend=backend or "process",
            user="root",
            kernel="6.1",
            rows=self.rows,
            noticed="3 of 3 controls noticed" if backend == "container" else "",
            to_dict=lambda: {"rows": len(self.rows)},
        )


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    """Have `points` stand for all that is installed."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [one for one in points if one.group == group])


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Attacks:
    module = Attacks("pretended_attacks")
    module.rows = [row("A01", "held"), row("A02", "not applicable", "no links here"), row("G07", "held")]
    monkeypatch.setitem(sys.modules, "pretended_attacks", module)
    install(monkeypatch, EntryPoint("any", "pretended_attacks", GROUP))
    return module


def test_all_held_is_0(attacks: Attacks, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attack"]) == 0
    assert attacks.asked == (["A01", "A02", "G07-four"], None)
    assert capfd.readouterr().out == (
        "backend process, as root, Linux 6.1\n"
        "\n"
        "A01       held            READ     reads the home folder\n"
        "A02       not applicable  READ     follows a link out\n"
        "          no links here\n"
        "G07-four  held            ESCAPE   dials a private address\n"
        "\n"
        "2 held, 1 not applicable\n"
    )


def test_one_that_got_through_is_1_and_comes_first(attacks: Attacks, capfd: pytest.CaptureFixture[str]) -> None:
    attacks.rows = [row("A01", "inconclusive", "no witness"), row("G07", "got through", "a\nring\x1b[2Jfence")]
    assert main(["attack"]) == 1
    assert capfd.readouterr().out == (
        "backend process, as root, Linux 6.1\n"
        "\n"
        "G07-four  got through     ESCAPE   dials a private address\n"
        "          control: view\n"
        "          off: read\n"
        "          on: ENOENT\n"
        "          a\\nring\\x1b[2Jfence\n"
        "A01       inconclusive    READ     reads the home folder\n"
        "          control: view\n"
        "          off: read\n"
        "          on: ENOENT\n"
        "          no witness\n"
        "\n"
        "1 got through, 1 inconclusive\n"
    )


def test_an_inconclusive_case_is_3(attacks: Attacks) -> None:
    attacks.rows = [row("A01", "held"), row("A02", "inconclusive")]
    assert main(["attack"]) == 3


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["g07", "A01"], ["A01", "G07-four"]),
        (["g07-Four"], ["G07-four"]),
        (["a"], ["A01", "A02"]),
        (["A", "A02"], ["A01", "A02"]),
    ],
)
def test_ids_and_letters_choose(attacks: Attacks, words: list[str], ids: list[str]) -> None:
    assert main(["attack", *words, "--backend", "process"]) == 0
    assert attacks.asked == (ids, "process")


def test_an_unknown_id_is_2(attacks: Attacks, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "A0"]) == 2
    assert capfd.readouterr().err == (
        "ringfence: there is no attack 'A0'\nringfence: did you mean A01? all there are: ringfence attack --list\n"
    )
    assert main(["attack", "Z"]) == 2
    capfd.readouterr()
    assert main(["attack", "--backend", "gvisor", "B07"]) == 2  # a backend has a part of the attacks
    assert capfd.readouterr().err == (
        "ringfence: there is no attack 'B07' for the gvisor backend\n"
        "ringfence: all there are: ringfence attack --list --backend gvisor\n"
    )


def test_list_runs_nothing(attacks: Attacks, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "--list", "G"]) == 0
    assert capfd.readouterr().out == "G07-four  dials a private address\n"
    assert main(["attack", "--list", "--json", "G"]) == 0
    assert json.loads(capfd.readouterr().out) == {"attacks": [CATALOGUE[2].__dict__]}
    assert not hasattr(attacks, "asked")


def test_json_is_the_matrix(attacks: Attacks, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"rows": 3}


def test_on_a_terminal_a_line_tells_how_far_it_is(
    attacks: Attacks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.isatty", lambda fd: fd == 2)
    assert main(["attack", "A"]) == 0
    assert capfd.readouterr().err == "\r\x1b[K0/2 A01\r\x1b[K1/2 A02\r\x1b[K"


def test_after_a_whole_run_on_an_engine_the_controls_noticed_are_counted(
    attacks: Attacks, capfd: pytest.CaptureFixture[str]
) -> None:
    attacks.rows = [row("A01", "held")]
    assert main(["attack", "--backend", "container"]) == 0
    assert capfd.readouterr().out.endswith("\n1 held\n3 of 3 controls noticed\n")
    assert main(["attack", "A01", "--backend", "container"]) == 0
    assert capfd.readouterr().out.endswith("\n1 held\n")


def test_where_the_attempts_are_not_installed_the_verb_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    assert main(["attack"]) == 2
    assert capfd.readouterr().err == (
        "ringfence: the escape attempts are not installed: they are a separate distribution, ringfence-attacks\n"
        "ringfence: pip install ringfence-attacks; in a clone of the project, make attack\n"
    )


def test_the_attempts_of_this_repository_are_such_a_suite() -> None:
    suite: Suite = ringfence_attacks  # mypy compares the two
    assert installed_suite() is suite


def command(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    argv = [sys.executable, "-m", "ringfence", "attack", *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=50)


def test_from_the_folder_of_a_clone_the_attempts_are_found() -> None:
    """An editable installation lies below the working folder, which the command takes off its path (L12)."""
    done = command(ROOT, "--list", "A01")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("A01 ")


def test_attempts_that_a_guest_planted_in_the_working_folder_are_not_run(tmp_path: Path) -> None:
    """L12: the command runs the installed package, not a package that a guest left in the working folder."""
    planted = tmp_path / "ringfence_attacks-9.dist-info"
    planted.mkdir()
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: ringfence-attacks\nVersion: 9\n")
    (planted / "entry_points.txt").write_text(f"[{GROUP}]\naaa = planted\n")
    (tmp_path / "planted.py").write_text("open('was-here', 'w')\n")
    (tmp_path / "ringfence_attacks.py").write_text("open('was-here', 'w')\n")
    done = command(tmp_path, "--list", "A01")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "was-here").exists()
