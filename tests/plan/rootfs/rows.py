"""A view's operations as the rows that the zygote takes, which tests compare."""

from __future__ import annotations

from typing import Any, NamedTuple

from ringfence.plan import model
from ringfence.plan.rootfs.host_view import View
from ringfence.plan.rootfs.protected import Protected


class Rows(NamedTuple):
    """The operations of a view as rows."""

    template: list[list[Any]]
    box: list[list[Any]]
    shown: tuple[str, ...]
    path: str
    protected: tuple[Protected, ...]


def rows(view: View) -> Rows:
    template, box = model.rows(view.template), model.rows(view.box)
    return Rows(template, box, view.shown, view.path, view.protected)
