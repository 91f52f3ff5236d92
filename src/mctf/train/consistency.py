"""Token reduction consistency (paper, section 3.4): a loss for any training loop.

    mctf.fuse(model, r=16)
    objective = Consistency(weight=1.0)
    for images, labels in loader:
        objective(model, images, labels).total.backward()
        optimizer.step(), optimizer.zero_grad()

    L = CE(f(x; r), y) + CE(f(x; r'), y) + weight * MSE(cls_r, cls_r')

r is the model's own; r' is drawn in each step, uniform on 0 .. r. The branch of r' is the teacher: no gradient of the
MSE flows into it. The MSE is the mean over the channels of those samples whose true class has a probability above
`confidence` in the branch of r; it is 0 where there are none.

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
    """A loss and its terms before weighting, for logs: scalars, None for terms that are not used.

    cross_entropy: of the branch of r. lighter_cross_entropy: of the branch of r'. distance: the gated MSE.
    confident: the fraction of samples in it. distillation: KL divergence from the teacher, summed over the branches.
    extra: the term of a learned method.
    """

    total: Tensor
    cross_entropy: Tensor
    lighter_cross_entropy: Tensor | None = None
    distance: Tensor | None = None
    confident: Tensor | None = None
    distillation: Tensor | None = None
    extra: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """The loss of the paper.

    weight: lambda; the paper uses 1 for DeiT-T and T2T-ViT, 3 for DeiT-S and LV-ViT. confidence: beta.
    smoothing: label smoothing. up_to: r' is drawn from 0 .. up_to, by default from 0 .. r.
    """

    weight: float = 1.0
    confidence: float = 0.4
    smoothing: float = 0.0
    up_to: int | None = None

    def __call__(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, generator: torch.Generator | None = None
    ) -> Losses:
        """The loss of a fused model on images (B 3 H W) with labels (B); `generator` draws r'."""
        branch, lighter = run_branches(model, images, self.draw_lighter(model, generator))
        return self.losses(branch, lighter, labels)

    def draw_lighter(self, model: nn.Module, generator: torch.Generator | None = None) -> tuple[Amount, ...]:
        """r' of one step for every block of a fused model."""
        return draw_lighter(fused_stack(model).schedule, up_to=self.up_to, generator=generator)

    def losses(self, branch: Branch, lighter: Branch, labels: Tensor) -> Losses:
        """The loss from the branch of r and the branch of r'."""
        first = F.cross_entropy(branch.logits, labels, label_smoothing=self.smoothing)
        second = F.cross_entropy(lighter.logits, labels, label_smoothing=self.smoothing)
        distance, confident = gated_distance(branch, lighter, labels, confidence=self.confidence)
        return Losses(first + second + self.weight * distance, first, second, distance, confident)


def gated_distance(branch: Branch, lighter: Branch, labels: Tensor, *, confidence: float) -> tuple[Tensor, Tensor]:
    """MSE(cls_r, cls_r') over the confident samples, and their fraction of the batch: two scalars."""
    with torch.no_grad():
        true_class = branch.logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
        confident = true_class > confidence  # B
    distances = (branch.features - lighter.features.detach()).square().mean(dim=1)  # B
    total = torch.where(confident, distances, 0).sum()
    return total / confident.sum().clamp_min(1), confident.float().mean()


def draw_lighter(
    schedule: Sequence[Amount], *, up_to: int | None = None, generator: torch.Generator | None = None
) -> tuple[Amount, ...]:
    """One amount per block for r', uniform on 0 .. r (or 0 .. up_to).

    schedule: one amount per block for r. Blocks with different counts keep their proportion, rounded down; ratios are
    multiplied by a uniform number from 0 to 1.
    """
    largest = max(schedule)
    if all(isinstance(amount, int) for amount in schedule):
        limit = int(largest if up_to is None else up_to)
        if not 0 <= limit <= largest:
            raise MctfError(f"r' cannot go up to {limit}: choose from 0 to {largest}, the r of the model")
        drawn = int(torch.randint(limit + 1, (), generator=generator))
        return tuple(int(amount * drawn // largest) if amount else 0 for amount in schedule)
    if up_to is not None:
        raise MctfError("up_to is a number of tokens, but the model's r is a ratio: omit it")
    factor = float(torch.rand((), generator=generator))
    return tuple(int(amount * factor) if isinstance(amount, int) else amount * factor for amount in schedule)
