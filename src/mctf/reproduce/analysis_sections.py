"""Sections about the inside of the model: class token, largest token, attention, and pictures of fused patches."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import Any

from .._utils import plural
from ..evaluation.significance import Difference
from . import paper
from .analyses import ClassTokenResult, LargestTokenResult, rank_criteria
from .display_names import CASES, criteria_label
from .document import Chart, Column, Finding, Origin, Picture, Section, Series, Strip, Table, Viewer, number
from .pictures import AttentionMapsResult, FusedPatchesResult
from .runner import Experiment
from .studies import R
from .verdicts import judge, weakest

_BINS = 24
_BLOCKS = "Blocks are counted from 1; the first does not fuse."


def class_token_section(experiment: Experiment, result: ClassTokenResult) -> Section:
    """Every pair of criteria is compared in the paper's order; the least certain pair decides the verdict."""
    printed = paper.class_token_cosine()
    own, papers = rank_criteria(result.cosine), rank_criteria(printed)
    leads = {
        f"{one} over {other}": Difference.of(result.last[one], result.last[other])
        for one, other in combinations(papers, 2)
    }
    pair = weakest(leads)
    lead = leads[pair]
    order = "the paper's order" if own == papers else f"the paper's order is {' > '.join(papers)}"
    least = f"its least certain step, {pair}, is {'' if lead.mean >= 0 else '-'}{lead.size()} of cosine here"
    text = f"From the highest cosine to the lowest: {' > '.join(own)}; {order}; {least}."

    parts: list[Table | Chart] = []
    for caption, origin, cosine in (
        ("Measured here", Origin.MEASURED, result.cosine),
        ("Table B of the paper, DeiT-S", Origin.PAPER, printed),
    ):
        depth = len(next(iter(cosine.values())))
        columns = (Column("criteria", text=True), *(Column(str(block), origin) for block in range(1, depth + 1)))
        rows = tuple((name, *(number(value, ".4f") for value in values)) for name, values in cosine.items())
        parts.append(Table(f"{caption}: cosine after each block", columns, rows))
    for caption, summary, origin, cosine in (
        (
            "Cosine of class tokens, measured",
            f"All lines begin at 1 and fall; after the last block their order is {' > '.join(own)}.",
            Origin.MEASURED,
            result.cosine,
        ),
        ("Cosine of class tokens, DeiT-S of the paper", "The paper's figures.", Origin.PAPER, printed),
    ):
        series = tuple(
            Series(name, tuple((float(block), value) for block, value in enumerate(values, start=1)))
            for name, values in cosine.items()
        )
        parts.append(Chart(caption, summary, origin, "block", "cosine", series))
    return Section.of(
        experiment,
        findings=[Finding(text, judge(lead))],
        parts=parts,
        notes=[f"Mean over {plural(result.images, 'image')}. {_BLOCKS}"],
    )


def largest_token_section(experiment: Experiment, result: LargestTokenResult) -> Section:
    means = {case: mean(values) for case, values in result.sizes.items()}
    lead, printed = Difference.of(result.sizes["without_size"], result.sizes["with_size"]), paper.mean_largest_token()
    text = (
        f"With the size criterion the largest token is {lead.size(1)} patches "
        f"{'smaller' if lead.mean > 0 else 'larger'}: {means['with_size']:.1f} against {means['without_size']:.1f}."
    )
    table = Table(
        "Mean size of the largest token",
        (
            Column("MCTF", text=True),
            Column("measured here", Origin.MEASURED),
            Column("DeiT-S, fine-tuned", Origin.PAPER),
        ),
        tuple((label, number(means[case], ".1f"), number(printed[case], ".1f")) for case, label in CASES.items()),
    )
    chart = Chart(
        "Size of the largest token after the last block",
        text,
        Origin.MEASURED,
        "patches in the largest token",
        "images",
        _histogram(result.sizes),
        bars=True,
    )
    return Section.of(
        experiment,
        findings=[Finding(text, judge(lead))],
        parts=[table, chart],
        notes=[f"Over {plural(result.images, 'image')}."],
    )


def _histogram(sizes: Mapping[str, Sequence[int]]) -> tuple[Series, ...]:
    """One series per case, all with the same bins: points are left edges and counts."""
    pooled = [size for values in sizes.values() for size in values]
    width = math.ceil((max(pooled) - min(pooled) + 1) / _BINS)
    starts = range(min(pooled) // width * width, max(pooled) + 1, width)
    return tuple(
        Series(CASES[case], tuple((float(s), float(sum(s <= size < s + width for size in values))) for s in starts))
        for case, values in sizes.items()
    )


def attention_section(experiment: Experiment, result: AttentionMapsResult) -> Section:
    columns = (Column("block", text=True), *(Column(block, Origin.MEASURED) for block in result.distance))
    row = ("distance, %", *(number(100 * value, ".1f") for value in result.distance.values()))
    strips = [
        Strip(
            f"Image {index}, {drawn.name}: {kind} attention",
            tuple(
                Picture(file, f"Image {index}, {kind} attention in block {block}", f"block {block}")
                for block, file in zip(result.blocks, files, strict=True)
            ),
        )
        for index, drawn in enumerate(result.drawn, start=1)
        for kind, files in drawn.pictures.items()
    ]
    average = 100 * mean(result.distance.values())
    return Section.of(
        experiment,
        findings=[Finding(f"Averaged over blocks, the approximation moves {average:.1f} % of the attention.")],
        parts=[*strips, Table("Distance between approximated and precise attention", columns, (row,))],
        notes=[
            f"The distance is half the sum of absolute differences, the mean over {plural(result.images, 'image')}, "
            "heads and rows. Heat is the attention a patch receives from all queries; both maps of a block share one "
            f"color scale, from dark (none) to yellow (most). {_BLOCKS}"
        ],
    )


def fused_patches_section(experiment: Experiment, result: FusedPatchesResult) -> Section:
    viewer = Viewer(
        "Patches fused into one token share their mean color and a border; single patches keep their pixels.",
        result.images,
        result.originals,
        result.reductions,
        result.tokens,
        result.pictures,
        start=(len(result.tokens[0]), result.reductions.index(R)),
    )
    strips = []
    for index, original in enumerate(result.originals):
        pictures = [Picture(original, f"Image {index + 1}, model input", "input")]
        for name, files in zip(result.criteria.names, result.criteria.pictures, strict=True):
            label = criteria_label(name)
            pictures.append(Picture(files[index], f"Image {index + 1} fused by {label}", label))
        caption = f"Image {index + 1} by criteria, after the last block, r = {result.criteria.r}"
        strips.append(Strip(caption, tuple(pictures)))
    return Section.of(experiment, parts=[viewer, *strips], notes=[_BLOCKS])


SECTIONS: dict[str, Callable[[Experiment, Any], Section]] = {
    "class_token": class_token_section,
    "largest_token": largest_token_section,
    "attention_maps": attention_section,
    "fused_patches": fused_patches_section,
}
