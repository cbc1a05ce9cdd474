"""No branch of the product asks whether a test is looking: every control stands, unless an attack hands over others."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringfence
from ringfence.plan.controls import ALL_ON, Controls

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ROOT / "src" / "ringfence"
ATTACKS = ROOT / "attacks" / "src"
VERB = "cli/"  # `ringfence attack` is a verb of the command
# Names of switches that tests alone would turn. Words of prose are no names.
SWITCH = re.compile(
    r"loosen|mutat|weaken|attack|pytest|unittest|_TEST_|\b((for|is|in|under)_)tests?(ing)?\b", re.IGNORECASE
)


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a program gives to something or asks for: prose in docstrings and messages has spaces in it."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            yield line, str(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield line, getattr(node, "module", None) or ""
            for alias in node.names:
                yield line, alias.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield line, node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes) and b" " not in node.value:
            yield line, node.value.decode("latin-1")


def product() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PRODUCT.rglob("*.py")):
        where = path.relative_to(PRODUCT).as_posix()
        if not where.startswith("testing/"):
            yield where, ast.parse(path.read_text())


def test_no_name_in_the_product_is_a_switch_of_tests() -> None:
    found = [
        f"{where}:{line}: {name}"
        for where, tree in product()
        if not where.startswith(VERB)
        for line, name in names_in(tree)
        if SWITCH.search(name)
    ]
    assert found == []


def test_the_product_imports_no_attack() -> None:
    found = [
        f"{where}:{line}" for where, tree in product() for line, name in names_in(tree) if "ringfence_attacks" in name
    ]
    assert found == []


def made(tree: ast.AST) -> Iterator[str]:
    """Return the places where a program makes Controls or a subclass."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Controls":
            yield ast.unparse(node)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Controls") for base in node.bases):
            yield f"class {node.name}"


def test_the_product_makes_one_object_of_controls_and_no_class_of_them() -> None:
    assert [(where, what) for where, tree in product() for what in made(tree)] == [("plan/controls.py", "Controls()")]


def test_with_that_object_everything_stands() -> None:
    assert Controls() == ALL_ON
    assert [name for name in Controls.__fields__ if getattr(ALL_ON, name) is not True] == []
    stages = [name for name, value in vars(Controls).items() if inspect.isfunction(value) and name[0] != "_"]
    anything = {"anything": object()}
    assert [name for name in stages if getattr(ALL_ON, name)(anything) is not anything] == []
    assert set(stages) == {"plan", "container", "bundle"}


def asked_of_controls(tree: ast.AST) -> Iterator[str]:
    """Yield each expression that finds out which object of controls stands; a stage or a field alone may be used."""
    known = {*Controls.__fields__, "plan", "container", "bundle"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used = [] if node.attr in known else [node.value]
        elif isinstance(node, ast.Compare):
            used = [node.left, *node.comparators]
        elif isinstance(node, ast.BoolOp):
            used = node.values
        elif isinstance(node, ast.UnaryOp):
            used = [node.operand]
        elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            used = [node.test]
        elif isinstance(node, ast.Match):
            used = [node.subject]
        elif isinstance(node, ast.FormattedValue):
            used = [node.value]
        elif isinstance(node, ast.Call):
            built_in = isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)
            used = node.args if built_in else []
        else:
            continue
        if any(_is_controls(each) for each in used):
            yield ast.unparse(node)


def _is_controls(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("controls", "_controls", "Controls", "ALL_ON")


def test_no_branch_asks_which_controls_stand() -> None:
    found = [(where, what) for where, tree in product() for what in asked_of_controls(tree)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "controls is not ALL_ON",
        "order.controls == ALL_ON",
        "isinstance(controls, Controls)",
        "type(self.controls)",
        "hasattr(controls, 'left_out')",
        "getattr(controls, name)",
        "controls.left_out",
        "controls.__class__",
        "1 if controls else 2",
        "not controls",
        "f'{controls}'",
    ],
)
def test_the_reader_of_controls_sees_each_question(text: str) -> None:
    assert [*asked_of_controls(ast.parse(text))] != []


def test_the_reader_of_controls_lets_stages_and_fields_be_used() -> None:
    text = "made = order.controls.plan(plan)\nif controls.mount_flags and x: f(made, controls, controls=self.controls)"
    assert [*asked_of_controls(ast.parse(text))] == []


# Each variable of ours that the product names: none turns something off.
VARIABLES = {
    "RINGFENCE_CONFORMANCE_SECRET": "a value that a check hides from a guest",
    "RINGFENCE_DOOR": "where guestd of an engine's sandbox finds its channel",
    "RINGFENCE_KEY": "what guestd shows there",
    "RINGFENCE_TRIAL_FILTER": "given by the doctor to the programs of its trials",
    "RINGFENCE_TRIAL_PYTHON": "the same",
    "RINGFENCE_TRIAL_UID": "the same",
}


def test_no_other_variable_of_ours_is_named() -> None:
    sources = [path.read_text() for path in PRODUCT.rglob("*.py")]
    assert {name for text in sources for name in re.findall(r"RINGFENCE_[A-Z_]+", text)} == VARIABLES.keys()


def test_controls_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot be set"):
        ALL_ON.engine_settings = False  # type: ignore[misc]  # wrong on purpose


def test_a_parameter_for_controls_stands_nowhere_in_the_public_api() -> None:
    """Nor in the policy: its keys are arguments of the same classes."""
    found = []
    for name in ringfence.__all__:
        exported = getattr(ringfence, name)
        members = (
            [exported, *(value for key, value in vars(exported).items() if key[0] != "_")]
            if isinstance(exported, type)
            else [exported]
        )
        for member in members:
            try:
                parameters = inspect.signature(member).parameters
            except (TypeError, ValueError):
                continue
            found += [f"{name}: {parameter}" for parameter in parameters if "control" in parameter.lower()]
    assert found == []


def test_a_parameter_for_controls_is_all_on_by_default() -> None:
    found = []
    for where, tree in product():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                positional = [*given.posonlyargs, *given.args]
                defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
                pairs = [
                    *zip(positional, defaults, strict=True),
                    *zip(given.kwonlyargs, given.kw_defaults, strict=True),
                ]
                found += [
                    f"{where}: {node.name}: {ast.unparse(default)}"
                    for argument, default in pairs
                    if argument.arg == "controls"
                    and default is not None
                    and ast.unparse(default) not in ("ALL_ON", "...")  # dots: a Protocol
                ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("if self.loosen is None: check()", "loosen"),
        ("def f(*, is_testing=False): ...", "is_testing"),
        ("os.environ.get('RINGFENCE_TEST_MUTATE')", "RINGFENCE_TEST_MUTATE"),
        ("from ringfence_attacks.controls import Lacking", "ringfence_attacks.controls"),
        ("launch(plan, under_attack=True)", "under_attack"),
        ("'unittest' in sys.modules", "unittest"),
        ("b'pytest' in command_line", "pytest"),
    ],
)
def test_the_reader_of_names_sees_each_kind(text: str, name: str) -> None:
    assert name in [found for _, found in names_in(ast.parse(text)) if SWITCH.search(found)]
