"""Verdicts: whether a measured difference agrees with the paper, contradicts it, or is too close to call.

The paper reports one setting ahead of others. A finding agrees where that setting is clearly ahead of each of them here
(by two standard errors), and differs where one of them is clearly ahead of it; everything else is too close to call.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..evaluation.significance import Difference
from .document import Finding, Verdict, number
from .studies import StudyRow

_MIN_KL = 1e-12  # keeps the logarithm finite


def judge(lead: Difference) -> Verdict:
    """lead: of the setting that the paper has ahead."""
    if not lead.clear:
        return Verdict.CLOSE
    return Verdict.AGREES if lead.mean > 0 else Verdict.DIFFERS


def weakest(leads: Mapping[str, Difference]) -> str:
    """The name of the smallest lead in standard errors, which decides the verdict."""
    return min(leads, key=lambda name: leads[name].errors)


def kl_lead(own: StudyRow, rival: StudyRow) -> Difference:
    """How much lower the KL of `own` is."""
    assert own.by_image.kl is not None
    assert rival.by_image.kl is not None
    return Difference.of(rival.by_image.kl, own.by_image.kl)


def compare_kl(subject: str, own: StudyRow, rivals: Mapping[str, StudyRow]) -> Finding:
    """The setting that the paper has ahead against its strongest rival. subject: its name; rivals: by theirs."""
    leads = {name: kl_lead(own, row) for name, row in rivals.items()}
    name = weakest(leads)
    kl, rival = leads[name], rivals[name]
    text = f"{subject} has a KL of {number(own.kl, '.4f')}; "
    text += name if len(rivals) == 1 else f"its strongest rival, {name},"
    text += f" has {kl.size()} {'less' if kl.mean < 0 else 'more'}"
    if own.by_image.top1 is not None and rival.by_image.top1 is not None:
        top1 = Difference.of(own.by_image.top1, rival.by_image.top1)
        text += f", and a top-1 {top1.size(1)} points {'higher' if top1.mean < 0 else 'lower'}"
    return Finding(f"{text}.", judge(kl))


def kl_leads_at_equal_cost(own: Sequence[StudyRow], rival: Sequence[StudyRow]) -> dict[str, Difference]:
    """How much lower the KL of one group is at the same GFLOPs, by label; empty where the GFLOPs do not overlap.

    Between two points of the rival, log KL is interpolated linearly in GFLOPs: log KL = (1 - t) log KL_0 + t log KL_1.
    To first order in the differences between images, one image contributes KL ((1 - t) x_0 / KL_0 + t x_1 / KL_1), x
    being its own KL at the two points; the mean of these is KL.
    """
    line = sorted(rival, key=lambda row: row.gflops)
    leads = {}
    for row in own:
        for low, high in pairwise(line):
            if low.gflops <= row.gflops <= high.gflops and low.gflops < high.gflops:
                t = (row.gflops - low.gflops) / (high.gflops - low.gflops)
                assert row.by_image.kl is not None
                leads[row.label] = Difference.of(_interpolate_kl(low, high, t), row.by_image.kl)
    return leads


def _interpolate_kl(low: StudyRow, high: StudyRow, t: float) -> list[float]:
    first, last = max(low.kl or 0.0, _MIN_KL), max(high.kl or 0.0, _MIN_KL)
    kl = math.exp((1 - t) * math.log(first) + t * math.log(last))
    pairs = zip(low.by_image.kl or (), high.by_image.kl or (), strict=True)
    return [kl * ((1 - t) * one / first + t * other / last) for one, other in pairs]


def describe_leads(leads: Mapping[str, Difference]) -> str:
    """As in "too close to call at r = 1, lower at r = 8, 16"."""
    places: dict[str, list[str]] = {}
    for r, lead in leads.items():
        side = "lower" if lead.mean > 0 else "higher"
        places.setdefault(side if lead.clear else "too close to call", []).append(r)
    return ", ".join(f"{side} at r = {', '.join(labels)}" for side, labels in places.items())


def describe_lead(lead: Difference) -> str:
    """As in "0.0006 ± 0.0009 lower"."""
    return f"{lead.size()} {'lower' if lead.mean > 0 else 'higher'}"
