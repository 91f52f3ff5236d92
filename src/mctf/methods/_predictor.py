"""The common part of DynamicViT and SPViT: predictors before a few blocks learn which patches to keep.

In training every patch stays in the sequence. A decision in {0, 1} is drawn for each by the straight-through
Gumbel-softmax, and attention masks the dropped patches from then on:

    A'_ij = (A_ij G_ij + eps / N) / (sum_j A_ij G_ij + eps),    G_ij = decision of j, or 1 where i = j

which is the softmax over the remaining patches. A is the host's attention without its dropout. A dropped patch stays
dropped. Inference removes the same number of patches from every image, those with the lowest keep probability.

The loss beside the cross-entropy, with the authors' weights:

    2 mean_s (share kept after s - target_s)^2 + 0.5 KL(original || model) + 0.5 MSE(kept tokens, the original's)

The original is a frozen copy of the model before training, made by `mctf finetune`. Where its classifier was replaced
for the data, the KL term is left out; where all its weights were random, so is the MSE. A teacher given with --teacher
is independent of it. target_s is the share of patches that inference keeps.

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

from ..core.attention import at_least_float32
from ..core.flops import BlockShape
from ..core.schedule import Amount, ReductionSpec, fast_blocks, requested_tokens
from ..errors import MctfError
from .base import BlockOps, Method, check_number

_EPS = 1e-6


@dataclass(frozen=True)
class Decisions:
    """The decisions of training so far, on the patches behind the protected tokens.

    now: B n, 1 for the patches still kept; carries the gradient. left: the number to be kept.
    kept, targets: per stage, the value of `now` after it, and the share to be kept.
    """

    now: Tensor
    left: int
    protected: int
    kept: tuple[Tensor, ...] = ()
    targets: tuple[float, ...] = ()

    def updated(self, drawn: Tensor, r: int) -> Self:
        """After one more stage, which drew these decisions (B n) and was to drop r of the remaining patches."""
        now, left = drawn * self.now, self.left - r
        return replace(self, now=now, left=left, kept=(*self.kept, now), targets=(*self.targets, left / now.shape[1]))

    def mask(self) -> Tensor:
        """1 for the tokens that attention reads, protected ones included: B N."""
        return torch.cat([self.now.new_ones(len(self.now), self.protected), self.now], dim=1)


@dataclass(frozen=True)
class PredictorMethod(Method):
    """Options are the weights of the loss; 0 leaves a term out."""

    ratio_weight: float = 2.0
    answer_weight: float = 0.5
    token_weight: float = 0.5

    default_r: ClassVar[ReductionSpec] = 0.3
    drops: ClassVar[bool] = True
    learned: ClassVar[bool] = True
    restores_tokens: ClassVar[bool] = True
    masks_in_training: ClassVar[bool] = True
    learns_from_original: ClassVar[bool] = True
    ratio_per_image: ClassVar[bool] = True  # the ratio loss is per image, or of the whole batch
    added: ClassVar[int] = 0  # tokens that a stage makes of the dropped ones

    def __post_init__(self) -> None:
        check_number(ratio_weight=self.ratio_weight, answer_weight=self.answer_weight, token_weight=self.token_weight)

    def default_blocks(self, depth: int) -> tuple[int, ...]:
        return fast_blocks(depth)

    @abstractmethod
    def share(self, ratio: float, stage: int) -> float:
        """The share of the input patches that remains after the given stage, counted from 0."""

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """A count as it is; for a ratio, all but floor(share * n) of the n input patches."""
        if isinstance(amount, int) or amount == 0:
            return requested_tokens(amount, tokens - protected)
        num_remaining = math.floor(self.share(amount, stage) * (initial - protected) + 1e-9)  # as in `requested_tokens`
        return max(0, tokens - protected - stage * self.added - num_remaining)

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """The requested number, as long as one patch remains; 0 where as many tokens would be added."""
        requested = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        reduced = min(requested, tokens - protected - stage * self.added - 1)
        return reduced if reduced > self.added else 0

    def num_remaining(self, tokens: int, r: int) -> int:
        return tokens - r + (self.added if r else 0)

    def make_layers(self, shapes: Sequence[BlockShape], schedule: Sequence[Amount]) -> nn.ModuleDict:
        if any(shape.mixing for shape in shapes):
            raise MctfError(
                f"method {self.name!r} learns with masked attention, which talking heads (CaiT) do not support: "
                "use 'mctf' or 'tome'"
            )
        chosen = [index for index, amount in enumerate(schedule) if amount]
        return nn.ModuleDict({str(index): self.make_layer(shapes[index]) for index in chosen})

    @abstractmethod
    def make_layer(self, shape: BlockShape) -> nn.Module:
        """The predictor before one block."""

    def extra_loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Any], *, infer: Any = None
    ) -> Tensor:
        """The loss beside the cross-entropy; see `ExtraLoss` in `mctf.train.objective`."""
        branch = branches[0]
        decisions: Decisions | None = branch.method_states[-1]
        if decisions is None:
            return branch.logits.new_zeros(())
        loss = self.ratio_weight * ratio_loss(decisions, per_image=self.ratio_per_image)
        teacher = branch.teacher
        if teacher is None:
            return loss
        if teacher.logits is not None:
            loss = loss + self.answer_weight * divergence(branch.logits, teacher.logits)
        return loss + self.token_weight * token_distance(branch.tokens, teacher.tokens, decisions.now)


def ones_for(x: Tensor) -> Tensor:
    """Ones, one per token of x (B n C), in at least float32: B n."""
    return at_least_float32(x.new_ones(x.shape[:2]))


def decide(log_probabilities: Tensor) -> Tensor:
    """Draw 1 (keep, the first of two) or 0 by the straight-through Gumbel-softmax: B n 2 -> B n."""
    return F.gumbel_softmax(at_least_float32(log_probabilities), hard=True)[..., 0]


def run_masked(block: BlockOps, x: Tensor, mask: Tensor) -> Tensor:
    """A block whose attention reads token j with weight mask_j (B N, from 0 to 1); the mask gets a gradient."""
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    masked = masked_map(block.attention_map(q, k, sizes=None), mask)
    context = (masked.to(v.dtype) @ v).transpose(1, 2).flatten(2)
    return block.add_mlp(block.add_attention(x, block.finish_context(context, h)))


def masked_map(full_map: Tensor, mask: Tensor) -> Tensor:
    """The softmax over the tokens of the mask, from the softmax over all tokens: B H N N."""
    tokens = full_map.shape[-1]
    itself = torch.eye(tokens, dtype=mask.dtype, device=mask.device)
    columns = mask[:, None, None, :]
    left = full_map * (columns + (1 - columns) * itself)
    return (left + _EPS / tokens) / (left.sum(dim=-1, keepdim=True) + _EPS)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of the mask: B n C and B n -> B 1 C."""
    weights = mask.to(x.dtype)[..., None]
    return (x * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp_min(1)


def ratio_loss(decisions: Decisions, *, per_image: bool) -> Tensor:
    """Mean over stages of (share kept - target)^2, per image or with the share of the whole batch."""
    terms = []
    for kept, target in zip(decisions.kept, decisions.targets, strict=True):
        shares = kept.mean(dim=1) if per_image else kept.mean()
        terms.append((shares - target).square().mean())
    return torch.stack(terms).mean()


def divergence(logits: Tensor, taught: Tensor) -> Tensor:
    """KL(original || model), mean over images, from logits B K."""
    target, predicted = F.log_softmax(taught, dim=1), F.log_softmax(logits, dim=1)
    return F.kl_div(predicted, target, reduction="batchmean", log_target=True)


def token_distance(tokens: Tensor, taught: Tensor, kept: Tensor) -> Tensor:
    """Mean squared difference of the last n tokens (B N C) from the original's, over the kept ones (B n)."""
    mask = kept.detach()
    patches = mask.shape[1]
    squares = at_least_float32(tokens[:, -patches:] - taught[:, -patches:]).square().mean(dim=2)
    return (squares * mask).sum() / mask.sum().clamp_min(1)
