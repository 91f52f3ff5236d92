"""What measured differences say of the paper's findings: as there, unlike there, or too close to call.

The paper has one setting ahead of others. A finding is as in the paper where that setting is clearly ahead of each of
them here, and unlike the paper where one of them is clearly ahead of it; all else is too close to call.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..evaluation.significance import Difference
from .document import Verdict

Row = dict[str, Any]
_LEAST = 1e-12  # a KL of which a logarithm can be taken


def judge(lead: Difference) -> Verdict:
    """lead: of what the paper has ahead."""
    if not lead.clear:
        return Verdict.CLOSE
    return Verdict.AGREES if lead.mean > 0 else Verdict.DIFFERS


def weakest(leads: Mapping[str, Difference]) -> str:
    """The name of the lead that speaks least for the paper, counted in standard errors: it decides for all of them."""
    return min(leads, key=lambda name: leads[name].errors)


def kl_lead(own: Row, rival: Row) -> Difference:
    """How much lower its KL is."""
    return Difference.of(rival["by_image"]["kl"], own["by_image"]["kl"])


def top1_lead(own: Row, rival: Row) -> Difference | None:
    """How many points higher its top-1 is; None without classes."""
    ours, theirs = own["by_image"]["top1"], rival["by_image"]["top1"]
    return None if ours is None else Difference.of(ours, theirs)


def rival_words(own: Row, rival: Row) -> str:
    """As in "has 0.0006 ± 0.0009 less, and a top-1 2.4 ± 0.9 points lower"."""
    kl, top1 = kl_lead(own, rival), top1_lead(own, rival)
    words = f"has {kl.size()} {'less' if kl.mean < 0 else 'more'}"
    if top1 is None:
        return words
    return f"{words}, and a top-1 {top1.size(1)} points {'higher' if top1.mean < 0 else 'lower'}"


def leads_at_equal_cost(own: Sequence[Row], rival: Sequence[Row]) -> dict[str, Difference]:
    """How much lower the KL of one group is than the other's at the same cost, by label; empty where costs do not meet.

    Between two points of the other, KL is taken to fall by equal factors for equal cost, as it does about:
    log KL = (1 - t) log KL_0 + t log KL_1. The share of an image in it is, to first order in what images differ by,
    KL ((1 - t) x_0 / KL_0 + t x_1 / KL_1), x being its own KL at the two points; the mean of these is KL.
    """
    line = sorted(rival, key=lambda row: row["gflops"])
    leads = {}
    for row in own:
        for low, high in pairwise(line):
            if low["gflops"] <= row["gflops"] <= high["gflops"] and low["gflops"] < high["gflops"]:
                share = (row["gflops"] - low["gflops"]) / (high["gflops"] - low["gflops"])
                leads[row["label"]] = Difference.of(_between(low, high, share), row["by_image"]["kl"])
    return leads


def _between(low: Row, high: Row, share: float) -> list[float]:
    first, last = max(low["kl"], _LEAST), max(high["kl"], _LEAST)
    whole = math.exp((1 - share) * math.log(first) + share * math.log(last))
    pairs = zip(low["by_image"]["kl"], high["by_image"]["kl"], strict=True)
    return [whole * ((1 - share) * one / first + share * other / last) for one, other in pairs]
