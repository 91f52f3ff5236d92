"""Accuracy of a fused model and its fidelity to the unfused model, the baseline.

Axes: B images, K classes, N tokens, C channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stack import features_for_head


@dataclass(frozen=True)
class Output:
    """What a model predicts for a batch.

    logits: B K. pooled: B C, the input of the classifier: the final normalized class token, or the pooled tokens of a
    model without a class token. tokens: B N C, final normalized ones, one per input token; None where there are fewer.
    """

    logits: Tensor
    pooled: Tensor
    tokens: Tensor | None = None


def run_model(
    model: Any,
    pixels: Tensor,
    timer: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    *,
    every_token: bool = False,
) -> Output:
    """Logits and pooled features of a batch (B 3 H W), from one pass through the blocks.

    timer: runs the forward pass. The pooled features are read after it and are not part of the timed call.
    every_token: whether the model returns one token per input token, which are then part of the output.
    """

    def forward() -> tuple[Any, Tensor]:
        tokens = features_for_head(model, pixels)
        return tokens, model.forward_head(tokens)

    tokens, logits = timer(forward)
    every = tokens if every_token and isinstance(tokens, Tensor) and tokens.dim() == 3 else None
    return Output(logits, model.forward_head(tokens, pre_logits=True), every)


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q) = sum_k p_k (log p_k - log q_k) per image in nats, p from the reference logits: B K, B K -> B."""
    log_p, log_q = F.log_softmax(reference, dim=1), F.log_softmax(logits, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


@dataclass(frozen=True)
class Scores:
    """The metrics of `Fidelity` per image: B each, float64; None where unknown."""

    top1: Tensor | None
    top5: Tensor | None
    agreement: Tensor | None
    kl: Tensor | None
    class_cosine: Tensor
    patch_cosine: Tensor | None = None


@dataclass(frozen=True)
class Fidelity:
    """Means over images; None where unknown.

    top1, top5: percent of images whose class is the top prediction, or among the top five.
    agreement: percent of images with the same top prediction as the baseline.
    kl: KL(baseline || fused) in nats.
    class_cosine: cosine similarity of the pooled features of both.
    patch_cosine: cosine similarity of the final normalized patches of both, the mean over patches; known where the
    fused model returns one token per input token.
    """

    top1: float | None
    top5: float | None
    agreement: float | None
    kl: float | None
    class_cosine: float | None
    patch_cosine: float | None = None


def score(
    output: Output, reference: Output, labels: Tensor | None, *, classifies: bool = True, protected: int = 0
) -> Scores:
    """Scores of one batch. classifies: whether logits belong to classes; otherwise only the cosines are defined.

    protected: number of leading tokens that are no patches. Everything but the many cosines of patches is computed in
    float64 on the CPU, so that measuring adds no rounding error.
    """
    logits, baseline = output.logits.cpu().double(), reference.logits.cpu().double()
    top1 = top5 = agreement = kl = None
    if classifies:
        classes = _top_classes(logits)
        agreement = _percent(classes[:, 0] == _top_classes(baseline)[:, 0])
        kl = kl_divergence(baseline, logits)
        if labels is not None:
            hits = classes == labels.cpu()[:, None]
            top1, top5 = _percent(hits[:, 0]), _percent(hits.any(dim=1))
    cosine = F.cosine_similarity(output.pooled.cpu().double(), reference.pooled.cpu().double(), dim=1)
    patches = None
    if output.tokens is not None and reference.tokens is not None:
        fused, baseline_tokens = (each[:, protected:].float() for each in (output.tokens, reference.tokens))
        patches = F.cosine_similarity(fused, baseline_tokens, dim=2).cpu().double().mean(dim=1)
    return Scores(top1, top5, agreement, kl, cosine, patches)


def _top_classes(logits: Tensor) -> Tensor:
    """The five likeliest classes, or all if fewer: B 5. Ties, frequent in low precision, go to the lower index."""
    return logits.argsort(dim=1, descending=True, stable=True)[:, :5]


def _percent(hits: Tensor) -> Tensor:
    return 100 * hits.to(torch.float64)


def concatenate(batches: Sequence[Scores]) -> Scores:
    """All images of all batches, in order; None where a metric is unknown for one of the batches."""

    def whole(name: str) -> Any:
        values = [getattr(scores, name) for scores in batches]
        return None if any(value is None for value in values) else torch.cat(values)

    return Scores(*(whole(field.name) for field in fields(Scores)))


def average(scores: Scores) -> Fidelity:
    """Means over images."""
    values = [getattr(scores, field.name) for field in fields(Fidelity)]
    return Fidelity(*(None if value is None else value.mean().item() for value in values))
