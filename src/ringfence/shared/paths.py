"""Compares paths as text: no link is followed, no file is looked at.

Both paths are normal (no "..", no empty part in the middle) and both absolute, or both relative to the same folder. A
slash at the end makes no difference.
"""

from __future__ import annotations


def is_within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or a path below."""
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is below `folder`, and not `folder` itself."""
    return is_within(path, folder) and path.rstrip("/") != folder.rstrip("/")
