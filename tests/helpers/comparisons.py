"""Results of a comparison with given metrics, without running a model."""

from typing import Any

import torch

from mctf.evaluation.compare import PARAMETER_FREE, Candidate, Result
from mctf.evaluation.evaluate import Row, Setting
from mctf.evaluation.fidelity import Scores


def make_result(
    method: str,
    kl: float | None,
    *,
    kind: str = PARAMETER_FREE,
    target: float | None = 0.7,
    spread: float = 0.0,
    **metrics: Any,
) -> Result:
    """A result over two images, whose KL is `spread` above and below the mean."""
    metrics = {"top1": 50.0, "top5": 90.0, "agreement": 90.0, "class_cosine": 0.9, "gflops": target or 1.0, **metrics}
    row = Row(r=16, method=method, kl=kl, kl_error=spread, images_per_second=1.0, **metrics)
    per_image = None if kl is None else torch.tensor([kl - spread, kl + spread])
    scores = Scores(None, None, None, per_image, torch.full((2,), row.class_cosine))
    return Result(Candidate(Setting(method), target, kind, untrained=False), row, scores)
