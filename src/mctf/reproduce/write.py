"""The report on disk: the page, Markdown and JSON, each complete or not there."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._utils import atomic_write
from .catalogue import EXPERIMENTS, sections
from .markdown import render_markdown
from .page import Report, render_page
from .records import Record
from .runner import Result

PICTURES = "pictures"


def publish(
    folder: Path, records: Mapping[str, Record], *, facts: Mapping[str, str], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Write index.html, report.md and report.json from what is known, and give the JSON object.

    facts: by heading. left_out: reasons by the name of an experiment.
    """
    titles = {each.name: each.title for each in EXPERIMENTS}
    reasons = {titles[name]: reason for name, reason in left_out.items()}
    report = Report(facts, sections(records), reasons)
    known = as_json(report, records)
    pages = {
        "index.html": render_page(report, folder / PICTURES),
        "report.md": render_markdown(report, PICTURES),
        "report.json": json.dumps(known, indent=1) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        atomic_write(folder / name, text.encode())
    return known


def as_json(report: Report, records: Mapping[str, Record]) -> dict[str, Any]:
    """Facts, and for every experiment its findings and its numbers; those of single images stay with the results."""
    experiments = {}
    for section in report.sections:
        experiments[section.name] = {
            "title": section.title,
            "measures": section.measures,
            "source": section.source,
            "findings": [asdict(finding) for finding in section.findings],
            **asdict(records[section.name]),
            "result": _in_short(records[section.name].result),
        }
    return {"facts": dict(report.facts), "experiments": experiments, "left_out": dict(report.left_out)}


def _in_short(result: Result) -> Result:
    """The result of a study without what it keeps of single images, which is most of it."""
    if "base" not in result:
        return result
    base, *rows = ({name: row[name] for name in row if name != "by_image"} for row in (result["base"], *result["rows"]))
    return {**result, "base": base, "rows": rows}
