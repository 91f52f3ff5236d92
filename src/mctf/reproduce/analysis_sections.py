"""Sections about what happens inside: class token, sizes, attention, and pictures of fused patches."""

from itertools import combinations
from statistics import mean

from .._utils import plural
from ..evaluation.significance import Difference
from . import paper
from .analyses import order
from .charts import round_step
from .document import Chart, Column, Finding, Origin, Part, Picture, Section, Series, Strip, Table, Viewer, number
from .labels import CASES, criteria_words
from .runner import Experiment, Result
from .studies import R
from .verdicts import judge, weakest

_BINS = 24


def class_token_section(experiment: Experiment, result: Result) -> Section:
    cosine: dict[str, list[float]] = result["cosine"]
    ours, theirs = order(cosine), order(paper.class_token_cosine())
    chart = Chart(
        "Cosine of class tokens, measured",
        f"All lines begin at 1 and fall; after the last block they lie in the order {_ordered(ours)}.",
        Origin.MEASURED,
        "block",
        "cosine",
        tuple(Series(name, _numbered(values)) for name, values in cosine.items()),
    )
    printed = Chart(
        "Cosine of class tokens, DeiT-S of the paper",
        "The same plot of the paper's figures.",
        Origin.PAPER,
        "block",
        "cosine",
        tuple(Series(name, _numbered(values)) for name, values in paper.class_token_cosine().items()),
    )
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        (_order_finding(ours, theirs, result["last"]),),
        (
            _cosine_table("Measured here", Origin.MEASURED, cosine),
            _cosine_table("Table B of the paper, DeiT-S", Origin.PAPER, paper.class_token_cosine()),
            chart,
            printed,
        ),
        (f"In the mean over {plural(result['images'], 'image')}. Blocks are plural from 1; the first does not fuse.",),
    )


def _order_finding(ours: list[str], theirs: list[str], last: dict[str, list[float]]) -> Finding:
    """Every pair is compared as the paper has it; the one that speaks least for the paper decides."""
    leads = {f"{one} over {other}": Difference.of(last[one], last[other]) for one, other in combinations(theirs, 2)}
    pair = weakest(leads)
    lead = leads[pair]
    words = "the paper's order" if ours == theirs else f"the paper's order is {_ordered(theirs)}"
    least = f"its least certain step, {pair}, is {'' if lead.mean >= 0 else '-'}{lead.size()} of cosine here"
    return Finding(f"From the least loss to the most: {_ordered(ours)}; {words}; {least}.", judge(lead))


def _ordered(criteria: list[str]) -> str:
    return " > ".join(criteria)


def _numbered(values: list[float] | tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    return tuple((float(block), value) for block, value in enumerate(values, start=1))


def _cosine_table(caption: str, origin: Origin, cosine: dict[str, list[float]] | dict[str, tuple[float, ...]]) -> Table:
    depth = len(next(iter(cosine.values())))
    columns = (Column("criteria", text=True), *(Column(str(block), origin) for block in range(1, depth + 1)))
    rows = tuple((name, *(number(value, ".4f") for value in values)) for name, values in cosine.items())
    return Table(f"{caption}: cosine after each block", columns, rows)


def largest_token_section(experiment: Experiment, result: Result) -> Section:
    sizes: dict[str, list[int]] = result["sizes"]
    means = {case: mean(values) for case, values in sizes.items()}
    lead, printed = Difference.of(sizes["without_size"], sizes["with_size"]), paper.mean_largest_token()
    smaller = f"{lead.size(1)} patches {'smaller' if lead.mean > 0 else 'larger'}"
    in_words = f"{means['with_size']:.1f} against {means['without_size']:.1f}"
    text = f"With the size criterion the largest token is {smaller}: {in_words}."
    table = Table(
        "Mean size of the largest token",
        (
            Column("MCTF", text=True),
            Column("measured here", Origin.MEASURED),
            Column("DeiT-S, fine-tuned", Origin.PAPER),
        ),
        tuple((words, number(means[case], ".1f"), number(printed[case], ".1f")) for case, words in CASES.items()),
    )
    chart = Chart(
        "Size of the largest token after the last block",
        text,
        Origin.MEASURED,
        "patches in the largest token",
        "images",
        _histogram(sizes),
        bars=True,
    )
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        (Finding(text, judge(lead)),),
        (table, chart),
        (f"Over {plural(result['images'], 'image')}.",),
    )


def _histogram(sizes: dict[str, list[int]]) -> tuple[Series, ...]:
    every = [size for values in sizes.values() for size in values]
    width = max(1, round(round_step((max(every) - min(every) + 1) / _BINS)))
    starts = range(min(every) // width * width, max(every) + 1, width)
    return tuple(
        Series(CASES[case], tuple((float(s), float(sum(s <= size < s + width for size in values))) for s in starts))
        for case, values in sizes.items()
    )


def attention_section(experiment: Experiment, result: Result) -> Section:
    distance: dict[str, float] = result["distance"]
    blocks: list[int] = result["blocks"]
    columns = (Column("block", text=True), *(Column(block, Origin.MEASURED) for block in distance))
    row = ("goes elsewhere, %", *(number(100 * value, ".1f") for value in distance.values()))
    strips = []
    for number_, drawn in enumerate(result["drawn"], start=1):
        for kind, files in drawn["pictures"].items():
            pictures = tuple(
                Picture(file, f"Image {number_}, {kind} attention in block {block}", f"block {block}")
                for block, file in zip(blocks, files, strict=True)
            )
            strips.append(Strip(f"Image {number_}, {drawn['name']}: {kind} attention", pictures))
    average = mean(distance.values())
    parts: list[Part] = [*strips, Table("Attention that the approximation sends elsewhere", columns, (row,))]
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        (
            Finding(
                f"In the mean over blocks {100 * average:.1f} % of the attention is not where it would precisely be."
            ),
        ),
        tuple(parts),
        (
            f"Distances are over {plural(result['images'], 'image')}, heads and rows: half the sum of absolute "
            "differences. Heat is the attention a patch receives from all queries; both maps of a block share one "
            "scale, from dark (none) to yellow (most). Blocks are plural from 1; the first does not fuse.",
        ),
    )


def fused_section(experiment: Experiment, result: Result) -> Section:
    reductions = tuple(result["reductions"])
    viewer = Viewer(
        "Patches fused into one token share their mean colour and a border; patches still alone keep their pixels.",
        tuple(result["images"]),
        tuple(result["originals"]),
        reductions,
        tuple(tuple(counts) for counts in result["tokens"]),
        tuple(tuple(tuple(files) for files in images) for images in result["pictures"]),
        (len(result["tokens"][0]), reductions.index(R)),
    )
    criteria = result["criteria"]
    strips: list[Part] = []
    for number_, original in enumerate(result["originals"]):
        pictures = [Picture(original, f"Image {number_ + 1} as the model sees it", "input")]
        for name, files in zip(criteria["names"], criteria["pictures"], strict=True):
            words = criteria_words(name)
            pictures.append(Picture(files[number_], f"Image {number_ + 1} fused by {words}", words))
        strips.append(
            Strip(f"Image {number_ + 1} by criteria, after the last block, r = {criteria['r']}", tuple(pictures))
        )
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        (),
        (viewer, *strips),
        ("Blocks are plural from 1; the first does not fuse.",),
    )
