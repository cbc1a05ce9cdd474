"""ringfence attack draws the matrix of the attempts; the attempts are pretended here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from ringfence.cli import main

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
    """Stands in for ringfence.attacks: gives `rows`, keeps what it was asked."""

    rows: list[SimpleNamespace]
    asked: tuple[list[str], str | None]

    def catalogue(self) -> list[SimpleNamespace]:
        return CATALOGUE

    def run(self, ids: list[str], *, backend: str | None, progress: Callable[[int, int, str], None]) -> SimpleNamespace:
        self.asked = (ids, backend)
        for number, each in enumerate(ids):
            progress(number, len(ids), each)
        return SimpleNamespace(
            backend="process", user="root", kernel="6.1", rows=self.rows, to_dict=lambda: {"rows": len(self.rows)}
        )


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Attacks:
    module = Attacks("ringfence.attacks")
    module.rows = [row("A01", "held"), row("A02", "not applicable", "no links here"), row("G07", "held")]
    monkeypatch.setitem(sys.modules, "ringfence.attacks", module)
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
