"""Imports go one way, between rooms that a table names. The imports are read from the source by `ast`.

Type-only and late imports count, and so do those that hide in strings: `__import__("ringfence.x")`, a table of module
names, the text of a program for another interpreter. `sys.modules` with a name of ours is no control flow at all.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "ringfence"

# Each room, from the lowest to the highest, and the rooms that its modules may import. A module belongs to the longest
# name here that it starts with. A room may import only rooms that stand before it: `test_the_table_has_one_direction`.
VALUES = ("errors", "events", "records", "rendering", "results", "text", "values")
LOW = ("values", "policy")
HOST = (*LOW, "plan", "host", "shared")
ROOMS: dict[str, tuple[str, ...]] = {
    "shared": (),  # both sides of the wall: imports nothing of ours
    "guest": ("shared",),  # the far side imports `shared` alone: an image holds nothing else of ours
    "guest.guestd": ("guest", "shared"),
    "guest.interpreter": ("guest", "guest.guestd", "shared"),
    "guest.files": ("guest", "guest.guestd", "shared"),
    "guest.launch": ("guest", "guest.guestd", "guest.interpreter", "guest.files", "shared"),
    "guest.engine": (
        "guest",
        "guest.guestd",
        "guest.interpreter",
        "guest.files",
        "guest.launch",
        "shared",
    ),
    "values": (),
    "policy": ("values", "shared"),
    "plan": (*LOW, "shared"),
    "wire": ("values", "shared"),
    "host": (*LOW, "plan", "shared"),
    "images": HOST,
    "gateway": (*HOST, "wire"),
    "transfer": (*HOST, "wire"),
    "backends.contract": (*LOW, "plan"),
    "snapshots": (*HOST, "wire", "backends.contract"),
    "backends": (*HOST, "images", "gateway", "backends.contract"),
    "backends.engine": (*HOST, "wire", "backends", "backends.contract"),
    "backends.process": (*HOST, "wire", "images", "backends", "backends.contract"),
    "backends.container": (*HOST, "wire", "backends", "backends.contract", "backends.engine"),
    "backends.gvisor": (*HOST, "wire", "backends", "backends.contract", "backends.engine"),
    "core": (*LOW, "plan", "wire", "shared", "backends.contract"),
    "manager": (*HOST,),
    "backends.public": ("backends", "backends.contract", "backends.process", "backends.container", "backends.gvisor"),
    "_async": (*HOST, "wire", "core", "manager", "snapshots", "transfer", "backends", "backends.contract"),
    "_sync": (*HOST, "wire", "core", "manager", "snapshots", "transfer", "backends", "backends.contract"),
    "images.build": (*HOST, "images", "_sync", "backends", "backends.contract"),
    "types": (*LOW, "plan", "snapshots", "_async", "_sync"),
    "package": (*LOW, "snapshots", "backends.public", "_async", "_sync", "types"),  # `ringfence` itself
    "testing": ("values", "types", "package"),
    "doctor": (
        *(*HOST, "images", "images.build", "backends", "backends.contract", "backends.process", "backends.container"),
        *("backends.gvisor", "package"),
    ),
    "integrations": (*LOW, "_async", "package"),
    "cli": (*HOST, "images", "images.build", "core", "backends", "_sync", "types", "doctor", "package"),
    "__main__": ("host", "cli"),
}
# Modules that stand in another room than the rest of their package.
MEMBERS = {
    **dict.fromkeys(VALUES, "values"),
    # Faces of a package: what `ringfence.images` and `ringfence.backends` export.
    "images": "images.build",
    "backends": "backends.public",
    # Modules of guestd that differ by where guestd runs: as PID 1 of an engine's sandbox, and the modules a job needs.
    **dict.fromkeys(("guest.guestd.engine_pid1", "guest.guestd.__main__"), "guest.engine"),
    "guest.job_modules": "guest.guestd",
    **dict.fromkeys((f"guest.{name}" for name in ("files", "guestd", "interpreter", "launch")), "guest"),
    **{f"images.{name}": "images.build" for name in ("builder", "packages")},
    **{
        f"images.{name}": "images" for name in ("exporter", "importer", "make", "outfit", "store", "tar_reader", "tree")
    },
}
# What the package of one more backend may import: never another backend.
NEW_BACKEND = (*HOST, "wire", "backends", "backends.contract", "backends.engine")
ORDER = {name: place for place, name in enumerate(ROOMS)}
MEMBER_MODULES = frozenset(f"{PACKAGE}.{name}" for name in (*ROOMS, *MEMBERS))

MADE = "<made at run time>"  # the name of a module that no reader can know

# Edges that go another way than the table, each from one module to one module, with its reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    **{
        ("backends.registry", f"backends.{name}.backend"): "the table of our own backends: one line each"
        for name in ("process", "container", "gvisor")
    },
    ("backends.registry", "backends"): "the name of a group of entry points",
    ("backends.auto", "backends.process.backend"): "preflight() tries the backend that a host refuses most often",
    ("backends.process.backend", "doctor.process"): "doctor() of the contract; the trials are the doctor's",
    ("backends.container.backend", "doctor.engines"): "as above",
    ("backends.gvisor.backend", "doctor.engines"): "as above",
    ("guest.launch.zygote", ""): "a program for an interpreter of the host, after the library died: the sweep",
    ("guest.launch.zygote", "host.state"): "as above",
    ("host.zygote_start", ""): "a program for an interpreter of the host: this very package",
    ("images", "backends.process.backend"): "what is kept ready for an image goes before the image does",
    ("cli.launch", "backends.process.backend"): "a command asks for its one sandbox ahead of time",
    ("types", MADE): "lazy exports, from a table in the same file",
    ("cli", "__main__"): "the verbs that it starts a zygote for",
    **{
        (f"{half}.snapshots", f"backends.process.memory.{module}"): "sessions are copied by the process backend alone"
        for half in ("_async", "_sync")
        for module in ("capture", "restore")
    },
}


class Import(NamedTuple):
    importer: str
    line: int
    imported: str


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(source: Path) -> frozenset[str]:
    return frozenset(module_name(path, source) for path in (source / PACKAGE).rglob("*.py"))


def imports_of(path: Path, source: Path) -> list[Import]:
    importer = module_name(path, source)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.extend(Import(importer, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            # `from ringfence import policy` names a module, `from ringfence import run` the package.
            parts = {f"{base}.{alias.name}" for alias in node.names} & (modules(source) | MEMBER_MODULES)
            found.extend(Import(importer, node.lineno, each) for each in parts or {base})
            if parts and len(parts) < len(node.names):
                found.append(Import(importer, node.lineno, base))
        elif isinstance(node, ast.Attribute) and (whole := _dotted(node)) in modules(source) | MEMBER_MODULES:
            found.append(Import(importer, node.lineno, whole))  # loaded by another import of the package
        elif isinstance(node, ast.Call) and (name := _dotted(node.func).rpartition(".")[2]) in _IMPORTERS:
            found.extend(Import(importer, node.lineno, each) for each in _imported_by(node, name, package))
    return found + [Import(importer, line, name) for line, name in hidden_in_strings(tree, source)]


_IMPORTERS = ("__import__", "import_module")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _imported_by(call: ast.Call, name: str, package: str) -> Iterator[str]:
    """Yield what a call imports by a name that is relative, made at run time below ours, or in a list."""
    words = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    first = words[0] if words else ""
    if name == "import_module" and first.startswith("."):
        above = words[1] if len(words) > 1 else package
        for _ in range(len(first) - len(first.lstrip(".")) - 1):
            above = above.rpartition(".")[0]
        yield f"{above}.{first.lstrip('.')}"
    elif first == PACKAGE and len(words) > 1:
        yield from (f"{PACKAGE}.{each}" for each in words[1:])
    elif first == f"{PACKAGE}." and not isinstance(call.args[0], ast.Constant):
        yield f"{PACKAGE}.{MADE}"


_IN_PROGRAM = re.compile(
    rf"^\s*(?:from|import|import .*,) ({PACKAGE}(?:\.\w+)*)(?![\w.])(?: import (\w+))?", re.MULTILINE
)
_ALONE = re.compile(rf"{PACKAGE}(?:\.\w+)+")


def hidden_in_strings(tree: ast.AST, source: Path) -> Iterator[tuple[int, str]]:
    """Module names that stand alone in a string, and imports in the text of a program."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str | bytes) or id(node) in said:
            continue
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        if _ALONE.fullmatch(text) and text in modules(source) | MEMBER_MODULES:
            yield node.lineno, text
        for program in re.split(r"[;:]", text):
            for base, name in _IN_PROGRAM.findall(program):
                whole = f"{base}.{name}"
                yield node.lineno, whole if whole in modules(source) else base


