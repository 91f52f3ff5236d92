"""What the engine minimises: one module that runs the branches and adds up the terms.

Being one module with one forward pass a step, it is what DistributedDataParallel wraps: two passes through a wrapped
model before one backward pass would confuse its bookkeeping.

Axes: B images, K classes, 3 H W.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.schedule import Amount
from .consistency import Consistency, Losses
from .teachers import Distillation, Original
from .two_branch import Branch, run_branch, run_branches


class ExtraLoss(Protocol):
    """A term that a learned method adds. The engine takes it from the method's attribute `extra_loss`, if any.

    What the method handed on from block to block is in each branch, and what the original model said, where the method
    asks for it with `learns_from_original`, is in the first.
    """

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Branch]) -> Tensor:
        """A scalar; branches: that of r and, under consistency, that of r'."""


class Objective(nn.Module):
    """Cross-entropy, or token reduction consistency, perhaps shared with a teacher and an extra term.

    consistency: None for cross-entropy alone, in one branch, whose labels `smoothing` smoothes.
    original: what the extra term learns from, if anything.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        consistency: Consistency | None = None,
        smoothing: float = 0.0,
        distillation: Distillation | None = None,
        extra: ExtraLoss | None = None,
        original: Original | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.consistency = consistency
        self.smoothing = smoothing
        self.distillation = distillation
        self.extra = extra
        self.original = original

    def draw(self, generator: torch.Generator) -> tuple[Amount, ...] | None:
        """r' of one step, None where there is one branch only."""
        return None if self.consistency is None else self.consistency.draw(self.model, generator)

    def forward(
        self, images: Tensor, labels: Tensor, lighter: tuple[Amount, ...] | None, taught: Tensor | None
    ) -> Losses:
        """The loss of a batch; lighter: r', as `draw` gives it; taught: B K, the teacher's logits."""
        branches: tuple[Branch, ...]
        if self.consistency is None or lighter is None:
            branches = (run_branch(self.model, images),)
            answers = F.cross_entropy(branches[0].logits, labels, label_smoothing=self.smoothing)
            losses = Losses(answers, answers)
        else:
            branches = run_branches(self.model, images, lighter)
            losses = self.consistency.losses(*branches, labels)
        if self.distillation is not None and taught is not None:
            losses = _taught(losses, branches, taught, self.distillation)
        if self.extra is not None:
            lesson = None if self.original is None else self.original(images)
            extra = self.extra(self.model, images, labels, (replace(branches[0], lesson=lesson), *branches[1:]))
            losses = replace(losses, total=losses.total + extra, extra=extra)
        return losses


def _taught(losses: Losses, branches: Sequence[Branch], taught: Tensor, distillation: Distillation) -> Losses:
    """The teacher takes its share of what the labels had: (1 - weight) CE + weight KL, in every branch."""
    teaching = torch.stack([distillation(branch.logits, taught) for branch in branches]).sum()
    labelled = losses.answers if losses.lighter is None else losses.answers + losses.lighter
    total = losses.total + distillation.weight * (teaching - labelled)
    return replace(losses, total=total, teaching=teaching)
