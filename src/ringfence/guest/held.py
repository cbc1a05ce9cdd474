"""Owns modules of ours that are run when they are first used, from code read before there is a root without them.

For a command, which makes one sandbox and mostly execs a program there: what only Python code, sessions and files need
is read by the interpreter's own loader, and not run.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec, SourceFileLoader
    from types import CodeType, ModuleType

_FOLDER, _PACKAGE = os.path.dirname(__file__), __name__.rpartition(".")[0]
_HELD = (
    *("beneath", "cells", "connector", "cursor", "display", "filesearch", "filestreams", "filewatch", "fileworker"),
    *("imported", "keeping", "knowing", "packing", "planting", "pycode", "restoring", "session", "shell", "stepwise"),
    *("tarstream", "trees", "zipstream"),
)


class Held:
    """A finder of what `hold` has read. It opens no file: where it is asked, a file would be an image's (J19)."""

    def __init__(self) -> None:
        self._code: dict[str, tuple[str, CodeType]] = {}

    def hold(self) -> None:
        loader: type[SourceFileLoader] = type(__spec__.loader)  # type: ignore[assignment]  # by which we came
        for name in _HELD:
            full, path = f"{_PACKAGE}.{name}", f"{_FOLDER}/{name}.py"
            code = loader(full, path).get_code(full)
            assert code is not None
            self._code[full] = (path, code)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name not in self._code:
            return None
        spec = type(__spec__)(name, self, origin=self._code[name][0])  # type: ignore[arg-type]  # it has what is asked
        spec.has_location = True
        return spec

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        """The usual kind."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code[module.__name__][1], module.__dict__)  # noqa: S102  # as every import does