@cache
def all_imports(source: Path = SOURCE) -> list[Import]:
    return [i for path in sorted((source / PACKAGE).rglob("*.py")) for i in imports_of(path, source)]


def ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def room(module: str) -> str | None:
    """Return the room of a module of Ringfence; None for a module that the table does not know."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    if not name:
        return "package"
    if name in MEMBERS:
        return MEMBERS[name]
    first, _, rest = name.partition(".")
    if first == "backends" and "." in rest:
        return f"backends.{rest.partition('.')[0]}"
    while name:
        if name in ROOMS:
            return name
        name = name.rpartition(".")[0]
    return None


def wrong_way(found: Import) -> str | None:
    importer, imported = room(found.importer), room(found.imported)
    where = f"{found.importer}:{found.line} imports {found.imported}"
    if edge(found) in EXCEPTIONS:
        return None
    if importer is None or imported is None:
        return f"{where}: name its room in ROOMS"
    if importer == imported or imported in ROOMS.get(importer, NEW_BACKEND):
        return None
    if imported == "package":
        return f"{where}: name the module that owns it, not the package"
    return f"{where}: {importer} may not import {imported}"


def edge(found: Import) -> tuple[str, str]:
    """The two modules without the package's own name."""
    importer, imported = (name.removeprefix(PACKAGE).removeprefix(".") for name in (found.importer, found.imported))
    return importer, imported


