"""Compares paths as text: no link is followed, no file is looked at.

Both paths are normal (no "..", no empty part) and both absolute, or both relative to the same folder.
"""

from __future__ import annotations


def is_within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or a path below."""
    return path == folder or is_below(path, folder)


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is below `folder`, and not `folder` itself."""
    above = f"{folder.rstrip('/')}/"
    return path.startswith(above) and path != above
