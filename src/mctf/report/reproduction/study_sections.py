"""Sections about settings and what they do to answers: off the shelf, and the ablations."""

from ...analysis.reproduction import paper
from ...analysis.reproduction.criteria import ALL
from ...analysis.reproduction.experiment import Experiment, Result
from ...analysis.reproduction.studies import DEFAULTS, R
from .content import Column, Finding, Origin, Section, Table, number
from .study_parts import (
    FINE_TUNED,
    MEASURED,
    PUBLISHED_TOP1,
    Groups,
    Row,
    curves,
    grouped,
    knows_kl,
    lower_at_equal_cost,
    lower_everywhere,
    measured_cells,
    published_top1,
    side_by_side,
    study_section,
)
from .words import ATTENTION, BACKBONES, GROUPS, LABELS, METHODS, criteria_words

_OWN = ("bidirectional", "weighted_average", "approximated", "on")  # what the paper's method does


def off_the_shelf_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    table = side_by_side("MCTF and ToMe, measured here", groups, METHODS.__getitem__)
    parts = [table, *curves(groups, METHODS.__getitem__, what="method"), _published_off_the_shelf()]
    findings = _against_tome(groups) if knows_kl(result) else []
    return study_section(experiment, result, findings=findings, parts=parts)


def _against_tome(groups: Groups) -> list[Finding]:
    lower = lower_everywhere(groups["mctf"], groups["tome"])
    ours, theirs = (next(row["kl"] for row in groups[method] if row["r"] == R) for method in ("mctf", "tome"))
    figures = f"at r = {R} {number(ours, '.4f')} against {number(theirs, '.4f')}"
    findings = [Finding(f"MCTF's KL is {'' if lower else 'not '}below ToMe's at every r; {figures}.", lower)]
    equal = lower_at_equal_cost(groups["mctf"], groups["tome"])
    if equal is not None:
        words = "ToMe fuses in the first block too, so it costs less at the same r; at equal cost MCTF's KL is "
        findings.append(Finding(f"{words}{'' if equal else 'not always '}the lower one.", equal))
    return findings


def _published_off_the_shelf() -> Table:
    cases = [(backbone, method) for backbone in ("deit_tiny", "deit_small") for method in ("mctf", "tome")]
    titles = (Column(METHODS[method], Origin.PAPER, over=BACKBONES[backbone]) for backbone, method in cases)
    tops = [paper.off_the_shelf(backbone, method) for backbone, method in cases]
    rows = tuple((str(r), *(number(top[r], ".1f") for top in tops)) for r in tops[0])
    caption = "Table 3: top-1 % without training, on all of ImageNet's validation images"
    return Table(caption, (Column("r"), *titles), rows)


def criteria_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    at_r = {group: next(row for row in rows if row["r"] == R) for group, rows in groups.items()}
    rows = [
        (criteria_words(name), *measured_cells(row), published_top1("criteria", name)) for name, row in at_r.items()
    ]
    columns = (Column("criteria", text=True), *MEASURED, PUBLISHED_TOP1)
    strong = frozenset(index for index, name in enumerate(at_r) if name == ALL)
    table = Table(f"Subsets of the criteria at r = {R}", columns, tuple(rows), strong)
    parts = [table, *curves(groups, criteria_words, what="set of criteria")]
    findings = _best_criteria(at_r) if knows_kl(result) else []
    return study_section(experiment, result, findings=findings, parts=parts, notes=[FINE_TUNED])


def _best_criteria(at_r: dict[str, Row]) -> list[Finding]:
    best = min(at_r, key=lambda name: at_r[name]["kl"])
    alone = min(("sim", "info"), key=lambda name: at_r[name]["kl"])
    return [
        Finding(f"Lowest KL at r = {R}: {criteria_words(best)}{_figures(at_r[best], at_r[ALL])}.", best == ALL),
        Finding(f"Of similarity and informativeness alone, {criteria_words(alone)} loses less.", alone == "sim"),
    ]


def _figures(best: Row, own: Row) -> str:
    """The lowest KL, and that of the paper's choice where it is another."""
    chosen = "" if best is own else f"; the paper's choice has {number(own['kl'], '.4f')}"
    return f", {number(best['kl'], '.4f')}{chosen}"


def ahead_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    table = side_by_side("One-step-ahead attention and that of the block before", groups, ATTENTION.__getitem__)
    lower = lower_at_equal_cost(groups["one_step_ahead"], groups["previous"]) if knows_kl(result) else None
    text = f"At equal cost the coming attention {'gives' if lower else 'does not always give'} the lower KL."
    return study_section(
        experiment,
        result,
        findings=[] if lower is None else [Finding(text, lower)],
        parts=[table, *curves(groups, ATTENTION.__getitem__, what="kind of attention")],
        notes=[
            "With the attention of the block before, tokens are fused after its MLP, which costs more at the same r.",
            "The paper shows this as a plot of a fine-tuned DeiT-S, without figures.",
        ],
    )


def design_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    rows: list[tuple[str, ...]] = []
    strong, headings = set(), dict[int, str]()
    for group, members in groups.items():
        for row in members:
            if row is members[0]:
                headings[len(rows)] = GROUPS[group].capitalize()
            strong |= {len(rows)} if row["label"] in _OWN else set()
            printed = paper.ablation(group, row["label"])
            gflops = number(None if printed is None else printed.gflops, ".1f")
            top1 = published_top1(group, row["label"])
            rows.append((LABELS[row["label"]], *measured_cells(row), gflops, top1))
    columns = (Column("variant", text=True), *MEASURED, Column("GFLOPs", Origin.PAPER), PUBLISHED_TOP1)
    caption = f"Design choices at r = {R}; the paper's own are in bold"
    table = Table(caption, columns, tuple(rows), frozenset(strong), headings)
    findings = [_best_choice(group, members) for group, members in groups.items()] if knows_kl(result) else []
    return study_section(experiment, result, findings=findings, parts=[table], notes=[FINE_TUNED])


def _best_choice(group: str, members: list[Row]) -> Finding:
    """The variant of lowest KL, and whether the paper has none of higher accuracy; open where it does not have it."""
    lowest, own = min(members, key=lambda row: row["kl"]), next(row for row in members if row["label"] in _OWN)
    best = lowest["label"]
    text = f"{GROUPS[group].capitalize()}: lowest KL {LABELS[best]}{_figures(lowest, own)}."
    printed = {row["label"]: each.top1 for row in members if (each := paper.ablation(group, row["label"])) is not None}
    return Finding(text, printed[best] == max(printed.values()) if best in printed else None)


def temperatures_section(experiment: Experiment, result: Result) -> Section:
    findings, rows = [], list[tuple[str, ...]]()
    strong, headings = set(), dict[int, str]()
    for group, members in grouped(result).items():
        own = next(row for row in members if row["label"] == DEFAULTS[group])
        headings[len(rows)] = GROUPS[group].capitalize()
        strong.add(len(rows) + members.index(own))
        rows += [(row["label"], *measured_cells(row)[:3], published_top1(group, row["label"])) for row in members]
        if knows_kl(result):
            best = min(members, key=lambda row: row["kl"])
            text = f"{GROUPS[group].capitalize()}: lowest KL at {best['label']}{_figures(best, own)}."
            findings.append(Finding(text, best is own))
    columns = (Column("value", text=True), *MEASURED[:3], PUBLISHED_TOP1)
    caption = f"Temperatures at r = {R}; the defaults are in bold"
    table = Table(caption, columns, tuple(rows), frozenset(strong), headings)
    return study_section(experiment, result, findings=findings, parts=[table], notes=[FINE_TUNED])