def problems() -> list[str]:
    return [problem for i in all_imports() if ours(i.imported) and (problem := wrong_way(i))]


def test_every_module_has_a_room() -> None:
    unknown = sorted(name for name in modules(SOURCE) if room(name) is None)
    assert unknown == [], f"add a room for {', '.join(unknown)} to ROOMS in {Path(__file__).name}"


def test_the_table_has_one_direction() -> None:
    """Then no two rooms can import each other, by however many others."""
    up = [(name, other) for name, others in ROOMS.items() for other in others if ORDER[other] >= ORDER[name]]
    assert up == []


def test_imports_go_one_way() -> None:
    assert problems() == []


def test_every_exception_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "EXCEPTIONS", {})
    found = {edge(i) for i in all_imports() if ours(i.imported) and wrong_way(i)}
    assert sorted(EXCEPTIONS.keys() - found) == []


def module_tables(path: Path) -> list[int]:
    """Return the lines that look a module of Ringfence up in `sys.modules`."""
    found = []
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "sys.modules" in text else ():
        if not isinstance(node, ast.Compare | ast.Subscript | ast.Call):
            continue
        inside = [*ast.walk(node)]
        uses = any(isinstance(each, ast.Attribute) and ast.unparse(each) == "sys.modules" for each in inside)
        named = any(isinstance(each, ast.Constant) and _ALONE.fullmatch(str(each.value)) for each in inside)
        found += [node.lineno] if uses and named else []
    return found


def test_what_is_loaded_decides_nothing() -> None:
    found = {str(path.relative_to(SOURCE)): module_tables(path) for path in (SOURCE / PACKAGE).rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import sys\nif 'ringfence.x' in sys.modules: pass", [2]),
        ("import sys\nsys.modules['ringfence.x'].close()", [2]),
        ("import sys\na = sys.modules.get('ringfence.x')", [2]),
        ("import sys\na = sys.modules[__name__]", []),
    ],
)
def test_the_reader_sees_each_look_into_the_modules(tmp_path: Path, text: str, lines: list[int]) -> None:
    file = tmp_path / "a.py"
    file.write_text(text)
    assert sorted(set(module_tables(file))) == lines


def test_the_guests_side_imports_the_standard_library_only() -> None:
    foreign = [
        i
        for i in all_imports()
        if (room(i.importer) or "").split(".")[0] in ("guest", "shared")
        and not ours(i.imported)
        and i.imported.split(".")[0] not in sys.stdlib_module_names
    ]
    assert foreign == []


