"""How near a fused model's answers are to the truth and to the unfused model's.

Axes: B images, K classes, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

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
    output, reference = output.wide(), reference.wide()
    top1 = top5 = agreement = kl = None
    if classifies:
        answers = output.logits.topk(min(5, output.logits.shape[1])).indices  # B 5
        agreement = _percent(answers[:, 0] == reference.logits.topk(1).indices[:, 0])
        kl = _divergence(reference.logits, output.logits).mean().item()
        if labels is not None:
            hits = answers == labels.cpu()[:, None]
            top1, top5 = _percent(hits[:, 0]), _percent(hits.any(dim=1))
    cosine = F.cosine_similarity(output.pooled, reference.pooled, dim=1).mean().item()
    return Fidelity(top1, top5, agreement, kl, cosine)


def average(parts: Sequence[tuple[int, Fidelity]]) -> Fidelity:
    """Fidelity over several batches, each given with its number of images."""
    images = sum(count for count, _ in parts)

    def mean(name: str) -> float | None:
        values = [(count, getattr(part, name)) for count, part in parts]
        if any(value is None for _, value in values):
            return None
        return sum(count * value for count, value in values) / images

    return Fidelity(*(mean(field.name) for field in fields(Fidelity)))


def _divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || logits) of each image, from logits: B."""
    log_p, log_q = F.log_softmax(reference, dim=1), F.log_softmax(logits, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def _percent(hits: Tensor) -> float:
    return 100 * hits.to(torch.float64).mean().item()
