"""The training loss: one module that runs the branches and adds up the terms.

DistributedDataParallel wraps this module, since it allows one forward pass of the wrapped module per backward pass and
consistency needs two passes of the model.

Axes: B images, K classes, 3 H W.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.schedule import Amount
from .consistency import Consistency, Losses
from .teachers import Distillation, OriginalModel
from .two_branch import Branch, run_branch, run_branches, run_inference

Infer = Callable[[], Branch]  # runs the model on the same images in evaluation mode, without gradient


class ExtraLoss(Protocol):
    """A term that a learned method adds to the loss: the method's attribute `extra_loss`, if it has one.

    Each branch holds the method's state after each block (`method_states`). The first also holds the outputs of the
    original model (`teacher`) where the method sets `learns_from_original`. A method that needs a second pass calls
    `infer`: it imports nothing from `mctf.train`.
    """

    def __call__(
        self, model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Branch], *, infer: Infer
    ) -> Tensor:
        """A scalar. branches: that of r and, under consistency, that of r'."""


class Objective(nn.Module):
    """Cross-entropy or token reduction consistency, optionally with distillation and the term of a learned method.

    consistency: None for cross-entropy of one branch, with label smoothing by `smoothing`.
    original: what `extra` learns from, if anything.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        consistency: Consistency | None = None,
        smoothing: float = 0.0,
        distillation: Distillation | None = None,
        extra: ExtraLoss | None = None,
        original: OriginalModel | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.consistency = consistency
        self.smoothing = smoothing
        self.distillation = distillation
        self.extra = extra
        self.original = original

    def draw_lighter(self, generator: torch.Generator) -> tuple[Amount, ...] | None:
        """r' of one step; None for one branch."""
        return None if self.consistency is None else self.consistency.draw_lighter(self.model, generator)

    def forward(
        self, images: Tensor, labels: Tensor, lighter: tuple[Amount, ...] | None, teacher_logits: Tensor | None
    ) -> Losses:
        """The loss of a batch; lighter: r' from `draw_lighter`; teacher_logits: B K."""
        branches: tuple[Branch, ...]
        if self.consistency is None or lighter is None:
            branches = (run_branch(self.model, images),)
            cross_entropy = F.cross_entropy(branches[0].logits, labels, label_smoothing=self.smoothing)
            losses = Losses(cross_entropy, cross_entropy)
        else:
            branches = run_branches(self.model, images, lighter)
            losses = self.consistency.losses(*branches, labels)
        if self.distillation is not None and teacher_logits is not None:
            losses = _distill(losses, branches, teacher_logits, self.distillation)
        if self.extra is not None:
            first = replace(branches[0], teacher=None if self.original is None else self.original(images))
            extra = self.extra(
                self.model,
                images,
                labels,
                (first, *branches[1:]),
                infer=lambda: run_inference(self.model, images),
            )
            losses = replace(losses, total=losses.total + extra, extra=extra)
        return losses


def _distill(losses: Losses, branches: Sequence[Branch], teacher_logits: Tensor, distillation: Distillation) -> Losses:
    """(1 - weight) CE + weight KL in every branch."""
    divergence = torch.stack([distillation(branch.logits, teacher_logits) for branch in branches]).sum()
    cross_entropy = losses.cross_entropy
    if losses.lighter_cross_entropy is not None:
        cross_entropy = cross_entropy + losses.lighter_cross_entropy
    total = losses.total + distillation.weight * (divergence - cross_entropy)
    return replace(losses, total=total, distillation=divergence)
