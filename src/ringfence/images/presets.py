"""Recipes that come with the package: what agents usually need."""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.images.recipe import Recipe

_TOOLS = ("ca-certificates", "curl", "git", "less", "procps", "ripgrep")
_PYTHON = ("libstdc++6", "python3", "python3-pip", "python3-venv")  # the library: most wheels with C++ need it
_DATA = ("matplotlib", "numpy", "pandas", "requests")
_NPM = ("npm@10",)  # of the Node that Debian has

NAMES = ("python", "data", "node", "polyglot")


def preset(name: str) -> Recipe:
    """Raises PolicyError for a name that is none."""
    if name == "python":
        return Recipe(apt=(*_TOOLS, *_PYTHON), pip=("requests",))
    if name == "data":
        return Recipe(apt=(*_TOOLS, *_PYTHON), pip=_DATA, preload=("numpy",))
    if name == "node":
        return Recipe(apt=(*_TOOLS, "nodejs"), npm=_NPM)
    if name == "polyglot":
        compilers = ("g++", "gcc", "golang-go", "make", "nodejs", "ruby")
        return Recipe(apt=(*_TOOLS, *_PYTHON, *compilers), pip=_DATA, npm=_NPM, preload=("numpy",))
    raise PolicyError(f"no preset named {name!r}", key="preset", fix=f"one of: {', '.join(NAMES)}")
