"""Sections about cost: Tables 1 and 2, Tables C to E, and the paper's accuracy against its GFLOPs."""

from . import paper
from .costs import Counted, agrees, far_off
from .document import Chart, Column, Finding, Origin, Part, Section, Series, Table, Verdict, number
from .labels import BACKBONES, METHODS
from .runner import Experiment, Result

_TRAINING = {"finetuned": "fine-tuned", "off_the_shelf": "not trained"}


def table_section(experiment: Experiment, result: Result) -> Section:
    """Table 1 or 2: what was counted beside what was printed, and the paper's accuracy in a column of its own."""
    rows = [(paper.Published(**row["paper"]), Counted(**row["counted"])) for row in result["rows"]]
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        (_finding(rows),),
        (_table(rows), *(_accuracy_charts() if "Figure 1" in experiment.sources else ())),
        (
            "Counted at each method's published setting, in the paper's account: one FLOP a multiply-add. "
            "PVT, CoaT, Swin and PoolFormer are counted by torch on tensors without memory.",
            "Accuracy is the paper's, after fine-tuning where a method does; it is not measured here.",
        ),
    )


def _finding(rows: list[tuple[paper.Published, Counted]]) -> Finding:
    verdicts = [(row, counted, agrees(row, counted)) for row, counted in rows]
    judged = [verdict for _, _, verdict in verdicts if verdict is not None]
    text = f"{sum(judged)} of {len(judged)} rows have the paper's GFLOPs to 0.1 and its parameters as printed"
    off = [f"{_row_name(row)} ({counted.gflops:.2f})" for row, counted, verdict in verdicts if verdict is False]
    text += f"; not {', '.join(off)}" if off else ""
    open_ = len(rows) - len(judged)
    text += f". {open_} cannot be compared: the last column says why." if open_ else "."
    return Finding(text, Verdict.AGREES if all(judged) else Verdict.DIFFERS)


def _row_name(row: paper.Published) -> str:
    backbone = BACKBONES[row.backbone]
    return backbone if row.method == "base" else f"{METHODS[row.method]} on {backbone}"


def _table(rows: list[tuple[paper.Published, Counted]]) -> Table:
    columns = (
        Column("model", text=True),
        Column("r", Origin.COUNTED),
        Column("", Origin.COUNTED, over="GFLOPs"),
        Column("", Origin.PAPER, over="GFLOPs"),
        Column("", Origin.COUNTED, over="parameters, M"),
        Column("", Origin.PAPER, over="parameters, M"),
        Column("top-1 %", Origin.PAPER),
        Column("note", text=True),
    )
    cells = tuple(_cells(row, counted) for row, counted in rows)
    strong = frozenset(index for index, (row, _) in enumerate(rows) if row.method == "mctf")
    return Table(f"Table {rows[0][0].table}: cost counted here beside the paper's figures", columns, cells, strong)


def _cells(row: paper.Published, counted: Counted) -> tuple[str, ...]:
    name = BACKBONES[row.backbone] if row.method == "base" else f"+ {METHODS[row.method]}"
    return (
        name,
        "-" if counted.r in (None, 0) else str(counted.r),
        ("≤ " if counted.at_most else "") + number(counted.gflops),
        number(row.gflops, ".1f"),
        number(counted.params_m, ".1f"),
        f"{row.params_m:g}",
        number(row.top1, ".1f"),
        counted.note,
    )


def _accuracy_charts() -> list[Part]:
    charts: list[Part] = []
    for published in paper.by_r():
        if published.table != "C":
            continue
        rows = [row for row in paper.methods("1") if row.backbone == published.backbone]
        others = [row for row in rows if row.method not in ("base", "mctf")]
        fused = tuple(zip(published.gflops[1:], published.top1[1:], strict=True))
        plain = (published.gflops[0], published.top1[0])
        name = BACKBONES[published.backbone]
        charts.append(
            Chart(
                f"{name}: accuracy against cost after fine-tuning",
                f"MCTF stays at or above the plain model's {plain[1]} % down to about half of its {plain[0]} GFLOPs; "
                "the other methods lie below its line.",
                Origin.PAPER,
                "GFLOPs",
                "top-1 %",
                (
                    Series("MCTF, r = 1 to 20", tuple(sorted(fused))),
                    Series(
                        "other methods",
                        tuple((row.gflops, row.top1) for row in others),
                        line=False,
                        labels=tuple(METHODS[row.method] for row in others),
                    ),
                    Series("plain", (plain,), line=False),
                ),
            )
        )
    return charts


def by_r_section(experiment: Experiment, result: Result) -> Section:
    """Tables C, D and E: GFLOPs of every r."""
    gflops: dict[str, list[float]] = result["gflops"]
    off, total = far_off(gflops), sum(len(each.gflops) for each in paper.by_r())
    text = f"All {total} figures of Tables C, D and E come out to 0.02 GFLOPs."
    if off:
        named = ", ".join(f"{BACKBONES[backbone]} r = {r} (Table {table})" for table, backbone, r in off)
        text = f"{total - len(off)} of {total} figures come out to 0.02 GFLOPs; not {named}."
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        (Finding(text, Verdict.DIFFERS if off else Verdict.AGREES),),
        (_gflops_table(gflops), _accuracy_table(), *_charts_by_r()),
        ("r = 0 is the plain model. The accuracy of all three tables is the paper's.",),
    )


def _charts_by_r() -> list[Part]:
    """The paper's accuracy against cost, r from 0, the rightmost point of a line, to 20."""
    charts: list[Part] = []
    for words, tables in (("DeiT", ("C", "D")), ("Other backbones", ("E",))):
        series = [
            Series(f"{BACKBONES[each.backbone]}, {_TRAINING[each.training]}", _accuracy_by_cost(each))
            for each in paper.by_r()
            if each.table in tables
        ]
        summary = (
            "Each line stays near the accuracy of its plain model, the rightmost point, and falls at the largest r."
        )
        caption = f"{words} with MCTF: accuracy against cost"
        charts.append(Chart(caption, summary, Origin.PAPER, "GFLOPs", "top-1 %", tuple(series)))
    return charts


def _accuracy_by_cost(published: paper.PublishedByR) -> tuple[tuple[float, float], ...]:
    return tuple(sorted(zip(published.gflops, published.top1, strict=True)))


def _gflops_table(gflops: dict[str, list[float]]) -> Table:
    published = {each.backbone: each for each in paper.by_r() if each.table != "D"}
    columns = [Column("r")]
    for backbone in gflops:
        columns += [Column("", origin, over=BACKBONES[backbone]) for origin in (Origin.COUNTED, Origin.PAPER)]
    rows = []
    for r in range(21):
        cells = [str(r)]
        for backbone, counted in gflops.items():
            cells += [number(counted[r]), number(published[backbone].gflops[r])]
        rows.append(tuple(cells))
    return Table("GFLOPs by r; those of Tables C and D are the same", tuple(columns), tuple(rows))


def _accuracy_table() -> Table:
    columns = [Column("r")]
    for each in paper.by_r():
        columns.append(
            Column(BACKBONES[each.backbone], Origin.PAPER, over=f"Table {each.table}, {_TRAINING[each.training]}")
        )
    rows = tuple((str(r), *(number(each.top1[r]) for each in paper.by_r())) for r in range(21))
    return Table("Top-1 accuracy by r, %", tuple(columns), rows)
