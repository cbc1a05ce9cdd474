"""A comment that silences a tool, or a caught error, has a reason on the same line. Readers judge the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples")
# A tool's word with nothing behind it. With another comment behind the word, which says why, all is well.
_SILENT = re.compile(r"#\s*(ruff:\s*)?(noqa|nosec|type:\s*ignore|mypy:|pragma:\s*no cover)[^#]*$")
_LATER = re.compile(r"#.*\b(TO[D]O|FIX[M]E|XX[X]|HAC[K])\b")
_BROAD = frozenset(["Exception", "BaseException"])


def without_reason(text: str) -> Iterator[tuple[int, str]]:
    """Return (line, comment) of every comment without a reason."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if _SILENT.search(line):
            yield number, "a silenced tool"
        if _LATER.search(line):
            yield number, "a word for later"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            said = "".join(lines[node.lineno - 1 : node.body[0].lineno])
            if "#" not in said and (_is_broad(node) or _does_nothing(node)):
                yield node.lineno, "an error that goes nowhere"
        if isinstance(node, ast.Call) and _is_skip(node.func) and not _has_a_reason(node):
            yield node.lineno, "a skip"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from ((each.lineno, "a skip") for each in node.decorator_list if _is_skip(each))


def _is_broad(node: ast.ExceptHandler) -> bool:
    """Return whether a handler catches every exception and does not raise it again."""
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    all_there_is = any(kind is None or (isinstance(kind, ast.Name) and kind.id in _BROAD) for kind in kinds)
    return all_there_is and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))


def _does_nothing(node: ast.ExceptHandler) -> bool:
    return all(
        isinstance(each, ast.Pass) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in node.body
    )


def _is_skip(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "xfail", "importorskip")


def _has_a_reason(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("skipif", "importorskip"):
        return any(keyword.arg == "reason" for keyword in call.keywords)
    said = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(not (isinstance(each, ast.Constant) and not each.value) for each in said)


def test_everything_that_is_silenced_says_why() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent.parent.name != "programs"  # programs of guests, some of them pieces
        for line, what in without_reason(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 1  # no" + "qa: E501",
        "x = 1  # type: " + "ignore[misc]",
        "# TO" + "DO: later",
        "try: f()\nexcept Exception: g()",
        "try: f()\nexcept OSError:\n    pass",
        "pytest.skip()",
        "try: f()\nexcept OSError:\n    ...",
        "# my" + "py: ignore-errors",
    ],
)
def test_the_reader_sees_each_kind_and_is_content_with_a_reason(text: str) -> None:
    assert len(list(without_reason(text))) == 1
    told = text.replace("# TO" + "DO", "#").replace(": g()", ": g()  # why").replace("pass", "pass  # why")
    told = told.replace("skip()", 'skip("why")') + ("" if "why" in told or "skip" in told else "  # why")
    assert list(without_reason(told)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pytest.skip('')", "pytest.skip('why')"),
        ("@pytest.mark.skip\ndef test_a(): f()", "@pytest.mark.skip('why')\ndef test_a(): f()"),
        ("@pytest.mark.skipif(x)\ndef test_a(): f()", "@pytest.mark.skipif(x, reason='why')\ndef test_a(): f()"),
        ("pytest.importorskip('x')", "pytest.importorskip('x', reason='why')"),
    ],
)
def test_the_reader_sees_each_kind_of_skip(text: str, told: str) -> None:
    assert [what for _, what in without_reason(text)] == ["a skip"]
    assert list(without_reason(told)) == []
