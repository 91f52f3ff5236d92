"""Sections about settings and their predictions: MCTF and ToMe without training, and the ablations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._utils import format_blocks, plural
from ..evaluation.significance import Difference
from . import paper
from .display_names import ATTENTION, BACKBONES, GROUPS, LABELS, METHODS, criteria_label
from .document import Chart, Column, Finding, Origin, Part, Section, Series, Table, number
from .runner import Experiment
from .studies import ALL, DEFAULTS, R, StudyResult, StudyRow
from .verdicts import compare_kl, describe_lead, describe_leads, judge, kl_lead, kl_leads_at_equal_cost, weakest

_MEASURED = (
    Column("KL", Origin.MEASURED),
    Column("agreement %", Origin.MEASURED),
    Column("top-1 %", Origin.MEASURED),
    Column("GFLOPs", Origin.COUNTED),
)
_PUBLISHED_TOP1 = Column("top-1 %", Origin.PAPER)
_FINE_TUNED = "The paper's accuracy is of a fine-tuned DeiT-S on all of ImageNet's validation images."
_OWN = ("bidirectional", "weighted_average", "approximated", "on")  # the paper's design choices
_MANY = 5000  # images from which one of them no longer shows in a percentage


def off_the_shelf_section(experiment: Experiment, result: StudyResult) -> Section:
    groups = result.groups
    findings = []
    if result.has_kl:
        pairs = zip(groups["mctf"], groups["tome"], strict=True)
        leads = {mctf.label: kl_lead(mctf, tome) for mctf, tome in pairs}
        mctf, tome = (next(row.kl for row in groups[method] if row.r == R) for method in ("mctf", "tome"))
        at_r = f"at r = {R} it is {describe_lead(leads[str(R)])}, {number(mctf, '.4f')} against {number(tome, '.4f')}"
        text = f"MCTF's KL against ToMe's: {describe_leads(leads)}; {at_r}."
        findings = [Finding(text, judge(leads[weakest(leads)]))]
        findings += _at_equal_cost("MCTF's KL against ToMe's", kl_leads_at_equal_cost(groups["mctf"], groups["tome"]))
    cases = [(backbone, method) for backbone in ("deit_tiny", "deit_small") for method in ("mctf", "tome")]
    top1 = [paper.off_the_shelf(backbone, method) for backbone, method in cases]
    published = Table(
        "Table 3: top-1 % without training, on all of ImageNet's validation images",
        (
            Column("r"),
            *(Column(METHODS[method], Origin.PAPER, over=BACKBONES[backbone]) for backbone, method in cases),
        ),
        tuple((str(r), *(number(each[r], ".1f") for each in top1)) for r in top1[0]),
    )
    table = _side_by_side("MCTF and ToMe, measured here", groups, METHODS.__getitem__)
    return _study_section(
        experiment,
        result,
        findings=findings,
        parts=[table, *_curves(groups, METHODS.__getitem__, what="method"), published],
        notes=["ToMe also fuses in the first block, so it costs less at the same r."],
    )


def criteria_section(experiment: Experiment, result: StudyResult) -> Section:
    groups = result.groups
    at_r = {group: next(row for row in rows if row.r == R) for group, rows in groups.items()}
    rows = [
        (criteria_label(name), *_measured_cells(row), _published_top1("criteria", name)) for name, row in at_r.items()
    ]
    columns = (Column("criteria", text=True), *_MEASURED, _PUBLISHED_TOP1)
    strong = frozenset(index for index, name in enumerate(at_r) if name == ALL)
    table = Table(f"Subsets of the criteria at r = {R}", columns, tuple(rows), strong)
    findings = []
    if result.has_kl:
        others = {criteria_label(name): row for name, row in at_r.items() if name != ALL}
        alone = compare_kl(criteria_label("sim"), at_r["sim"], {criteria_label("info"): at_r["info"]})
        findings = [
            compare_kl(f"At r = {R} {criteria_label(ALL)}", at_r[ALL], others),
            Finding(f"Alone, {alone.text}", alone.verdict),
        ]
    parts: list[Part] = [table, *_curves(groups, criteria_label, what="set of criteria")]
    return _study_section(experiment, result, findings=findings, parts=parts, notes=[_FINE_TUNED])


def one_step_ahead_section(experiment: Experiment, result: StudyResult) -> Section:
    groups = result.groups
    table = _side_by_side("One-step-ahead attention and that of the previous block", groups, ATTENTION.__getitem__)
    leads = kl_leads_at_equal_cost(groups["one_step_ahead"], groups["previous"]) if result.has_kl else {}
    return _study_section(
        experiment,
        result,
        findings=_at_equal_cost("KL with one-step-ahead attention against that of the previous block", leads),
        parts=[table, *_curves(groups, ATTENTION.__getitem__, what="kind of attention")],
        notes=[
            "With the attention of the previous block, tokens are fused after its MLP, which costs more at the same r.",
            "The paper shows this as a plot of a fine-tuned DeiT-S, without figures.",
        ],
    )


def design_section(experiment: Experiment, result: StudyResult) -> Section:
    rows: list[tuple[str, ...]] = []
    strong, headings = set(), dict[int, str]()
    findings: list[Finding] = []
    for group, members in result.groups.items():
        headings[len(rows)] = GROUPS[group].capitalize()
        for row in members:
            if row.label in _OWN:
                strong.add(len(rows))
            printed = paper.ablation(group, row.label)
            gflops = number(None if printed is None else printed.gflops, ".1f")
            rows.append((LABELS[row.label], *_measured_cells(row), gflops, _published_top1(group, row.label)))
        findings += _design_findings(group, members) if result.has_kl else ()
    columns = (Column("variant", text=True), *_MEASURED, Column("GFLOPs", Origin.PAPER), _PUBLISHED_TOP1)
    caption = f"Design choices at r = {R}; the paper's own are in bold"
    table = Table(caption, columns, tuple(rows), frozenset(strong), headings)
    return _study_section(experiment, result, findings=findings, parts=[table], notes=[_FINE_TUNED])


def _design_findings(group: str, members: Sequence[StudyRow]) -> Iterator[Finding]:
    """The paper's choice against the variants that the paper reports; then, without verdict, against the others."""
    own = next(row for row in members if row.label in _OWN)
    subject = f"{GROUPS[group].capitalize()}: {LABELS[own.label]}"
    rivals = {LABELS[row.label]: row for row in members if row is not own}
    published = {name: row for name, row in rivals.items() if paper.ablation(group, row.label) is not None}
    if published:
        yield compare_kl(subject, own, published)
    for name, row in rivals.items():
        if name not in published:
            yield Finding(compare_kl(subject, own, {name: row}).text)


