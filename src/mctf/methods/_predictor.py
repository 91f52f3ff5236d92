"""What DynamicViT and SPViT have in common: layers before a few blocks learn which patches to keep.

In training every patch stays. A decision in {0, 1} is drawn for each by the straight-through Gumbel-softmax, and from
then on attention does not see patches that were decided against:

    A'_ij = (A_ij G_ij + eps / N) / (sum_j A_ij G_ij + eps),    G_ij = decision of j, or 1 where i = j

which is the softmax over the patches that remain. A is the host's attention without its dropout. A patch once dropped
stays dropped. In inference the same number of patches leaves every image, those least likely to be kept, and they
really leave.

The loss that comes on top of the cross-entropy, with the authors' weights:

    2 mean_s (share kept after s - target_s)^2 + 0.5 KL(original || model) + 0.5 MSE(kept tokens, the original's)

The original is a frozen copy of the model before training; `mctf finetune` makes it by itself. Where its classifier
was made anew for the data, the KL term is left out; where all its weights were random, so is the MSE. A teacher given
with --teacher comes beside it. target_s is the share of patches that inference keeps.

Axes: B images, H heads, N tokens, n of them patches, C channels.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.flops import BlockShape
from ..core.matching import at_least_float32
from ..core.schedule import Amount, ReductionSpec, fast_blocks, requested_tokens
from ..errors import MctfError
from .base import BlockOps, Method

_EPS = 1e-6


@dataclass(frozen=True)
class Decisions:
    """What was decided in training so far, on patches that follow so many protected tokens.

    now: B n, 1 for the patches that are still kept; a gradient flows through it. left: how many are to be.
    kept, targets: after each stage, what `now` was, and the share that was to be kept.
    """

    now: Tensor
    left: int
    protected: int
    kept: tuple[Tensor, ...] = ()
    targets: tuple[float, ...] = ()

    def updated(self, drawn: Tensor, r: int) -> Self:
        """After one more stage, which drew these (B n) to be kept and was to take r of those that were left."""
        now, left = drawn * self.now, self.left - r
        return replace(self, now=now, left=left, kept=(*self.kept, now), targets=(*self.targets, left / now.shape[1]))

    def seen(self) -> Tensor:
        """All tokens that attention sees, protected ones included: B N."""
        return torch.cat([self.now.new_ones(len(self.now), self.protected), self.now], dim=1)


@dataclass(frozen=True)
class Selecting(Method):
    """Options are the weights of the loss; 0 leaves a term out."""

    ratio_weight: float = 2.0
    answer_weight: float = 0.5
    token_weight: float = 0.5

    default_r: ClassVar[ReductionSpec] = 0.3
    masks_in_training: ClassVar[bool] = True
    learns_from_original: ClassVar[bool] = True
    ratio_per_image: ClassVar[bool] = True  # or of the whole batch
    added: ClassVar[int] = 0  # tokens that a stage makes of those that leave

    def __post_init__(self) -> None:
        for option in ("ratio_weight", "answer_weight", "token_weight"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise MctfError(f"{option}={value!r} must be a finite number, 0 or above")

    def default_blocks(self, depth: int) -> tuple[int, ...]:
        return fast_blocks(depth)

    @abstractmethod
    def share(self, ratio: float, stage: int) -> float:
        """The share of the first patches that stays after the given stage, counted from 0."""

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """A count as it is; by a ratio, all but the floor(share * n) patches that are to stay of the first n."""
        if isinstance(amount, int) or amount == 0:
            return requested_tokens(amount, tokens - protected)
        stays = math.floor(self.share(amount, stage) * (initial - protected) + 1e-9)  # as in `requested_tokens`
        return max(0, tokens - protected - stage * self.added - stays)

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """What is asked, as long as one patch remains; nothing where as many would come back."""
        asked = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        taken = min(asked, tokens - protected - stage * self.added - 1)
        return taken if taken > self.added else 0

    def num_remaining(self, tokens: int, r: int) -> int:
        return tokens - r + (self.added if r else 0)

    def make_layers(self, shapes: Sequence[BlockShape], schedule: Sequence[Amount]) -> nn.ModuleDict:
        if any(shape.mixing for shape in shapes):
            raise MctfError(
                f"method {self.name!r} learns with masked attention, which heads that talk to each other (CaiT) "
                "have not: use 'mctf' or 'tome'"
            )
        chosen = [index for index, amount in enumerate(schedule) if amount]
        return nn.ModuleDict({str(index): self.make_layer(shapes[index]) for index in chosen})

    @abstractmethod
    def make_layer(self, shape: BlockShape) -> nn.Module:
        """What scores the patches before one block."""

    def extra_loss(self, model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Any]) -> Tensor:
        """The loss beside the cross-entropy; see `ExtraLoss` in `mctf.train.objective`."""
        branch = branches[0]
        decisions: Decisions | None = branch.carries[-1]
        if decisions is None:
            return branch.logits.new_zeros(())
        loss = self.ratio_weight * ratio_loss(decisions, per_image=self.ratio_per_image)
        lesson = branch.lesson
        if lesson is None:
            return loss
        if lesson.logits is not None:
            loss = loss + self.answer_weight * divergence(branch.logits, lesson.logits)
        return loss + self.token_weight * token_distance(branch.tokens, lesson.tokens, decisions.now)


def ones_for(x: Tensor) -> Tensor:
    """One for each token of x (B n C), in at least float32: B n."""
    return at_least_float32(x.new_ones(x.shape[:2]))


def decide(log_probabilities: Tensor) -> Tensor:
    """Draw 1 (keep, the first of two) or 0 by the straight-through Gumbel-softmax: B n 2 -> B n."""
    return F.gumbel_softmax(at_least_float32(log_probabilities), hard=True)[..., 0]


def run_masked(block: BlockOps, x: Tensor, seen: Tensor) -> Tensor:
    """A block in which attention sees a token as far as `seen` (B N, from 0 to 1) says; a gradient flows into it."""
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    masked = masked_map(block.attention_map(q, k, sizes=None), seen)
    context = (masked.to(v.dtype) @ v).transpose(1, 2).flatten(2)
    return block.add_mlp(block.add_attention(x, block.finish_context(context, h)))


def masked_map(full_map: Tensor, seen: Tensor) -> Tensor:
    """The softmax over the tokens that are seen, from that over all of them: B H N N."""
    tokens = full_map.shape[-1]
    itself = torch.eye(tokens, dtype=seen.dtype, device=seen.device)
    columns = seen[:, None, None, :]
    left = full_map * (columns + (1 - columns) * itself)
    return (left + _EPS / tokens) / (left.sum(dim=-1, keepdim=True) + _EPS)


def seen_mean(x: Tensor, seen: Tensor) -> Tensor:
    """Mean over the tokens that are seen: B n C and B n -> B 1 C."""
    weights = seen.to(x.dtype)[..., None]
    return (x * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp_min(1)


def ratio_loss(decisions: Decisions, *, per_image: bool) -> Tensor:
    """Mean over stages of (share kept - target)^2, by image or with the share of the whole batch."""
    terms = []
    for kept, target in zip(decisions.kept, decisions.targets, strict=True):
        shares = kept.mean(dim=1) if per_image else kept.mean()
        terms.append((shares - target).square().mean())
    return torch.stack(terms).mean()


def divergence(logits: Tensor, taught: Tensor) -> Tensor:
    """KL(original || model), mean over images, from logits B K."""
    known, said = F.log_softmax(taught, dim=1), F.log_softmax(logits, dim=1)
    return F.kl_div(said, known, reduction="batchmean", log_target=True)


def token_distance(tokens: Tensor, taught: Tensor, kept: Tensor) -> Tensor:
    """Mean squared difference of the last n tokens (B N C) from the original's, over those that are kept (B n)."""
    counted = kept.detach()
    patches = counted.shape[1]
    squares = at_least_float32(tokens[:, -patches:] - taught[:, -patches:]).square().mean(dim=2)
    return (squares * counted).sum() / counted.sum().clamp_min(1)
