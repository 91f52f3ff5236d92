"""The paper's figures, as printed; none of them is measured by mctf.

They lie in `data_files/paper_tables.json`. Tables are numbered as in the paper: 1 to 4 in its text, A to E in its
appendix. Accuracy is top-1 in percent on ImageNet-1k.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Published:
    """One row of Table 1 or 2: a backbone without reduction (method "base") or with it. r: None for all but MCTF."""

    table: str
    backbone: str
    method: str
    r: int | None
    gflops: float
    params_m: float
    top1: float
    finetuned: bool


@dataclass(frozen=True)
class PublishedByR:
    """MCTF on one backbone in Table C, D or E; entry r of each tuple is for r, from 0 (the baseline) to 20."""

    table: str
    backbone: str
    training: str
    gflops: tuple[float, ...]
    top1: tuple[float, ...]


@dataclass(frozen=True)
class PublishedAblation:
    """One line of Figure 7 (criteria), Table 4 or Table A (temperatures), all of a fine-tuned DeiT-S at r = 16."""

    study: str
    setting: str
    gflops: float | None
    top1: float


@cache
def _tables() -> dict[str, Any]:
    return json.loads((files("mctf") / "data_files" / "paper_tables.json").read_text(encoding="utf-8"))


def origin() -> str:
    """The source of the figures, in one sentence."""
    return _tables()["origin"]


def methods(table: str) -> tuple[Published, ...]:
    """The rows of Table 1 or 2, in the paper's order."""
    return tuple(Published(**row) for row in _tables()["methods"] if row["table"] == table)


def by_r() -> tuple[PublishedByR, ...]:
    """Tables C, D and E."""
    return tuple(
        PublishedByR(**{**row, "gflops": tuple(row["gflops"]), "top1": tuple(row["top1"])}) for row in _tables()["by_r"]
    )


def off_the_shelf(backbone: str, method: str) -> dict[int, float]:
    """Table 3: top-1 by r, 0 being the baseline; empty for a combination that the paper does not report."""
    for row in _tables()["off_the_shelf"]:
        if (row["backbone"], row["method"]) == (backbone, method):
            return {int(r): top1 for r, top1 in row["top1"].items()}
    return {}


def ablations() -> tuple[PublishedAblation, ...]:
    return tuple(PublishedAblation(**row) for row in _tables()["ablations"])


def ablation(study: str, setting: str) -> PublishedAblation | None:
    """One line of the ablations, None where the paper has none."""
    return next((row for row in ablations() if (row.study, row.setting) == (study, setting)), None)


def class_token_cosine() -> dict[str, tuple[float, ...]]:
    """Table B: per set of criteria the cosine after each of twelve blocks."""
    return {row["criteria"]: tuple(row["cosine"]) for row in _tables()["class_token_cosine"]}


def mean_largest_token() -> dict[str, float]:
    """Figure 9: the mean size of the largest token, "with_size" and "without_size"."""
    return _tables()["mean_largest_token"]
