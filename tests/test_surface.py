"""The package has exactly the agreed public surface: tests/surface/*.pyi, read by `ast`, against the real objects."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import ringfence

ROOT = Path(__file__).resolve().parents[1]
SURFACE = Path(__file__).resolve().parent / "surface"
STUBS = {
    "ringfence": SURFACE / "ringfence.pyi",
    "ringfence.backends": SURFACE / "backends.pyi",
    "ringfence.events": SURFACE / "events.pyi",
    "ringfence.types": SURFACE / "types.pyi",
}
MOST_NAMES = 30  # what a newcomer is shown at once


class Parameter(NamedTuple):
    name: str
    kind: str
    default: object = inspect.Parameter.empty


class Unsaid:
    """A default that the stub writes as `...`: equal to every default, but not to a missing default."""

    def __eq__(self, other: object) -> bool:
        return other is not inspect.Parameter.empty

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "..."


def parse(module: str) -> ast.Module:
    return ast.parse(STUBS[module].read_text())


def classes(module: str) -> list[ast.ClassDef]:
    return [node for node in parse(module).body if isinstance(node, ast.ClassDef)]


def default_value(node: ast.expr, module: str) -> object:
    """Return the value of a default in the stub: a literal, or a value of the surface, such as `Policy()`."""
    if isinstance(node, ast.Constant) and node.value is ...:
        return Unsaid()
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return getattr(importlib.import_module(module), node.func.id)()
    return ast.literal_eval(node)


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef, module: str) -> list[Parameter]:
    args = function.args
    assert args.vararg is None
    assert args.kwarg is None
    plain = [*((a, "POSITIONAL_ONLY") for a in args.posonlyargs), *((a, "POSITIONAL_OR_KEYWORD") for a in args.args)]
    given: list[ast.expr | None] = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    rows = [(arg.arg, kind, node) for (arg, kind), node in zip(plain, given, strict=True)]
    rows += [(a.arg, "KEYWORD_ONLY", d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [Parameter(n, k, default_value(d, module)) if d is not None else Parameter(n, k) for n, k, d in rows]


def named(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def is_made_by_fields(node: ast.ClassDef) -> bool:
    made = [d for d in node.decorator_list if named(d) == "dataclass"]
    return bool(made) and "init=False" not in ast.unparse(made[0])


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [item for item in node.body if isinstance(item, ast.AnnAssign)]


def constructor(node: ast.ClassDef, module: str) -> list[Parameter] | None:
    """Parameters after self; None where the stub leaves it open (errors, and objects that only we make)."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return arguments(item, module)[1:]
    if not is_made_by_fields(node):
        return None
    rows = [(f.target.id, f.value) for f in fields(node) if isinstance(f.target, ast.Name)]
    kind = "POSITIONAL_OR_KEYWORD"
    return [Parameter(n, kind, default_value(v, module)) if v else Parameter(n, kind) for n, v in rows]


