"""Sections about settings and what they do to answers: off the shelf, and the ablations."""

from collections.abc import Callable, Sequence
from typing import Any

from ...analysis.reproduction import paper
from ...analysis.reproduction.criteria import ALL
from ...analysis.reproduction.experiment import Experiment, Result
from ...analysis.reproduction.studies import DEFAULTS, R
from .content import Chart, Column, Finding, Origin, Part, Section, Series, Table, number
from .words import ATTENTION, GROUPS, LABELS, METHODS, criteria_words

Row = dict[str, Any]

_MEASURED = (
    Column("KL", Origin.MEASURED),
    Column("agreement %", Origin.MEASURED),
    Column("top-1 %", Origin.MEASURED),
    Column("GFLOPs", Origin.MEASURED),
)
_FINE_TUNED = "The paper's accuracy is of a fine-tuned DeiT-S on all of ImageNet's validation images."


def _cells(row: Row) -> tuple[str, ...]:
    return (
        number(row["kl"], ".4f"),
        number(row["agreement"], ".1f"),
        number(row["top1"], ".1f"),
        number(row["gflops"]),
    )


def _section(experiment: Experiment, result: Result, findings: Sequence[Finding], parts: Sequence[Part], *notes: str) -> Section:
    base = result["base"]
    plain = f"On {result['images']} images, no weight trained. The plain model costs {base['gflops']:.2f} GFLOPs"
    plain += "." if base["top1"] is None else f" and has a top-1 of {base['top1']:.1f} %."
    known = "" if base["top1"] is None or result["images"] > 5000 else f" One image is {100 / result['images']:.2g} points of top-1."
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        tuple(findings),
        tuple(parts),
        (plain + known, *notes, *result["notes"]),
    )


def _groups(result: Result) -> dict[str, list[Row]]:
    """Rows by group, in order."""
    groups: dict[str, list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row)
    return groups


def _curve(
    groups: dict[str, list[Row]], names: Callable[[str], str], field: str, y: str, caption: str, summary: str
) -> list[Part]:
    """A chart of a measured number against GFLOPs, one line a group; nothing where it is unknown."""
    series = []
    for group, rows in groups.items():
        if len(rows) > 1 and all(row[field] is not None for row in rows):
            series.append(Series(names(group), tuple(sorted((row["gflops"], row[field]) for row in rows))))
    return [Chart(caption, summary, Origin.MEASURED, "GFLOPs", y, tuple(series))] if series else []


def _always_lower(better: list[Row], worse: list[Row]) -> bool:
    return all(one["kl"] < other["kl"] for one, other in zip(better, worse, strict=True))


def off_the_shelf_section(experiment: Experiment, result: Result) -> Section:
    groups = _groups(result)
    findings = []
    if result["base"]["kl"] is not None:
        lower = _always_lower(groups["mctf"], groups["tome"])
        words = "at every r" if lower else "not at every r"
        findings.append(Finding(f"MCTF's KL is below ToMe's {words}. ToMe also fuses in the first block and costs less at the same r.", lower))
    rows = []
    for group, members in groups.items():
        rows += [(METHODS[group], row["label"], *_cells(row)) for row in members]
    table = Table("MCTF and ToMe, measured here", (Column("method", text=True), Column("r"), *_MEASURED), tuple(rows))
    charts = [
        *_curve(groups, METHODS.__getitem__, "top1", "top-1 %", "Accuracy against cost, not trained", "One line a method; fewer GFLOPs mean a larger r."),
        *_curve(groups, METHODS.__getitem__, "kl", "KL to the plain model", "KL against cost, not trained", "One line a method; lower is nearer to the plain model."),
    ]
    return _section(experiment, result, findings, [table, *charts, _published_off_the_shelf()])


def _published_off_the_shelf() -> Table:
    backbones = (("deit_tiny", "DeiT-T"), ("deit_small", "DeiT-S"))
    cases = [(name, backbone, method) for backbone, name in backbones for method in ("mctf", "tome")]
    columns = (Column("r"), *(Column(f"{name}, {METHODS[method]}", Origin.PAPER) for name, _, method in cases))
    tops = [paper.off_the_shelf(backbone, method) for _, backbone, method in cases]
    rows = tuple((str(r), *(number(top[r], ".1f") for top in tops)) for r in tops[0])
    return Table("Table 3: top-1 % without training, on all of ImageNet's validation images", columns, rows)


