"""Representations of objects by MIME type: for display(), for the value of a cell, and for figures left open.

The methods are those that notebooks made common, so that pandas, plotly and others need no special support.
"""

from __future__ import annotations

import builtins
import sys
from _frozen_importlib import _find_spec  # type: ignore[attr-defined]  # what every import calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ringfence.guest.interpreter.line import Line


_METHODS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/json", "_repr_json_"),
)
_PLAIN = (int, str, float, bool, list, dict, tuple, set, bytes, complex, frozenset, type(None))
_MOST_KINDS = 16  # representations of an object
_MOST_TEXT = 1 << 16
_MOST = 1 << 23  # bytes of a representation; the host takes 16 MiB in a message
_MOST_SHOWN = 1 << 14  # objects of a cell: the host hangs up after 20 000 messages
_PLOTLY = "application/vnd.plotly.v1+json"


def representations(value: object) -> list[tuple[str, bytes]]:
    """Return an object's representations. Text comes first and always. Errors of a guest's methods are not shown."""
    found = {"text/plain": _text(value)}
    if type(value) not in _PLAIN and not isinstance(value, type):
        found.update(_rich(value))
    room = 2 * _MOST - (1 << 12)
    kept = []
    for mime, data in found.items():
        if len(data) <= min(_MOST, room):
            kept.append((mime, data))
            room -= len(data)
    return kept


def _text(value: object) -> bytes:
    text = repr(value)
    if len(text) > _MOST_TEXT:
        text = f"{text[:_MOST_TEXT]}… ({len(text) - _MOST_TEXT:,} more characters)"
    return text.encode("utf-8", "replace")


def _rich(value: object) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for mime, name in _METHODS:
        data = _asked(value, name)
        if data is not None:
            found[mime] = data
    bundle = _call(value, "_repr_mimebundle_")
    if isinstance(bundle, tuple) and bundle:
        bundle = bundle[0]
    if isinstance(bundle, dict):
        for mime, content in bundle.items():
            data = _bytes(content)
            if len(found) < _MOST_KINDS and data is not None and _is_mime(mime):
                found[mime] = data
    if type(value).__module__.partition(".")[0] == "plotly" and _PLOTLY not in found:
        data = _asked(value, "to_json")
        if data is not None:
            found[_PLOTLY] = data
    if _is_figure(value):
        found["image/png"] = _drawn(value)
    return found


def _is_mime(mime: object) -> bool:
    """Return whether the host will take `mime` as the name of a type.

    The host hangs up on a process that sends other text.
    """
    return isinstance(mime, str) and 0 < len(mime) <= 100 and mime.isascii() and mime.isprintable()


def _asked(value: object, name: str) -> bytes | None:
    return _bytes(_call(value, name))


def _call(value: object, name: str) -> object:
    try:
        method = getattr(value, name, None)
        return method() if callable(method) else None
    except Exception:  # noqa: BLE001  # a guest's own method; then it has no such representation
        return None


def _bytes(content: object) -> bytes | None:
    if isinstance(content, tuple) and content:
        content = content[0]  # a pair with metadata
    if isinstance(content, bytes | bytearray):
        return bytes(content)
    if isinstance(content, str):
        return content.encode("utf-8", "replace")
    if isinstance(content, dict | list):
        import json

        try:
            return json.dumps(content).encode()
        except (TypeError, ValueError, RecursionError):
            return None
    return None


def flush() -> bool:
    """Flush the output. Return whether everything printed has left this process."""
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            done = False
    return done


class DisplayFunction:
    """The function `display()` of an interpreter."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._left = _MOST_SHOWN

    def begin(self) -> None:
        """Begin a run, or a cell."""
        self._left = _MOST_SHOWN

    def show(self, value: object, *, is_value: bool = False) -> None:
        """Show a value to the host.

        In a fork, which has no line, and beyond the most for a cell, the value is printed.
        """
        shown = representations(value)
        self._left -= not is_value
        if not self._line.ours or (self._left < 0 and not is_value):
            print(shown[0][1].decode("utf-8", "replace"))
            return
        flush()
        sizes = [[mime, len(data)] for mime, data in shown]
        self._line.send({"m": "display", "value": is_value, "mimes": sizes}, b"".join(data for _, data in shown))

    def install(self) -> None:
        def display(*values: object) -> None:
            for value in values:
                self.show(value)

        builtins.display = display  # type: ignore[attr-defined]  # what guests expect to find there
        on_import("matplotlib.pyplot", self.take_over)

    # figures

    def take_over(self, pyplot: Any) -> None:
        """Make `show()` of figures show to the host, as there is no screen."""

        def show(*_: object, **__: object) -> None:
            self.show_figures()

        pyplot.show = show

    def show_figures(self) -> None:
        """Show every open figure, then close it, so that no figure is shown again after the cell."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
        if pyplot is None or helpers is None or not self._line.ours:
            return
        for manager in helpers.Gcf.get_all_fig_managers():
            self.show(manager.canvas.figure)
        pyplot.close("all")


def _is_figure(value: object) -> bool:
    figure: Any = sys.modules.get("matplotlib.figure")
    return figure is not None and isinstance(value, figure.Figure)


def _drawn(figure: Any) -> bytes:
    import io

    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


# ── the guest's own imports ───────────────────────────────────────────────────────────────────────


def on_import(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the module: now, or right after its own code has run."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _FigureFinder(name, then))


class _FigureFinder:
    """A finder that finds a single name."""

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
