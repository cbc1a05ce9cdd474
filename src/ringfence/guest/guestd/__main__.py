"""Starts guestd in a box that another program isolates: a container engine, gVisor, a virtual machine.

`backends.engine.guestd_bundle` makes a compiled file of this module, with all our modules and the places of the
standard library's: under gVisor each file that is looked for and opened costs most of a millisecond. Run from its
source, this module imports our package from its files.
"""

import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import ExtensionFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType

# The content of the bundle: modules as (name, path, whether a package, code); extensions as (name, path); texts as
# (path, bytes).
HELD: object = "held"


class BundleFinder:
    """The finder and loader of the modules in the bundle."""

    __module__ = "ringfence.guest.guestd.__main__"  # ours, and dropped with our modules; run as __main__

    def __init__(
        self,
        modules: "list[tuple[str, str, bool, CodeType]]",
        extensions: "list[tuple[str, str]]",
        texts: "list[tuple[str, bytes]]",
    ) -> None:
        self._modules = {name: (path, package, code) for name, path, package, code in modules}
        self._extensions = dict(extensions)
        self._texts = dict(texts)

    def members(self, package: str) -> list[str]:
        """Return the full names of the modules that lie in `package` itself."""
        return [name for name in self._modules if name.rpartition(".")[0] == package]

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name in self._extensions:
            path = self._extensions[name]
            return ModuleSpec(name, ExtensionFileLoader(name, path), origin=path)
        if name not in self._modules:
            return None
        path, package, _ = self._modules[name]
        spec = ModuleSpec(name, self, origin=path, is_package=package, loader_state="held")  # type: ignore[arg-type]  # it has what is asked
        spec.has_location = True
        return spec

    def get_data(self, path: str) -> bytes:
        return self._texts[path]

    def create_module(self, _spec: ModuleSpec) -> "ModuleType | None":
        return None

    def exec_module(self, module: "ModuleType") -> None:
        exec(self._modules[module.__name__][2], module.__dict__)  # noqa: S102  # as every import does


if isinstance(HELD, str):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
else:
    sys.meta_path.insert(0, BundleFinder(*HELD))  # type: ignore[misc]  # what `guestd_bundle` puts there

from ringfence.guest.guestd.engine_pid1 import main  # noqa: E402  # after it can be found

main()
