"""The whole page in one file: style, script, charts and pictures are inside, and it may load nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from . import paper
from .document import Origin, Section, Verdict
from .html import MARKS, badge, contents, findings, render_section
from .markup import Markup, tag, void

TITLE = "Multi-criteria Token Fusion, measured again"
# The browser itself sees to it that nothing is fetched.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Report:
    """facts: what was measured and how, by heading. left_out: why experiments are missing, by their title."""

    facts: Mapping[str, str]
    sections: tuple[Section, ...]
    left_out: Mapping[str, str]


def render_page(report: Report, pictures: Path) -> str:
    """The report as HTML. pictures: the folder that the sections' files lie in."""
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        tag("title", TITLE),
        void("link", rel="icon", href="data:,"),
        tag("style", _own("page.css")),
    )
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#results", class_="skip"),
        _header(report.facts),
        contents(report.sections),
        tag(
            "main",
            _summary(report),
            *(render_section(section, pictures) for section in report.sections),
            _left_out(report.left_out),
            id="results",
        ),
        tag("footer", tag("p", paper.origin())),
        tag("script", _own("page.js")),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _header(facts: Mapping[str, str]) -> Markup:
    legend = tag(
        "ul",
        tag("li", badge(Origin.MEASURED), " run on the images below"),
        tag("li", badge(Origin.COUNTED), " worked out from the model's shapes"),
        tag("li", badge(Origin.PAPER), " as printed in the paper, not measured here"),
        class_="origins",
    )
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    return tag(
        "header",
        tag("h1", TITLE),
        tag("p", "The tables and figures of Lee, Choi and Kim (CVPR 2024), as far as they can be measured here."),
        legend,
        tag("dl", *rows, class_="facts"),
    )


def _summary(report: Report) -> Markup:
    rows = [
        tag("li", tag("a", section.title, href=f"#{section.name}"), findings(section.findings))
        for section in report.sections
        if section.findings
    ]
    if not rows:
        return Markup()
    heading = tag("h2", "In short", id="summary-heading")
    listed = tag("ul", *rows, class_="summary")
    counted = tag("p", tally(report), class_="measures")
    return tag("section", heading, counted, listed, id="summary", aria_labelledby="summary-heading")


def tally(report: Report) -> str:
    """How many findings are as in the paper, which also says what their marks mean."""
    judged = [finding.verdict for section in report.sections for finding in section.findings]
    agree, differ, close = (judged.count(each) for each in (Verdict.AGREES, Verdict.DIFFERS, Verdict.CLOSE))
    return (
        f"Of {agree + differ + close} findings that can be compared, {agree} are as in the paper "
        f"({MARKS[Verdict.AGREES]}), {differ} are not ({MARKS[Verdict.DIFFERS]}) and {close} are too close to call on "
        f"these images ({MARKS[Verdict.CLOSE]}): a difference counts from two standard errors (±) on."
        + (f" The others ({MARKS[Verdict.OPEN]}) are not in the paper." if Verdict.OPEN in judged else "")
    )


def _left_out(reasons: Mapping[str, str]) -> Markup:
    if not reasons:
        return Markup()
    rows = [tag("li", f"{title}: {reason}.") for title, reason in reasons.items()]
    heading = tag("h2", "Not measured", id="left-out-heading")
    return tag("section", heading, tag("ul", *rows), aria_labelledby="left-out-heading")


def _own(name: str) -> Markup:
    return Markup((files("mctf") / "reproduce" / name).read_text(encoding="utf-8"))
