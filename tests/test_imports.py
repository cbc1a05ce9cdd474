"""Imports go one way. Read from the source by `ast`, without importing it, type-only and late imports included."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "ringfence"

# A module may import from its own layer and from those above it in this list.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("shared",),  # both sides of the wall: imports nothing of ours
    ("guest",),  # imports `shared` alone, so that it can run in an image that holds nothing of ours
    ("values", "errors", "results", "events", "records", "rendering", "text"),
    ("policy",),
    ("plan", "wire", "host", "backends", "gateway", "snapshots", "transfer"),
    ("core", "manager", "_async", "_sync", "images", "types"),
    ("testing",),
    ("audit",),
    ("doctor",),
    ("server",),
    ("console",),
    ("cli", "__main__"),
    ("mcp",),
    ("integrations",),
    ("cluster",),
    ("browser",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# `ringfence` itself exports all of the above lazily; no module below `doctor` may import it.
ROOT_USERS = frozenset(name for names in LAYERS[LEVEL["doctor"] :] for name in names) | {"testing"}


# Upward edges between modules, each with its reason.
UPWARD = {
    ("ringfence.backends.auto", "ringfence.images.store"): "an image is found by its name",
    ("ringfence.backends.linux", "ringfence.images.store"): "where images are is never shown to a guest",
    ("ringfence.backends.process.backend", "ringfence.images.store"): "an image is let go of with what is kept for it",
    ("ringfence.backends.process.backend", "ringfence.doctor.process"): "doctor() of the contract",
    ("ringfence.backends.container.backend", "ringfence.doctor.engines"): "doctor() of the contract",
    ("ringfence.backends.gvisor.backend", "ringfence.doctor.engines"): "doctor() of the contract",
}


class Import(NamedTuple):
    importer: str
    line: int
    imported: str


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, source: Path) -> list[Import]:
    importer = module_name(path, source)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    found: list[Import] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.extend(Import(importer, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base == PACKAGE:  # `from ringfence import policy` names a module, `from ringfence import run` the root
                names = [alias.name for alias in node.names]
                found.extend(Import(importer, node.lineno, f"{base}.{n}" if n in LEVEL else base) for n in names)
            else:
                found.append(Import(importer, node.lineno, base))
    return found


def all_imports(source: Path = SOURCE) -> list[Import]:
    return [i for path in sorted((source / PACKAGE).rglob("*.py")) for i in imports_of(path, source)]


def top(module: str) -> str:
    """The name below `ringfence`, "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def wrong_way(found: Import) -> str | None:
    importer, imported = top(found.importer), top(found.imported)
    if not importer or importer not in LEVEL or (imported and imported not in LEVEL):
        return None  # the root exports everything; unknown names have a test of their own
    where = f"{found.importer}:{found.line} imports {found.imported}"
    if not imported:
        return None if importer in ROOT_USERS else f"{where}: name the module that owns it, not the package"
    if importer == "guest" and imported not in ("guest", "shared"):
        return f"{where}: the guest's side imports nothing of ours but `shared`"
    if (found.importer, found.imported) in UPWARD:
        return None
    return f"{where}: that layer stands above" if LEVEL[imported] > LEVEL[importer] else None


def test_every_module_has_a_layer() -> None:
    names = {top(module_name(p, SOURCE)) for p in (SOURCE / PACKAGE).rglob("*.py")} - {""}
    unknown = sorted(names - LEVEL.keys())
    assert unknown == [], f"add {', '.join(unknown)} to LAYERS in {Path(__file__).name}, below all that it imports"


def test_imports_go_one_way() -> None:
    assert [problem for i in all_imports() if ours(i.imported) and (problem := wrong_way(i))] == []


def test_the_guests_side_imports_the_standard_library_only() -> None:
    foreign = [
        i
        for i in all_imports()
        if top(i.importer) in ("guest", "shared")
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


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("policy/a.py", "from ringfence.plan import x", ":1 imports ringfence.plan: that layer stands above"),
        ("policy/a.py", "def f():\n from .. import cli", ":2 imports ringfence.cli: that layer stands above"),
        (
            "guest/a.py",
            "import ringfence.values",
            ":1 imports ringfence.values: the guest's side imports nothing of ours but `shared`",
        ),
        (
            "wire/a.py",
            "from ringfence import run",
            ":1 imports ringfence: name the module that owns it, not the package",
        ),
        ("plan/a.py", "from ringfence.policy.model import Policy", None),
        ("guest/a.py", "from . import box", None),
        ("cli/a.py", "import ringfence", None),
    ],
)
def test_the_reader_of_imports_sees_each_kind(tmp_path: Path, path: str, text: str, problem: str | None) -> None:
    file = tmp_path / PACKAGE / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (found,) = all_imports(tmp_path)
    assert wrong_way(found) == (problem and f"ringfence.{path.removesuffix('.py').replace('/', '.')}{problem}")
