"""Waits for the guest's import of a module, to change it once it is there."""

from __future__ import annotations

import sys
from _frozen_importlib import _find_spec  # type: ignore[attr-defined]  # what every import calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def on_import(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the module: now, or right after its own code has run."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Looks at no other name."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = _find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._then(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec
