"""Makes guestd one compiled file: every module of its package, and where its parts of the standard library lie.

A start then opens one file instead of sixty, which under gVisor is a third of it.
"""

from __future__ import annotations

import os
import sysconfig
from importlib import _bootstrap_external  # what writes every .pyc
from importlib.machinery import SourceFileLoader

from ringfence.guest import fresh, node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType
    from typing import TypeAlias

    Module: TypeAlias = tuple[str, str, bool, CodeType]

_PACKAGES = ("ringfence", "ringfence/guest")
_STANDARD = ("__future__", "struct", "types")
_EXTENSIONS = ("_ctypes", "_json", "_socket", "_struct", "fcntl", "select")
_as_file = _bootstrap_external._code_to_hash_pyc  # type: ignore[attr-defined]  # noqa: SLF001  # as py_compile does
_PLACE = "held"  # the constant of within.py that stands for all of it


def make(target: str, inside: str, version: str) -> None:
    """`target`: the folder that is shown at `inside`, with our package and the interpreter's library in it."""
    held = (
        tuple(_modules(target, inside, version)),
        tuple(_extensions(target, inside, version)),
        tuple(_texts(target, inside)),
    )
    path = f"{target}/ringfence/guest/within.py"
    code = _compiled(path, f"{inside}/ringfence/guest/within.py")
    assert _PLACE in code.co_consts
    whole = code.replace(co_consts=tuple(held if each == _PLACE else each for each in code.co_consts))
    with open(f"{target}/guestd.pyc", "wb") as file:
        file.write(_as_file(whole, bytes(8), checked=False))


def _modules(target: str, inside: str, version: str) -> Iterator[Module]:
    for package in _PACKAGES:
        for name in sorted(os.listdir(f"{target}/{package}")):
            if not name.endswith(".py") or name in ("within.py", "__main__.py"):
                continue
            path = f"{package}/{name}"
            own = name == "__init__.py"
            dotted = package.replace("/", ".") if own else path.removesuffix(".py").replace("/", ".")
            yield dotted, f"{inside}/{path}", own, _compiled(f"{target}/{path}", f"{inside}/{path}")
    for name in _STANDARD:
        path = f"lib/{version}/{name}.py"
        yield name, f"{inside}/{path}", False, _compiled(f"{target}/{path}", f"{inside}/{path}")


def _extensions(target: str, inside: str, version: str) -> Iterator[tuple[str, str]]:
    """Those that are files; others are in the interpreter itself."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in _EXTENSIONS:
        path = f"lib/{version}/lib-dynload/{name}{suffix}"
        if os.path.exists(f"{target}/{path}"):
            yield name, f"{inside}/{path}"


def _texts(target: str, inside: str) -> Iterator[tuple[str, bytes]]:
    """What guestd hands to other interpreters."""
    folder = _PACKAGES[-1]
    for name in (*(f"{module}.py" for module in fresh.MODULES), *node.TEXTS.values()):
        with open(f"{target}/{folder}/{name}", "rb") as file:
            yield f"{inside}/{folder}/{name}", file.read()


def _compiled(path: str, shown: str) -> CodeType:
    with open(path, "rb") as file:
        return SourceFileLoader(path, path).source_to_code(file.read(), shown)