OTHER_STDLIB = {"_sha2", "compression", "_sha256"}  # of 3.12, of 3.14, and until 3.11


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *(line for group in extras.values() for line in group)]
    return {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower().replace("-", "_") for line in lines}


def test_every_foreign_import_is_a_declared_dependency() -> None:
    known = (
        sys.stdlib_module_names | OTHER_STDLIB | {PACKAGE} | declared() - {"ringfence_attacks"}
    )  # found, not imported
    assert [i for i in all_imports() if i.imported.split(".")[0] not in known] == []


def case(path: str, text: str, problem: str | None) -> object:
    return pytest.param(path, text, problem, id=f"{path}: {text[:60]}")


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        case("policy/a.py", "from ringfence.plan import x", ":1 imports ringfence.plan: policy may not import plan"),
        case("policy/a.py", "def f():\n from .. import cli", ":2 imports ringfence.cli: policy may not import cli"),
        case("guest/a.py", "import ringfence.values", ":1 imports ringfence.values: guest may not import values"),
        case(
            "wire/a.py",
            "from ringfence import run",
            ":1 imports ringfence: name the module that owns it, not the package",
        ),
        case("plan/a.py", "from ringfence.policy.model import Policy", None),
        case("plan/a.py", "from ringfence.host import state", ":1 imports ringfence.host: plan may not import host"),
        case(
            "backends/container/a.py",
            "from ringfence.backends.process.pool import x",
            ":1 imports ringfence.backends.process.pool: backends.container may not import backends.process",
        ),
        case("backends/container/a.py", "from ringfence.backends.engine import box", None),
        case("backends/vm/a.py", "import ringfence.host, ringfence.backends.engine.box", None),
        case(
            "backends/vm/a.py",
            "import ringfence.backends.wasm.x",
            ":1 imports ringfence.backends.wasm.x: backends.vm may not import backends.wasm",
        ),
        case("guest/launch/a.py", "from . import mounts", None),
        case("cli/a.py", "import ringfence", None),
        case("host/a.py", "__import__('ringfence.cli')", ":1 imports ringfence.cli: host may not import cli"),
        case(
            "host/a.py",
            "import importlib\nimportlib.import_module('ringfence.cli')",
            ":2 imports ringfence.cli: host may not import cli",
        ),
        case(
            "guest/a.py",
            "PROGRAM = 'import os; from ringfence.host import state'",
            ":1 imports ringfence.host: guest may not import host",
        ),
        case(
            "guest/a.py",
            'PROGRAM = """\nimport os\nimport ringfence.cli\n"""',
            ":1 imports ringfence.cli: guest may not import cli",
        ),
        case("host/a.py", "PROGRAM = b'import ringfence.cli'", ":1 imports ringfence.cli: host may not import cli"),
        case(
            "host/a.py",
            "PROGRAM = 'if 1: import os, ringfence.cli'",
            ":1 imports ringfence.cli: host may not import cli",
        ),
        case("host/a.py", "def f(): ringfence.cli.main()", ":1 imports ringfence.cli: host may not import cli"),
        case(
            "host/a.py",
            "from importlib import import_module\nimport_module('..cli', __package__)",
            ":2 imports ringfence.cli: host may not import cli",
        ),
        case(
            "host/a.py",
            "__import__('ringfence', fromlist=['cli']).cli",
            ":1 imports ringfence.cli: host may not import cli",
        ),
        case(
            "host/a.py",
            "__import__(f'ringfence.{name}')",
            ":1 imports ringfence.<made at run time>: name its room in ROOMS",
        ),
        case("gateway/a.py", "TABLE = {'a': 'ringfence.cli'}", ":1 imports ringfence.cli: gateway may not import cli"),
        case("new_room/a.py", "import ringfence.values", ":1 imports ringfence.values: name its room in ROOMS"),
    ],
)
def test_the_reader_of_imports_sees_each_kind(tmp_path: Path, path: str, text: str, problem: str | None) -> None:
    file = tmp_path / PACKAGE / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = {wrong_way(each) for each in all_imports(tmp_path) if ours(each.imported)}
    assert [*found] == [problem and f"ringfence.{path.removesuffix('.py').replace('/', '.')}{problem}"]