def criteria_section(experiment: Experiment, result: Result) -> Section:
    groups = _groups(result)
    at_r = {group: next(row for row in rows if row["r"] == R) for group, rows in groups.items()}
    findings = []
    if result["base"]["kl"] is not None:
        best = min(at_r, key=lambda group: at_r[group]["kl"])
        single = at_r["sim"]["kl"] < at_r["info"]["kl"]
        findings = [
            Finding(f"Lowest KL at r = {R}: {criteria_words(best)}.", best == ALL),
            Finding(f"Of similarity and informativeness alone, {'similarity' if single else 'informativeness'} loses less.", single),
        ]
    rows = []
    for group, row in at_r.items():
        published = paper.ablation("criteria", group)
        rows.append((criteria_words(group), *_cells(row), number(published and published.top1, ".1f")))
    columns = (Column("criteria", text=True), *_MEASURED, Column("top-1 %", Origin.PAPER))
    strong = frozenset(index for index, group in enumerate(at_r) if group == ALL)
    parts: list[Part] = [Table(f"Subsets of the criteria at r = {R}", columns, tuple(rows), strong)]
    parts += _curve(groups, criteria_words, "kl", "KL to the plain model", "KL against cost by criteria", "One line a set of criteria; lower is nearer to the plain model.")
    parts += _curve(groups, criteria_words, "top1", "top-1 %", "Accuracy against cost by criteria", "One line a set of criteria.")
    return _section(experiment, result, findings, parts, _FINE_TUNED)


def ahead_section(experiment: Experiment, result: Result) -> Section:
    groups = _groups(result)
    findings = []
    if result["base"]["kl"] is not None:
        lower = _always_lower(groups["one_step_ahead"], groups["previous"])
        words = "at every r" if lower else "not at every r"
        findings.append(Finding(f"The coming attention gives the lower KL {words}.", lower))
    rows = []
    for group, members in groups.items():
        rows += [(ATTENTION[group], row["label"], *_cells(row)) for row in members]
    columns = (Column("informativeness from", text=True), Column("r"), *_MEASURED)
    parts: list[Part] = [Table("One-step-ahead attention and that of the block before", columns, tuple(rows))]
    parts += _curve(groups, ATTENTION.__getitem__, "kl", "KL to the plain model", "KL against cost by attention", "Two lines; lower is nearer to the plain model.")
    note = "The paper shows this as a plot of a fine-tuned DeiT-S, without figures."
    return _section(experiment, result, findings, parts, note)


def design_section(experiment: Experiment, result: Result) -> Section:
    findings, rows, strong = [], [], set()
    for group, members in _groups(result).items():
        if result["base"]["kl"] is not None:
            findings.append(_best_of(group, members))
        for row in members:
            published = paper.ablation(group, row["label"])
            if row["label"] in ("bidirectional", "weighted_average", "approximated", "on"):
                strong.add(len(rows))
            own = (GROUPS[group], LABELS[row["label"]], *_cells(row))
            rows.append((*own, number(published and published.gflops, ".1f"), number(published and published.top1, ".1f")))
    columns = (
        Column("choice", text=True),
        Column("variant", text=True),
        *_MEASURED,
        Column("GFLOPs", Origin.PAPER),
        Column("top-1 %", Origin.PAPER),
    )
    table = Table(f"Design choices at r = {R}; the paper's own are in bold", columns, tuple(rows), frozenset(strong))
    return _section(experiment, result, findings, [table], _FINE_TUNED)


def _best_of(group: str, members: list[Row]) -> Finding:
    """The variant of lowest KL, and whether the paper finds none better among those it has."""
    best = min(members, key=lambda row: row["kl"])
    text = f"{GROUPS[group].capitalize()}: lowest KL {LABELS[best['label']]}."
    accuracies = {row["label"]: each.top1 for row in members if (each := paper.ablation(group, row["label"]))}
    if best["label"] not in accuracies:
        return Finding(text)
    return Finding(text, accuracies[best["label"]] == max(accuracies.values()))


def temperatures_section(experiment: Experiment, result: Result) -> Section:
    groups = _groups(result)
    findings, parts = [], []
    for group, members in groups.items():
        if result["base"]["kl"] is not None:
            best = min(members, key=lambda row: row["kl"])["label"]
            text = f"{GROUPS[group].capitalize()}: lowest KL at {best}; the paper takes {DEFAULTS[group]}."
            findings.append(Finding(text, best == DEFAULTS[group]))
        rows = []
        for row in members:
            published = paper.ablation(group, row["label"])
            rows.append((row["label"], *_cells(row)[:3], number(published and published.top1, ".1f")))
        columns = (Column("temperature"), *_MEASURED[:3], Column("top-1 %", Origin.PAPER))
        strong = frozenset(index for index, row in enumerate(members) if row["label"] == DEFAULTS[group])
        parts.append(Table(f"{GROUPS[group].capitalize()}; the default is in bold", columns, tuple(rows), strong))
    return _section(experiment, result, findings, parts, _FINE_TUNED)
