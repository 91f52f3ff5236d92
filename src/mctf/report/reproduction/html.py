"""Sections as HTML: semantic elements, captions on every table and picture, nothing that needs a network."""

import base64
import json
from itertools import groupby
from pathlib import Path

from .badges import badge
from .charts import draw
from .content import Chart, Finding, Part, Section, Strip, Table, Verdict, Viewer
from .markup import Markup, join, tag, void
from .tables import render_table

MARKS = {Verdict.AGREES: "✓", Verdict.DIFFERS: "≠", Verdict.CLOSE: "≈", Verdict.OPEN: "•"}
_WORDS = {
    Verdict.AGREES: "As in the paper: ",
    Verdict.DIFFERS: "Unlike the paper: ",
    Verdict.CLOSE: "Too close to call on these images: ",
    Verdict.OPEN: "",
}


def render_section(section: Section, pictures: Path) -> Markup:
    """One experiment. pictures: the folder its files lie in."""
    heading = f"{section.name}-heading"
    groups = [_render(part, f"{section.name}-{index}", pictures) for index, part in enumerate(section.parts)]
    return tag(
        "section",
        tag("h2", section.title, id=heading),
        tag("p", section.measures, " ", tag("span", section.source, class_="source"), class_="measures"),
        findings(section.findings),
        *_in_rows(section.parts, groups),
        tag("ul", *(tag("li", note) for note in section.notes), class_="notes") if section.notes else Markup(),
        id=section.name,
        aria_labelledby=heading,
    )


def findings(found: tuple[Finding, ...]) -> Markup:
    """A list of sentences, each marked by whether it is what the paper says."""
    items = (tag("li", *_judged(each), class_=each.verdict.value) for each in found)
    return tag("ul", *items, class_="findings") if found else Markup()


def _judged(finding: Finding) -> tuple[Markup, ...]:
    text = finding.text.replace(" ± ", "\u00a0±\u00a0")  # a number and its error stay on one line
    return (
        tag("span", MARKS[finding.verdict], class_="mark", aria_hidden="true"),
        tag("span", tag("span", _WORDS[finding.verdict], class_="unseen"), text),
    )


def _in_rows(parts: tuple[Part, ...], rendered: list[Markup]) -> list[Markup]:
    """Charts that follow each other share a row where there is room."""
    out: list[Markup] = []
    for charts, group in groupby(zip(parts, rendered, strict=True), key=lambda pair: isinstance(pair[0], Chart)):
        made = [markup for _, markup in group]
        out += [tag("div", *made, class_="charts")] if charts else made
    return out


def _render(part: Part, name: str, pictures: Path) -> Markup:
    if isinstance(part, Table):
        return render_table(part, name)
    if isinstance(part, Chart):
        caption = tag("figcaption", part.caption, " ", badge(part.origin))
        return tag("figure", caption, draw(part, name=name), class_="chart")
    if isinstance(part, Strip):
        return _strip(part, pictures)
    return _viewer(part, name, pictures)


def _strip(strip: Strip, pictures: Path) -> Markup:
    items = [
        tag(
            "figure",
            void("img", src=data_uri(pictures / each.file), alt=each.alt),
            tag("figcaption", each.caption),
        )
        for each in strip.pictures
    ]
    return tag("figure", tag("figcaption", strip.caption), tag("div", *items, class_="strip"), class_="strips")


def _viewer(viewer: Viewer, name: str, pictures: Path) -> Markup:
    block, place = viewer.start
    depth = len(viewer.tokens[0])
    block_id, place_id, output_id = f"{name}-block", f"{name}-r", f"{name}-output"
    controls = tag(
        "div",
        tag("label", "Block", for_=block_id),
        void("input", type="range", id=block_id, min=1, max=depth, value=block, step=1),
        tag("label", "r, tokens fused a block", for_=place_id),
        void("input", type="range", id=place_id, min=0, max=len(viewer.reductions) - 1, value=place, step=1),
        tag("output", id=output_id, for_=f"{block_id} {place_id}", aria_live="polite"),
        class_="controls",
    )
    shown = []
    for number, (image, original) in enumerate(zip(viewer.images, viewer.originals, strict=True), start=1):
        first = viewer.files[place][number - 1][block - 1]
        shown.append(
            tag(
                "figure",
                void("img", src=data_uri(pictures / original), alt=f"Image {number} as the model sees it"),
                void("img", src=data_uri(pictures / first), alt=f"Image {number}, fused", class_="fused"),
                tag("figcaption", f"Image {number}: {image}"),
            )
        )
    known = {
        "reductions": viewer.reductions,
        "tokens": viewer.tokens,
        "pictures": [[[data_uri(pictures / file) for file in blocks] for blocks in images] for images in viewer.files],
    }
    return tag(
        "figure",
        tag("figcaption", viewer.caption),
        controls,
        tag("noscript", tag("p", "The sliders need JavaScript; the pictures show the last block.")),
        tag("div", *shown, class_="viewer-images"),
        tag("script", Markup(json.dumps(known)), type="application/json", class_="viewer-data"),
        class_="viewer",
    )


def data_uri(path: Path) -> str:
    """A picture as an address that holds it."""
    return f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def contents(sections: tuple[Section, ...]) -> Markup:
    """Links to all sections."""
    items = (
        tag("li", tag("a", section.title, href=f"#{section.name}"), " ", tag("small", section.source))
        for section in sections
    )
    return join(tag("nav", tag("h2", "Contents", id="contents"), tag("ol", *items), aria_labelledby="contents"))
