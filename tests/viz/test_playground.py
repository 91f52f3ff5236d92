"""The parts of the playground that need no server: its address, its HTML, its errors."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.images import make_picture
from mctf.errors import MctfError
from mctf.models.loading import create
from mctf.viz import playground
from mctf.viz.inspection import Fusion, Inspector
from mctf.viz.playground import Settings, render

SPACE = Path(__file__).resolve().parents[2] / "examples" / "space"
CHOICES = {"models": ["embedded", "test_vit"], "photos": ["coffee", "lion"], "methods": ["ward", "mctf", "tome"]}


def test_the_address_holds_every_setting() -> None:
    query = {
        **{"model": "test_vit", "photo": "lion", "first": "tome", "second": "ward"},
        **{"flops": "0.7", "batch": "1", "block": "3", "__theme": "dark"},
    }
    assert Settings.from_query(query, **CHOICES) == Settings("test_vit", "lion", "tome", "ward", 0.7, 1, 3)
    assert Settings.from_query({}, **CHOICES) == Settings("embedded", "coffee")
    assert Settings.from_query({}, **{**CHOICES, "photos": []}).photo is None


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ({"first": "wrad"}, "the address has first='wrad': did you mean 'ward'?"),
        ({"model": "<b>"}, "the address has model='<b>': choose from embedded, test_vit"),
        ({"photo": "../secret"}, "the address has photo='../secret'"),
        ({"flops": "many"}, "flops='many' is no share"),
        ({"flops": "nan"}, "is no share"),
        ({"flops": "7"}, "is no share"),
        ({"flops": "0.1"}, "the address has flops=0.1: choose a share from 0.2 to 1"),
        ({"batch": "3"}, "the address has batch=3: choose from 1, 8"),
        ({"batch": "0"}, "the address has batch=0"),
        ({"block": "-1"}, "the address has block='-1'"),
        ({"block": "²"}, "the address has block='²'"),
    ],
)
def test_an_address_that_cannot_be_followed_is_refused(query: dict[str, str], complaint: str) -> None:
    with pytest.raises(MctfError) as caught:
        Settings.from_query(query, **CHOICES)
    assert complaint in str(caught.value)


def test_one_block_is_visible_and_text_is_escaped(monkeypatch) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'mctf[playground]'")
    monkeypatch.setattr("mctf.viz.inspection.class_labels", lambda model: ("<script>alert()</script>",) * 1000)
    inspector = Inspector({"test_vit": create("test_vit")}, device=torch.device("cpu"), rounds=1)
    seen = inspector.inspect(make_picture(0), model="test_vit", fusions=[Fusion("ward", 0.6), Fusion("mctf", 0.6)])
    depth = inspector.depth("test_vit")
    page = render(seen, block=2)
    assert page.count("<article") == 3
    assert page.count("<figure data-block=") == 3 * depth
    assert page.count(" hidden") == 3 * (depth - 1)
    assert page.count('<figure data-block="2">') == 3
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page
    assert f"{100 * seen.fused[0].share:.0f} %" in page
    assert f"{seen.fused[0].kl:.4f}" in page


def test_times_of_a_busy_machine_are_plain_and_marked() -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'mctf[playground]'")
    inspector = Inspector({"test_vit": create("test_vit")}, device=torch.device("cpu"), rounds=1)
    seen = inspector.inspect(make_picture(0), model="test_vit", fusions=[Fusion("ward", 0.6)])
    calm, busy = (render(replace(seen, busy=why), block=0) for why in (None, "the machine is busy (why)"))
    marks = ('<td class="uncertain">', ", busy machine</td>")
    assert [calm.count(mark) for mark in marks] == [0, 0]
    assert [busy.count(mark) for mark in marks] == [2, 2]
    assert "Time: the machine is busy (why)." in busy


def test_an_error_is_one_escaped_line() -> None:
    assert playground._error(MctfError("no <image>")) == '<p class="mctf-error" role="alert">no &lt;image&gt;</p>'


@pytest.mark.parametrize("keeps", [True, False])
def test_browsers_keep_nothing_also_where_gradio_has_no_option_for_it(keeps: bool) -> None:
    """Runs are kept by gradio 6.24 and later alone, which take run_history."""
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'mctf[playground]'")
    given: dict[str, Any] = {}

    class Page:
        def launch(self, **options: Any) -> tuple[None, str, None]:
            given.update(options)
            return None, "http://127.0.0.1:7860/", None

    class Keeping(Page):
        def launch(self, run_history: bool | None = None, **options: Any) -> tuple[None, str, None]:
            return super().launch(run_history=run_history, **options)

    assert playground.serve(Keeping() if keeps else Page()) == "http://127.0.0.1:7860/"
    assert given.get("run_history") is (False if keeps else None)
    assert ("run_history" in given) is keeps


def test_without_gradio_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(MctfError, match=r"pip install 'mctf\[playground\]'"):
        playground.build({"test_vit": create("test_vit")})


def test_the_space_names_the_gradio_that_is_pinned() -> None:
    header = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    facts = dict(line.split(": ", 1) for line in header.splitlines())
    assert facts["sdk"] == "gradio"
    assert f"gradio=={facts['sdk_version']}" in (SPACE.parents[1] / "constraints.txt").read_text().split()
    assert (SPACE / facts["app_file"]).is_file()
    assert len(facts["short_description"]) <= 60, "a limit of the hub"
