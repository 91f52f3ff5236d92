"""What the sections of all studies share: measured columns, charts over cost, and the words around them."""

from collections.abc import Callable, Iterator, Sequence

from ...analysis.reproduction import paper
from ...analysis.reproduction.experiment import Experiment, Result
from ...wording import counted
from .content import Chart, Column, Finding, Origin, Part, Section, Series, Table, number
from .judging import Row
from .words import METHODS

Groups = dict[str, list[Row]]

MEASURED = (
    Column("KL", Origin.MEASURED),
    Column("agreement %", Origin.MEASURED),
    Column("top-1 %", Origin.MEASURED),
    Column("GFLOPs", Origin.COUNTED),
)
PUBLISHED_TOP1 = Column("top-1 %", Origin.PAPER)
FINE_TUNED = "The paper's accuracy is of a fine-tuned DeiT-S on all of ImageNet's validation images."
_MANY = 5000  # images from which on one of them does not show in a percentage


def measured_cells(row: Row) -> tuple[str, ...]:
    """The cells of the columns MEASURED."""
    shares = number(row["agreement"], ".1f"), number(row["top1"], ".1f")
    return number(row["kl"], ".4f"), *shares, number(row["gflops"])


def published_top1(study: str, setting: str) -> str:
    """The cell of the column PUBLISHED_TOP1."""
    published = paper.ablation(study, setting)
    return number(None if published is None else published.top1, ".1f")


def side_by_side(caption: str, groups: Groups, words: Callable[[str], str]) -> Table:
    """A row an r, and for every measured number a column a group, so that groups are read against each other."""
    cells = {group: [measured_cells(row) for row in rows] for group, rows in groups.items()}
    columns = [Column(words(group), column.origin, over=column.title) for column in MEASURED for group in groups]
    labels = [row["label"] for row in next(iter(groups.values()))]
    rows = tuple(
        (label, *(cells[group][number_][place] for place in range(len(MEASURED)) for group in groups))
        for number_, label in enumerate(labels)
    )
    return Table(caption, (Column("r"), *columns), rows)


def study_section(
    experiment: Experiment,
    result: Result,
    *,
    findings: Sequence[Finding],
    parts: Sequence[Part],
    notes: Sequence[str] = (),
) -> Section:
    """A section with what is to be said of the plain model and of the number of images."""
    base, images = result["base"], result["images"]
    words = f"On {counted(images, 'image')}, no weight trained. The plain model costs {base['gflops']:.2f} GFLOPs"
    words += "." if base["top1"] is None else f" and has a top-1 of {base['top1']:.1f} %."
    if base["top1"] is not None and images < _MANY:
        words += f" One image is {100 / images:.1f} points of top-1."
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        tuple(findings),
        tuple(parts),
        (words, *notes, *_missing(result)),
    )


def _missing(result: Result) -> Iterator[str]:
    """What the numbers lack."""
    if not knows_kl(result):
        yield "The model has no classifier: agreement, KL and accuracy are unknown."
    for case in result["capped"]:
        blocks = ", ".join(str(block) for block in case["blocks"])
        method = METHODS[case["method"]]
        yield f"{method} at r = {case['r']} has too few tokens left to fuse as many in block {blocks} (counted from 1)."


def grouped(result: Result) -> Groups:
    """Rows by group, in order."""
    groups: Groups = {}
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row)
    return groups


def knows_kl(result: Result) -> bool:
    """Whether the model has a classifier, so that answers can be compared."""
    return result["base"]["kl"] is not None


def curves(groups: Groups, words: Callable[[str], str], *, what: str) -> list[Part]:
    """KL and top-1 against GFLOPs, one line a group; only what is known. what: the groups, in one word."""
    charts: list[Part] = []
    for field, y, title in (("kl", "KL to the plain model", "KL"), ("top1", "top-1 %", "Accuracy")):
        series = [
            Series(words(group), tuple(sorted((row["gflops"], row[field]) for row in rows)))
            for group, rows in groups.items()
            if len(rows) > 1 and all(row[field] is not None for row in rows)
        ]
        if series:
            better = "lower is nearer to the plain model" if field == "kl" else "higher is better"
            summary = f"One line for each {what}; fewer GFLOPs mean a larger r; {better}."
            charts.append(
                Chart(f"{title} against cost by {what}", summary, Origin.MEASURED, "GFLOPs", y, tuple(series))
            )
    return charts