def temperatures_section(experiment: Experiment, result: StudyResult) -> Section:
    findings, rows = [], list[tuple[str, ...]]()
    strong, headings = set(), dict[int, str]()
    for group, members in result.groups.items():
        own = next(row for row in members if row.label == DEFAULTS[group])
        headings[len(rows)] = GROUPS[group].capitalize()
        strong.add(len(rows) + members.index(own))
        rows += [(row.label, *_measured_cells(row)[:3], _published_top1(group, row.label)) for row in members]
        if result.has_kl:
            rivals = {row.label: row for row in members if row is not own}
            findings.append(compare_kl(f"{GROUPS[group].capitalize()}: {own.label}", own, rivals))
    columns = (Column("value", text=True), *_MEASURED[:3], _PUBLISHED_TOP1)
    caption = f"Temperatures at r = {R}; the defaults are in bold"
    table = Table(caption, columns, tuple(rows), frozenset(strong), headings)
    return _study_section(experiment, result, findings=findings, parts=[table], notes=[_FINE_TUNED])


SECTIONS: dict[str, Callable[[Experiment, Any], Section]] = {
    "off_the_shelf": off_the_shelf_section,
    "criteria": criteria_section,
    "one_step_ahead": one_step_ahead_section,
    "design": design_section,
    "temperatures": temperatures_section,
}


def _study_section(
    experiment: Experiment,
    result: StudyResult,
    *,
    findings: Iterable[Finding],
    parts: Iterable[Part],
    notes: Iterable[str],
) -> Section:
    """A section with notes on the baseline, the number of images and missing numbers."""
    base, images = result.base, result.images
    first = f"On {plural(images, 'image')}, no weight trained. The baseline costs {base.gflops:.2f} GFLOPs"
    first += "." if base.top1 is None else f" and has a top-1 of {base.top1:.1f} %."
    if base.top1 is not None and images < _MANY:
        first += f" One image is {100 / images:.1f} points of top-1."
    last = [] if result.has_kl else ["The model has no classifier: agreement, KL and accuracy are not available."]
    for capped in result.capped:
        blocks = format_blocks(capped.blocks)
        last.append(
            f"{METHODS[capped.method]} at r = {capped.r} is capped (too few tokens) in {blocks}, counted from 1."
        )
    return Section.of(experiment, findings=findings, parts=parts, notes=[first, *notes, *last])


def _measured_cells(row: StudyRow) -> tuple[str, ...]:
    """The cells of the columns _MEASURED."""
    return number(row.kl, ".4f"), number(row.agreement, ".1f"), number(row.top1, ".1f"), number(row.gflops)


def _published_top1(study: str, setting: str) -> str:
    published = paper.ablation(study, setting)
    return number(None if published is None else published.top1, ".1f")


def _side_by_side(caption: str, groups: Mapping[str, Sequence[StudyRow]], label: Callable[[str], str]) -> Table:
    """One row per r, and for each measured number one column per group."""
    columns = [Column(label(group), column.origin, over=column.title) for column in _MEASURED for group in groups]
    rows = []
    for members in zip(*groups.values(), strict=True):
        cells = [_measured_cells(row) for row in members]
        rows.append((members[0].label, *(each[index] for index in range(len(_MEASURED)) for each in cells)))
    return Table(caption, (Column("r"), *columns), tuple(rows))


def _curves(groups: Mapping[str, Sequence[StudyRow]], label: Callable[[str], str], *, what: str) -> list[Chart]:
    """KL and top-1 against GFLOPs where available, one line per group. what: a group, in one word."""
    charts = []
    for field, y, title, better in (
        ("kl", "KL to the baseline, nats", "KL", "lower is closer to the baseline"),
        ("top1", "top-1 %", "Accuracy", "higher is better"),
    ):
        series = [
            Series(label(group), tuple(sorted((row.gflops, getattr(row, field)) for row in rows)))
            for group, rows in groups.items()
            if len(rows) > 1 and all(getattr(row, field) is not None for row in rows)
        ]
        if series:
            summary = f"One line per {what}; fewer GFLOPs mean a larger r; {better}."
            caption = f"{title} against cost by {what}"
            charts.append(Chart(caption, summary, Origin.MEASURED, "GFLOPs", y, tuple(series)))
    return charts


def _at_equal_cost(subject: str, leads: Mapping[str, Difference]) -> list[Finding]:
    """subject: the two that are compared, the one that the paper has ahead first. leads: by its r."""
    if not leads:
        return []
    r = weakest(leads)
    least = f"r = {r} supports the paper least, {describe_lead(leads[r])}"
    return [Finding(f"{subject} at equal cost: {describe_leads(leads)}; {least}.", judge(leads[r]))]
