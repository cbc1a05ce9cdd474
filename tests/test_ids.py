"""Every id in code, tests and pages is explained: attacks in docs/attacks*.md, facts in docs/design/kernel-facts.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "attacks", "docs", "tests", "scripts", "examples", "benchmarks")
SUFFIXES = ("", ".c", ".md", ".py", ".pyi", ".sh", ".toml")
INVENTED = {"G07-four"}  # by a test of the command
_ATTACK = re.compile(r"(?<![\w#%\\.-])[A-Z]\d\d(?:-[a-z]\w*)*(?!\w)")
_FACT = re.compile(r"kernel facts? (\d+)(?: and (\d+))?")
_EXPLAINED = re.compile(r"^(?:\| ([A-Z]\d\d\S*) \||\* ([A-Z]\d\d[^\s:]*)(?: \(as \w+\))?:)", re.MULTILINE)


def explained_attacks() -> set[str]:
    pages = [(ROOT / "docs" / name).read_text() for name in ("attacks.md", "attacks-engines.md")]
    return {row or item for page in pages for row, item in _EXPLAINED.findall(page)}


def explained_facts() -> set[str]:
    page = (ROOT / "docs/design/kernel-facts.md").read_text()
    return set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every text file of the project, without what tools make."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                yield path, path.read_text(errors="replace")
    for path in sorted(ROOT.glob("*.md")):
        yield path, path.read_text()


def test_every_attack_that_is_named_is_explained() -> None:
    known = explained_attacks() | INVENTED
    found = {(str(path.relative_to(ROOT)), name) for path, text in texts() for name in _ATTACK.findall(text)}
    assert sorted((path, name) for path, name in found if name not in known) == []


def test_every_kernel_fact_that_is_named_is_explained() -> None:
    known = explained_facts()
    found = {(path, fact) for path, text in texts() for pair in _FACT.findall(text) for fact in pair if fact}
    assert sorted((str(path), fact) for path, fact in found if fact not in known) == []


def test_an_id_is_found_in_a_comment_and_not_in_other_words() -> None:
    assert _ATTACK.findall("(A16, J17-signals) kernel's E01/E02; UTF-16 #A16 \\x1bA12 SHA256 C901 %A10") == [
        "A16",
        "J17-signals",
        "E01",
        "E02",
    ]
    assert _FACT.findall("see kernel facts 9 and 14, kernel fact 6") == [("9", "14"), ("6", "")]
    assert {"A01", "C04", "G17", "M10"} <= explained_attacks()