def real(function: object, *, bound: bool) -> list[Parameter]:
    assert callable(function)
    found = [Parameter(p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()]
    return found if bound else found[1:]


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    made = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [item for item in made if item.name != "__init__"]


def kind_of(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = {named(d) for d in method.decorator_list}
    if decorators & {"property", "classmethod", "staticmethod"}:
        return (decorators & {"property", "classmethod", "staticmethod"}).pop()
    return "async" if isinstance(method, ast.AsyncFunctionDef) else "function"


def real_kind(owner: type, name: str) -> str:
    found = inspect.getattr_static(owner, name)
    for kind, wrapper in (("property", property), ("classmethod", classmethod), ("staticmethod", staticmethod)):
        if isinstance(found, wrapper):
            return kind
    return "async" if inspect.iscoroutinefunction(found) else "function"


def public_names(owner: type) -> set[str]:
    """Return the public names of a class that come from the class and from bases inside the package."""
    ours = [c for c in owner.__mro__ if c.__module__.split(".")[0] == "ringfence"]
    return {name for c in ours for name in vars(c) if not name.startswith("_")}


def stub_names(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    mine = {f.target.id for f in fields(node) if isinstance(f.target, ast.Name)} | {m.name for m in methods(node)}
    bases = [known[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in known]
    return mine.union(*(stub_names(base, known) for base in bases))


CLASSES = [pytest.param(m, c, id=f"{m}.{c.name}") for m in STUBS for c in classes(m) if c.name != "Opening"]
ERRORS = [pytest.param(c, id=c.name) for c in classes("ringfence") if c.name.endswith(("Error", "Warning"))]
FUNCTIONS = [n for n in parse("ringfence").body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("module", ["ringfence", "ringfence.events", "ringfence.types"])
def test_a_module_exports_exactly_the_agreed_names(module: str) -> None:
    (agreed,) = [
        ast.literal_eval(node.value)
        for node in parse(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(agreed)
    assert [name for name in agreed if not hasattr(found, name)] == []


def test_the_package_itself_exports_few_names() -> None:
    assert len(ringfence.__all__) <= MOST_NAMES


def test_the_version_is_that_of_the_package() -> None:
    assert ringfence.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("node", [pytest.param(n, id=n.name) for n in FUNCTIONS])
def test_a_function_has_the_agreed_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    function = getattr(ringfence, node.name)
    assert real(function, bound=True) == arguments(node, "ringfence")
    assert inspect.iscoroutinefunction(function) == isinstance(node, ast.AsyncFunctionDef)


@pytest.mark.parametrize(("module", "node"), CLASSES)
def test_a_class_has_the_agreed_constructor(module: str, node: ast.ClassDef) -> None:
    owner = getattr(importlib.import_module(module), node.name)
    agreed = constructor(node, module)
    if agreed is not None:
        assert real(owner, bound=True) == agreed


@pytest.mark.parametrize(("module", "node"), CLASSES)
def test_a_class_has_the_agreed_methods(module: str, node: ast.ClassDef) -> None:
    owner = getattr(importlib.import_module(module), node.name)
    agreed = {m.name: (kind_of(m), [] if kind_of(m) == "property" else arguments(m, module)[1:]) for m in methods(node)}
    found = {}
    for name in agreed:
        if not hasattr(owner, name):
            continue
        kind = real_kind(owner, name)
        signature = (
            [] if kind == "property" else real(getattr(owner, name), bound=kind != "function" and kind != "async")
        )
        found[name] = (kind, signature)
    assert found == agreed


@pytest.mark.parametrize(("module", "node"), CLASSES)
def test_a_class_shows_nothing_that_was_not_agreed(module: str, node: ast.ClassDef) -> None:
    owner = getattr(importlib.import_module(module), node.name)
    known = {c.name: c for c in classes(module)}
    assert sorted(public_names(owner) - stub_names(node, known)) == []


@pytest.mark.parametrize("node", ERRORS)
def test_an_error_has_the_agreed_parents(node: ast.ClassDef) -> None:
    parents = [base.__name__ for base in getattr(ringfence, node.name).__bases__]
    assert parents == [ast.unparse(base) for base in node.bases]


# ── what type checkers say of code that uses the package ─────────────────────────────────────────


def mypy_errors(path: Path) -> list[tuple[int, str]]:
    """(line, message) of each error in `path`, checked against the real package as a user's project would be."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--hide-error-context"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "surface"), "--no-color-output", str(path)]
    environment = {"PATH": os.environ["PATH"], "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env=environment, timeout=55)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = [re.match(rf"{re.escape(path.name)}:(\d+): error: (.*)", line) for line in done.stdout.splitlines()]
    return [(int(m[1]), m[2]) for m in lines if m]


def pyright_errors(path: Path) -> list[tuple[int, str]]:
    project = {
        "include": [str(path)],
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.11",
        "reportUnnecessaryComparison": "error",  # as mypy --strict does
        "ignore": [str(ROOT / "src")],
    }
    config = path.parent / "pyrightconfig.json"
    config.write_text(json.dumps(project))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "-p", str(config)], capture_output=True, text=True, timeout=55
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [(d["range"]["start"]["line"] + 1, d["message"]) for d in found if d["severity"] == "error"]


Checker = Callable[[Path], list[tuple[int, str]]]
CHECKERS = [mypy_errors, pyright_errors]


def copy_of(name: str, folder: Path) -> Path:
    """Copy a file of the surface: type checkers would take surface/ringfence.pyi for the package if run beside it."""
    copy = folder / name
    copy.write_text((SURFACE / name).read_text())
    return copy


def mistakes() -> list[int]:
    """Lines of use_bad.py that must not type-check: all after the imports but the one that makes `box`."""
    lines = enumerate((SURFACE / "use_bad.py").read_text().splitlines(), 1)
    return [n for n, line in lines if not line.startswith(('"""', "import ", "from ", "box = "))]


@pytest.mark.parametrize("checker", CHECKERS)
def test_right_use_type_checks(tmp_path: Path, checker: Checker) -> None:
    assert checker(copy_of("use_ok.py", tmp_path)) == []


@pytest.mark.parametrize("checker", CHECKERS)
def test_every_mistake_is_exactly_one_type_error(tmp_path: Path, checker: Checker) -> None:
    found = checker(copy_of("use_bad.py", tmp_path))
    assert [line for line, _ in found] == mistakes(), found
