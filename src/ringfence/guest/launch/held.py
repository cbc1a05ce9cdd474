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

_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_HELD = (
    *(f"guest.files.{name}" for name in ("search", "snapshot_apply", "snapshot_scan", "streams", "watch", "worker")),
    *("guest.files.zip_stream", "guest.guestd.connector"),
    *(f"guest.interpreter.{name}" for name in ("bash", "display", "runner", "session")),
    *(f"shared.{name}" for name in ("openat", "stamps", "tar", "tree_pack", "tree_unpack", "tree_walk")),
)


class Held:
    """A finder of what `hold` has read. It opens no file: where it is asked, a file would be an image's (J19)."""

    def __init__(self) -> None:
        self._code: dict[str, tuple[str, CodeType]] = {}

    def hold(self) -> None:
        loader: type[SourceFileLoader] = type(__spec__.loader)  # type: ignore[assignment]  # by which we came
        for name in _HELD:
            full, path = f"ringfence.{name}", f"{_FOLDER}/{name.replace('.', '/')}.py"
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
