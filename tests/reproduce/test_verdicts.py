"""Verdicts from differences, and groups compared at equal cost."""

import math

import pytest
import torch

from mctf.evaluation.significance import Difference
from mctf.reproduce.document import Verdict
from mctf.reproduce.studies import PerImage, StudyRow
from mctf.reproduce.verdicts import judge, kl_leads_at_equal_cost, weakest


def row(gflops: float, *values: float, label: str = "16") -> StudyRow:
    """A row with these KLs per image."""
    return StudyRow(
        r=16,
        method="mctf",
        top1=None,
        top5=None,
        agreement=None,
        kl=sum(values) / len(values),
        kl_error=None,
        class_cosine=None,
        gflops=gflops,
        images_per_second=1.0,
        by_image=PerImage(kl=values),
        label=label,
    )


@pytest.mark.parametrize(
    ("lead", "verdict"),
    [
        (Difference(0.3, 0.1), Verdict.AGREES),
        (Difference(-0.3, 0.1), Verdict.DIFFERS),
        (Difference(0.19, 0.1), Verdict.CLOSE),
        (Difference(-0.19, 0.1), Verdict.CLOSE),
        (Difference(0.3, None), Verdict.CLOSE),
    ],
)
def test_a_lead_of_two_standard_errors_decides(lead: Difference, verdict: Verdict) -> None:
    assert judge(lead) is verdict


def test_the_least_certain_lead_decides() -> None:
    leads = {"large": Difference(1.0, 0.9), "small": Difference(0.1, 0.01), "zero": Difference(0.5, 0.0)}
    assert weakest(leads) == "large"  # the least certain, not the smallest
    assert weakest(leads | {"behind": Difference(-0.1, 0.05)}) == "behind"


def test_equal_cost_is_interpolated() -> None:
    rival = [row(2.0, 0.001, 0.001), row(1.0, 0.1, 0.1)]
    (lead,) = kl_leads_at_equal_cost([row(1.5, 0.009, 0.009)], rival).values()
    assert lead.mean == pytest.approx(0.001)
    (lead,) = kl_leads_at_equal_cost([row(1.5, 0.011, 0.011)], rival).values()
    assert lead.mean == pytest.approx(-0.001)  # though below the straight line
    assert kl_leads_at_equal_cost([row(2.5, 0.011, 0.011)], rival) == {}
    assert kl_leads_at_equal_cost([row(1.0, 0.2, 0.2)], [row(1.0, 0.1, 0.1), row(1.0, 0.1, 0.1)]) == {}


def test_kl_leads_at_equal_cost_have_the_label_of_their_row() -> None:
    rival = [row(2.0, 0.001, 0.003), row(1.0, 0.1, 0.3)]
    own = [row(1.2, 0.01, 0.02, label="20"), row(1.8, 0.001, 0.001, label="8"), row(9.0, 0.1, 0.1, label="1")]
    assert list(kl_leads_at_equal_cost(own, rival)) == ["20", "8"]


def test_the_error_between_two_points_is_what_redrawn_images_show() -> None:
    """Against a thousand sets of images drawn again from the same: their spread is the standard error."""
    generator = torch.Generator().manual_seed(0)
    images = 200
    hard = torch.rand(images, generator=generator, dtype=torch.float64)
    low, high, own = (
        scale * (hard + 0.5 * torch.rand(images, generator=generator, dtype=torch.float64))
        for scale in (0.4, 0.05, 0.15)
    )

    def lead(chosen: torch.Tensor) -> float:
        between = math.exp(0.7 * low[chosen].mean().log() + 0.3 * high[chosen].mean().log())
        return between - own[chosen].mean().item()

    redrawn = [lead(torch.randint(images, (images,), generator=generator)) for _ in range(1000)]
    line = [row(1.0, *low.tolist()), row(2.0, *high.tolist())]
    (result,) = kl_leads_at_equal_cost([row(1.3, *own.tolist())], line).values()
    assert result.mean == pytest.approx(lead(torch.arange(images)))
    assert result.error == pytest.approx(torch.tensor(redrawn).std().item(), rel=0.1)  # a thousand draws: 2 %
