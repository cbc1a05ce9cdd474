"""Distributions that bring a backend, put into a folder of their own: the toy, and wrong ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ringfence.backends.registry import GROUP

TOY = Path(__file__).resolve().parent / "toy_backend"


def install_toy(folder: Path) -> Path:
    """Build the toy's wheel and install it as pip does, without a network. Returns the folder for `sys.path`."""
    build = f"import hatchling.build as b; b.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=TOY, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    installed = folder / "installed"
    subprocess.run([*pip, "--target", str(installed), str(wheel)], capture_output=True, check=True)
    return installed


def plant(folder: Path, distribution: str, name: str, source: str, value: str = "") -> None:
    """Write a distribution with one module, whose entry point `name` leads to Backend in it, or to `value`."""
    module = distribution.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value or f'{module}:Backend'}\n")
