"""Rich outputs of common libraries in a cell, without a screen and without any support for Ringfence in them."""

from __future__ import annotations

import json

import pytest

from ringfence import Limits, Policy, Sandbox

pytestmark = pytest.mark.everywhere

ROOM = Policy(limits=Limits(memory="1G", timeout_s=60, processes=64))
PNG = b"\x89PNG\r\n\x1a\n"


def test_pandas_tables_figures_and_plotly_in_one_session() -> None:
    with Sandbox(policy=ROOM) as box:
        box.run("import pandas as pd\ndf = pd.DataFrame({'k': ['a', 'b'], 'v': [1, 2]})").check()
        (table,) = box.run("df").check().outputs
        assert table.is_value
        assert table.text == "   k  v\n0  a  1\n1  b  2"
        assert "<table" in (table.html or "")

        box.run("import matplotlib.pyplot as plt").check()
        drawn = box.run("plt.plot([1, 4, 9]); plt.title('one')\nplt.figure(); plt.plot([1])\nNone").check()
        assert [(o.is_value, (o.png or b"")[:8]) for o in drawn.outputs] == [(False, PNG), (False, PNG)]
        assert box.run("1").check().outputs[0].text == "1", "a figure is shown once"
        shown = box.run("fig, ax = plt.subplots(); ax.plot([1, 2]); plt.show(); print('after')").check()
        assert ([(o.png or b"")[:8] for o in shown.outputs], shown.stdout) == ([PNG], "after\n")

        box.run("import plotly.graph_objects as go").check()
        (figure,) = box.run("display(go.Figure(go.Scatter(x=[1, 2], y=[3, 4])))").check().outputs
        data = json.loads(figure.data["application/vnd.plotly.v1+json"])
        assert (data["data"][0]["type"], "layout" in data) == ("scatter", True)


TOO_MUCH = """
class Large:
    def __repr__(self): return "text"
    def _repr_html_(self): return "h" * (9 << 20)
    def _repr_markdown_(self): return "small"
class Many:
    def __repr__(self): return "text"
    def _repr_mimebundle_(self): return {f"a/{number}": "x" for number in range(40)}
"""


def test_what_is_too_large_or_too_much_to_show_is_left_out_and_the_session_goes_on() -> None:
    with Sandbox(policy=ROOM) as box:
        box.run(TOO_MUCH).check()
        (large,) = box.run("Large()").check().outputs
        assert large.data == {"text/plain": b"text", "text/markdown": b"small"}
        (many,) = box.run("Many()").check().outputs
        assert many.data == {"text/plain": b"text", **{f"a/{number}": b"x" for number in range(16)}}
        assert box.run("1").value == "1"


def test_a_value_that_is_cut_says_so() -> None:
    with Sandbox(policy=ROOM) as box:
        value = box.run("'x' * 70_000").check().value
        assert value == f"'{'x' * 65_535}… (4,466 more characters)"


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_objects_beyond_the_most_of_a_cell_are_printed_and_the_session_goes_on(language: str) -> None:
    """The host closes a line with too much output (F16), and the guest's variables would be lost."""
    show = {
        "python": "x = 5\nfor i in range(21000): display(i)\n'last'",
        "javascript": "var x = 5; for (let i = 0; i < 21000; i++) display(i); 'last'",
    }[language]
    with Sandbox() as box:
        result = box.run(show, language=language)
        assert (result.status, result.value) == ("ok", "'last'")
        assert len(result.outputs) == (1 << 14) + 1
        assert result.stdout == "".join(f"{i}\n" for i in range(1 << 14, 21000))
        assert box.run("display(x); x", language=language).value == "5"
