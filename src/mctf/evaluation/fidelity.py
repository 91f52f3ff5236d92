"""How near a fused model's answers are to the truth and to the unfused model's.

Axes: B images, K classes, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Output:
    """What a model says of a batch.

    logits: B K. pooled: B C, what its classifier reads: the final normalised class token, or the pooled tokens of
    a model that does without one.
    """

    logits: Tensor
    pooled: Tensor

    def wide(self) -> "Output":
        """The same in float64 on the CPU, so that measuring adds no error of its own."""
        return Output(self.logits.cpu().double(), self.pooled.cpu().double())


@dataclass(frozen=True)
class Scores:
    """What `Fidelity` is the mean of, image by image: B each, float64; None where unknown."""

    top1: Tensor | None
    top5: Tensor | None
    agreement: Tensor | None
    kl: Tensor | None
    class_cosine: Tensor


@dataclass(frozen=True)
class Fidelity:
    """Means over images; None where unknown.

    top1, top5: percent of images whose class is the first answer, or among the first five.
    agreement: percent of images with the same first answer as the unfused model.
    kl: KL(unfused || fused) = sum_k p_k (log p_k - log q_k) in nats, p the unfused model's probabilities.
    class_cosine: between the pooled features of both.
    """

    top1: float | None
    top5: float | None
    agreement: float | None
    kl: float | None
    class_cosine: float | None


def compare(output: Output, reference: Output, labels: Tensor | None, *, classifies: bool = True) -> Fidelity:
    """Fidelity of one batch. classifies: whether logits are those of classes; else only the cosine is known."""
    return average([score(output, reference, labels, classifies=classifies)])


def score(output: Output, reference: Output, labels: Tensor | None, *, classifies: bool = True) -> Scores:
    """The same image by image, to be averaged over many batches."""
    output, reference = output.wide(), reference.wide()
    top1 = top5 = agreement = kl = None
    if classifies:
        answers = _answers(output.logits)
        agreement = _percent(answers[:, 0] == _answers(reference.logits)[:, 0])
        kl = _divergence(reference.logits, output.logits)
        if labels is not None:
            hits = answers == labels.cpu()[:, None]
            top1, top5 = _percent(hits[:, 0]), _percent(hits.any(dim=1))
    return Scores(top1, top5, agreement, kl, F.cosine_similarity(output.pooled, reference.pooled, dim=1))


def _answers(logits: Tensor) -> Tensor:
    """The five likeliest classes, or all if fewer, B 5; of equal ones, which low precision makes, the first first."""
    return logits.argsort(dim=1, descending=True, stable=True)[:, :5]


def concatenate(batches: Sequence[Scores]) -> Scores:
    """All images of all batches, in order; None where it is unknown of some."""

    def whole(name: str) -> Any:
        values = [getattr(scores, name) for scores in batches]
        return None if any(value is None for value in values) else torch.cat(values)

    return Scores(*(whole(field.name) for field in fields(Scores)))


def average(batches: Sequence[Scores]) -> Fidelity:
    """The means over all images of all batches."""
    whole = concatenate(batches)
    values = [getattr(whole, field.name) for field in fields(Fidelity)]
    return Fidelity(*(None if value is None else value.mean().item() for value in values))


def _divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || logits) of each image, from logits: B."""
    log_p, log_q = F.log_softmax(reference, dim=1), F.log_softmax(logits, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def _percent(hits: Tensor) -> Tensor:
    return 100 * hits.to(torch.float64)
