"""How readable the tree is, in numbers: each stays within its limit in scripts/house."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST_PROGRAM = 10  # lines of a string; longer ones are files of tests/programs
# Scripts that hold the programs of their guests: a user that cannot read this folder is given their text.
SCRIPTS = ("tests/attacks/posture.py", "tests/behaviour/floods.py")
_IS_A_PROGRAM = re.compile(r"^\s*(import|from|def|class|for|while|with|try)\b|print\(|#include", re.MULTILINE)


@pytest.fixture(scope="module")
def house() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("house", str(ROOT / "scripts" / "house"))
    spec = importlib.util.spec_from_loader("house", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_number_of_the_house_is_within_its_limit(house: ModuleType) -> None:
    first, later = house.by_age(house.product_files())
    assert first
    for files, limits in ((first, house.LIMITS), (later, house.limits_for_later(later))):
        numbers, _ = house.measure(files)
        worse = {name: (number, limits[name]) for name, number in numbers.items() if number > limits[name]}
        assert worse == {}, f"scripts/house --list names the places: {worse}"


def test_a_later_room_has_limits_in_proportion(house: ModuleType) -> None:
    later = [house.PACKAGE / "server" / f"{n}.py" for n in range(45)]
    first = [house.PACKAGE / "scanner.py", house.PACKAGE / "policy" / "model.py"]
    assert house.by_age([*first, *later]) == (first, later)
    limits = house.limits_for_later(later)
    assert (limits["small modules"], limits["single importers"]) == (3.0, 6.0)
    assert house.limits_for_later(later[:1])["small modules"] == 2.0


# One class for each version of cgroups: the module says which.
SAME_CLASSES = {"Group", "Tree"}


def test_a_class_name_stands_once_in_the_product(house: ModuleType) -> None:
    places: dict[str, list[str]] = {}
    for path in house.product_files():
        for node in ast.walk(ast.parse(path.read_text())) if "_sync" not in path.parts else ():  # the twin of _async
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(house.PACKAGE)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SAME_CLASSES} == {}


def test_no_test_holds_a_long_program_in_a_string() -> None:
    paths = [path for path in sorted((ROOT / "tests").rglob("*.py")) if str(path.relative_to(ROOT)) not in SCRIPTS]
    assert [row for path in paths if path.parent.parent.name != "programs" for row in long_strings(path)] == []
    assert [name for name in SCRIPTS if not list(long_strings(ROOT / name))] == []


def long_strings(path: Path) -> Iterator[str]:
    """Yield the places of programs in strings, no docstrings, that have too many lines."""
    tree = ast.parse(path.read_text())
    apart = set(_docstrings(tree)) | set(_pieces(tree))
    for node in ast.walk(tree):
        if node in apart:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        else:
            continue
        lines = len(text.strip("\n").splitlines())
        if lines > LONGEST_PROGRAM and _IS_A_PROGRAM.search(text):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {lines} lines"


def _docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def _pieces(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what f-strings are made of, which is counted with them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from (each for each in ast.walk(node) if each is not node)


def test_a_long_string_is_found_and_a_docstring_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    lines = "\n".join(f"print({n})" for n in range(11))
    path = tmp_path / "some.py"
    path.write_text(f'"""{lines}"""\nshort = """{lines[:60]}"""\nlong = """\n{lines}\n"""\nf = f"""{lines}{{3}}"""\n')
    assert [row.rpartition(": ")[2] for row in long_strings(path)] == ["11 lines", "11 lines"]
