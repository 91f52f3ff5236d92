"""Sections about cost: Tables 1 and 2, Tables C to E, and the paper's accuracy against its GFLOPs."""

from collections.abc import Callable, Sequence
from typing import Any

from . import paper
from .costs import CostRow, CostsByRResult, CostTableResult
from .display_names import BACKBONES, METHODS, TRAINING
from .document import Chart, Column, Finding, Origin, Section, Series, Table, Verdict, number
from .runner import Experiment


def table_section(experiment: Experiment, result: CostTableResult) -> Section:
    """Table 1 or 2: the counted cost beside the printed one, and the paper's accuracy in a column of its own."""
    charts = _accuracy_charts() if "Figure 1" in experiment.sources else []
    return Section.of(
        experiment,
        findings=[_agreement(result.rows)],
        parts=[_cost_table(result.rows), *charts],
        notes=[
            "Counted at each method's published setting, in the paper's convention: one FLOP per multiply-add. "
            "PVT, CoaT, Swin and PoolFormer are counted by torch on the meta device.",
            "Accuracy is the paper's, after fine-tuning where a method is trained; it is not measured here.",
        ],
    )


def _agreement(rows: Sequence[CostRow]) -> Finding:
    compared = [row for row in rows if row.agrees is not None]
    agreeing = [row for row in compared if row.agrees]
    text = f"{len(agreeing)} of {len(compared)} rows have the paper's GFLOPs to 0.1 and its parameters as printed"
    names = []
    for row in compared:
        if not row.agrees:
            backbone, method = BACKBONES[row.paper.backbone], METHODS[row.paper.method]
            name = backbone if row.paper.method == "base" else f"{method} on {backbone}"
            names.append(f"{name} ({number(row.counted.gflops)})")
    text += f"; not {', '.join(names)}" if names else ""
    not_compared = len(rows) - len(compared)
    text += f". {not_compared} cannot be compared, for the reason in the last column." if not_compared else "."
    return Finding(text, Verdict.DIFFERS if names else Verdict.AGREES)


def _cost_table(rows: Sequence[CostRow]) -> Table:
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
    cells = tuple(
        (
            BACKBONES[row.paper.backbone] if row.paper.method == "base" else f"+ {METHODS[row.paper.method]}",
            "-" if row.counted.r in (None, 0) else str(row.counted.r),
            ("≤ " if row.counted.at_most else "") + number(row.counted.gflops),
            number(row.paper.gflops, ".1f"),
            number(row.counted.params_m, ".1f"),
            f"{row.paper.params_m:g}",
            number(row.paper.top1, ".1f"),
            row.counted.note,
        )
        for row in rows
    )
    strong = frozenset(index for index, row in enumerate(rows) if row.paper.method == "mctf")
    return Table(f"Table {rows[0].paper.table}: counted cost beside the paper's figures", columns, cells, strong)


def _accuracy_charts() -> list[Chart]:
    charts = []
    for published in paper.by_r():
        if published.table != "C":
            continue
        others = [
            row
            for row in paper.methods("1")
            if row.backbone == published.backbone and row.method not in ("base", "mctf")
        ]
        fused = tuple(sorted(zip(published.gflops[1:], published.top1[1:], strict=True)))
        baseline = (published.gflops[0], published.top1[0])
        charts.append(
            Chart(
                f"{BACKBONES[published.backbone]}: accuracy against cost after fine-tuning",
                f"MCTF stays at or above the baseline's {baseline[1]} % down to about half of its {baseline[0]} "
                "GFLOPs; the other methods lie below its line.",
                Origin.PAPER,
                "GFLOPs",
                "top-1 %",
                (
                    Series("MCTF, r = 1 to 20", fused),
                    Series(
                        "other methods",
                        tuple((row.gflops, row.top1) for row in others),
                        line=False,
                        labels=tuple(METHODS[row.method] for row in others),
                    ),
                    Series("baseline", (baseline,), line=False),
                ),
            )
        )
    return charts


def by_r_section(experiment: Experiment, result: CostsByRResult) -> Section:
    """Tables C, D and E: GFLOPs of every r."""
    disagreements, total = result.disagreements(), sum(len(each.gflops) for each in paper.by_r())
    text = f"All {total} figures of Tables C, D and E agree to 0.02 GFLOPs."
    if disagreements:
        names = ", ".join(f"{BACKBONES[backbone]} r = {r} (Table {table})" for table, backbone, r in disagreements)
        text = f"{total - len(disagreements)} of {total} figures agree to 0.02 GFLOPs; not {names}."
    charts = [
        Chart(
            f"{title} with MCTF: accuracy against cost",
            "Each line stays near the accuracy of its baseline, the rightmost point, and falls at the largest r.",
            Origin.PAPER,
            "GFLOPs",
            "top-1 %",
            tuple(
                Series(
                    f"{BACKBONES[each.backbone]}, {TRAINING[each.training]}",
                    tuple(sorted(zip(each.gflops, each.top1, strict=True))),
                )
                for each in paper.by_r()
                if each.table in tables
            ),
        )
        for title, tables in (("DeiT", ("C", "D")), ("Other backbones", ("E",)))
    ]
    accuracy = Table(
        "Top-1 accuracy by r, %",
        (
            Column("r"),
            *(
                Column(BACKBONES[each.backbone], Origin.PAPER, over=f"Table {each.table}, {TRAINING[each.training]}")
                for each in paper.by_r()
            ),
        ),
        tuple((str(r), *(number(each.top1[r]) for each in paper.by_r())) for r in range(21)),
    )
    return Section.of(
        experiment,
        findings=[Finding(text, Verdict.DIFFERS if disagreements else Verdict.AGREES)],
        parts=[_gflops_table(result), accuracy, *charts],
        notes=["r = 0 is the baseline. The accuracy of all three tables is the paper's."],
    )


def _gflops_table(result: CostsByRResult) -> Table:
    published = {each.backbone: each for each in paper.by_r() if each.table != "D"}
    columns = [Column("r")]
    for backbone in result.gflops:
        columns += [Column("", origin, over=BACKBONES[backbone]) for origin in (Origin.COUNTED, Origin.PAPER)]
    rows = []
    for r in range(21):
        cells = [str(r)]
        for backbone, counted in result.gflops.items():
            cells += [number(counted[r]), number(published[backbone].gflops[r])]
        rows.append(tuple(cells))
    return Table("GFLOPs by r; those of Tables C and D are the same", tuple(columns), tuple(rows))


SECTIONS: dict[str, Callable[[Experiment, Any], Section]] = {
    "costs_methods": table_section,
    "costs_backbones": table_section,
    "costs_by_r": by_r_section,
}
