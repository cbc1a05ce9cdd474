"""`--help` is the agreed text, word for word, and the page in docs is made of the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.cli import LATER, VERBS, main
from ringfence.cli.help import TEXTS
from ringfence.cli.options import attack_table, doctor_table, exec_table, policy_table, run_table, shell_table

ROOT = Path(__file__).resolve().parents[2]
SURFACE = ROOT / "tests" / "surface" / "cli.txt"
PAGE = ROOT / "docs" / "cli.md"


def agreed() -> dict[str, str]:
    """Command line and output, from the surface."""
    blocks = SURFACE.read_text().split("\n" + "=" * 80 + "\n")
    pairs = (block.split("\n", 1) for block in blocks)
    return {line.removeprefix("$ ringfence "): text.rstrip("\n") + "\n" for line, text in pairs}


@pytest.mark.parametrize(("line", "text"), agreed().items())
def test_help_prints_the_agreed_text(line: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(line.split())
    said = capfd.readouterr()
    assert (code, said.out, said.err) == (0, text, "")


def test_every_text_is_agreed() -> None:
    named = {line.removesuffix("--help").removeprefix("help ").strip() for line in agreed()}
    assert named == set(TEXTS) == {"", "exit", *VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_three_spellings(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    for line in ([verb, "--help"], [verb, "-h"], ["help", verb]):
        assert main(line) == 0
        assert capfd.readouterr().out == TEXTS[verb]


@pytest.mark.parametrize("verb", LATER)
def test_a_verb_of_a_later_version_is_named_nowhere_and_says_so_when_called(
    verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert f"\n  {verb} " not in TEXTS[""]
    for line in ([verb], [verb, "--help"], ["help", verb]):
        assert main(line) == 125
        said = capfd.readouterr()
        assert (said.out, said.err.splitlines()[0]) == ("", f"ringfence: {verb} is not in this version")


@pytest.mark.parametrize("table", [exec_table, run_table, shell_table, doctor_table, attack_table, policy_table])
def test_every_option_of_a_table_is_in_its_help(table: object) -> None:
    known = table()  # type: ignore[operator]  # a function of no arguments
    texts = TEXTS[known.verb] + TEXTS["exec"]
    assert [name for name in known.by_name if name not in texts] == []


def test_every_option_in_a_help_is_in_its_table() -> None:
    for table in (exec_table(), run_table(), shell_table(), doctor_table(), attack_table()):
        words = TEXTS[table.verb].replace(",", " ").replace("|", " ").replace(";", " ").replace(":", " ").split()
        named = {word.partition("=")[0].rstrip(".") for word in words if word.startswith("-") and word.strip("-")}
        assert sorted(named - set(table.by_name) - {"--help"}) == []


def page() -> str:
    """docs/cli.md, made of the help texts."""
    lines = [
        "# The `ringfence` command",
        "",
        "Made from the help texts of the command; `python tests/cli/test_help.py` writes it.",
    ]
    for name, text in TEXTS.items():
        title = {"": "ringfence", "exit": "Exit codes"}.get(name, f"ringfence {name}")
        lines += ["", f"## {title}", ""]
        lines += ["```text", text.rstrip("\n"), "```"]
    return "\n".join(lines) + "\n"


def test_the_page_in_docs_is_made_of_the_help_texts() -> None:
    assert PAGE.read_text() == page()


def test_help_on_nothing_known_names_the_near_topic(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "exti"]) == 2
    assert capfd.readouterr().err == (
        "ringfence: there is no help on 'exti'\nringfence: did you mean: ringfence help exit?\n"
    )


def test_without_a_verb_the_help_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", TEXTS[""])


if __name__ == "__main__":
    PAGE.write_text(page())
