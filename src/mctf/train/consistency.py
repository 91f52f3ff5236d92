"""Fine-tuning with token reduction consistency (paper, section 3.4), as a loss for anyone's own loop.

    mctf.fuse(model, r=16)
    objective = Consistency(weight=1.0)
    for images, labels in loader:
        objective(model, images, labels).total.backward()
        optimizer.step(), optimizer.zero_grad()

    L = CE(f(x; r), y) + CE(f(x; r'), y) + weight * MSE(cls_r, cls_r')

r is the model's own; r' is drawn anew in each step, uniform on 0 .. r. The lighter branch, that of r', is the
teacher: no gradient of the MSE flows into it. The MSE is the mean over the channels of those samples whose true
class has a probability above `confidence` in the branch of r; it is 0 where there are none.

Axes: B images, K classes, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api import fused_stack
from ..core.schedule import Amount
from ..errors import MctfError
from .two_branch import Branch, run_branches


@dataclass(frozen=True)
class Losses:
    """A loss and what it is made of, for logs: scalars; None where a term has no part in it.

    answers: cross-entropy of the model's own r. lighter: the same of r'. distance: the gated MSE. confident: the
    share of samples it counts. teaching: divergence from a teacher. extra: what a learned method adds.
    """

    total: Tensor
    answers: Tensor
    lighter: Tensor | None = None
    distance: Tensor | None = None
    confident: Tensor | None = None
    teaching: Tensor | None = None
    extra: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """The objective of the paper.

    weight: lambda; the paper has 1 for DeiT-T and T2T-ViT, 3 for DeiT-S and LV-ViT. confidence: beta.
    smoothing: of the labels. up_to: r' is drawn from 0 .. up_to, by default from 0 .. r.
    """

    weight: float = 1.0
    confidence: float = 0.4
    smoothing: float = 0.0
    up_to: int | None = None

    def __call__(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, generator: torch.Generator | None = None
    ) -> Losses:
        """The loss of a fused model on images (B 3 H W) with labels (B); `generator` draws r'."""
        branch, lighter = run_branches(model, images, self.draw(model, generator))
        return self.losses(branch, lighter, labels)

    def draw(self, model: nn.Module, generator: torch.Generator | None = None) -> tuple[Amount, ...]:
        """r' of one step for every block of a fused model."""
        return draw_lighter(fused_stack(model).schedule, up_to=self.up_to, generator=generator)

    def losses(self, branch: Branch, lighter: Branch, labels: Tensor) -> Losses:
        """The loss from the two branches: that of r, and that of r'."""
        answers = F.cross_entropy(branch.logits, labels, label_smoothing=self.smoothing)
        light = F.cross_entropy(lighter.logits, labels, label_smoothing=self.smoothing)
        distance, confident = gated_distance(branch, lighter, labels, confidence=self.confidence)
        return Losses(answers + light + self.weight * distance, answers, light, distance, confident)


def gated_distance(branch: Branch, lighter: Branch, labels: Tensor, *, confidence: float) -> tuple[Tensor, Tensor]:
    """MSE(cls_r, cls_r') over the confident samples, and their share of the batch: two scalars."""
    with torch.no_grad():
        truth = branch.logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
        counts = truth > confidence  # B
    distances = (branch.features - lighter.features.detach()).square().mean(dim=1)  # B
    total = torch.where(counts, distances, 0).sum()
    return total / counts.sum().clamp_min(1), counts.float().mean()


def draw_lighter(
    schedule: Sequence[Amount], *, up_to: int | None = None, generator: torch.Generator | None = None
) -> tuple[Amount, ...]:
    """The tokens that leave each block when r' takes the place of r: uniform on 0 .. r (or 0 .. up_to).

    schedule: what leaves each block by r. Blocks that differ in it keep their proportion, rounded down; ratios are
    scaled by a uniform number from 0 to 1.
    """
    largest = max(schedule)
    if all(isinstance(amount, int) for amount in schedule):
        most = int(largest if up_to is None else up_to)
        if not 0 <= most <= largest:
            raise MctfError(f"r' cannot go up to {most}: choose from 0 to {largest}, the r of the model")
        drawn = int(torch.randint(most + 1, (), generator=generator))
        return tuple(int(amount * drawn // largest) if amount else 0 for amount in schedule)
    if up_to is not None:
        raise MctfError("up_to counts tokens, but the model's r is a ratio: leave it out")
    share = float(torch.rand((), generator=generator))
    return tuple(int(amount * share) if isinstance(amount, int) else amount * share for amount in schedule)
