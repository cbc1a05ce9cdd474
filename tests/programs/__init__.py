"""Programs that tests run, in sandboxes and as processes of the host: one file each, by the folder of the test."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def read_program(name: str) -> str:
    """Return the text of a program, after an empty line that ends what a test puts in front."""
    return "\n" + (_FOLDER / name).read_text()
