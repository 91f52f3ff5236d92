"""IA-RED2: before a few blocks an interpreter decides which tokens are worth their cost, learned by reward.

Pan et al., "IA-RED2: Interpretability-Aware Redundancy Reduction for Vision Transformers", NeurIPS 2021. The blocks are
three groups; before the first block of each (0, 4, 8 of twelve) the interpreter gives every token a probability

    p_i = mean over heads of sigmoid(q_class . k_i / sqrt(d)),    q and k linear in LayerNorm(x), which has no weights

Inference keeps the tokens with p_i > 0.5; training samples decisions u_i. A dropped token stays dropped. The
interpreters learn by REINFORCE with a self-critical baseline, the reward of the decisions of inference:

    loss = -(reward(u) - reward(p > 0.5)) * log P(u)
    reward = 1 - (keep + |kept - keep|)^2 if the prediction is right, else -penalty

Choices where the public facts end:
- kept is the share of patches over all blocks. Above the target `keep` the reward is BlockDrop's, 1 - kept^2; below, it
  falls again: without a target too much is dropped once all p are near 0.5.
- Decisions are sampled from sharper probabilities than p, four times its logits: while many p are near 0.5, sampling
  from p itself drops half of what inference keeps. The remaining difference between the two, in the mean over a batch,
  is added to the sampled share, so that inference ends at the target.
- log P(u) is a mean over patches, summed over groups; the released file's weights per group are not used.
- Interpreters and blocks learn at the same time, the blocks by cross-entropy alone: interpreters read tokens without
  gradient. The authors' curriculum over the groups is the option `group`.
- Interpreters have no value projection, which would be unused. Their biases start where every p is near sigmoid(0.5) =
  0.62, sampled with probability 0.88, so that inference starts as the unfused model.
- Dropped tokens are removed, in training as in inference.

Axes: B images, N tokens, n patches that entered, C channels, H heads, d channels per head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.attention import at_least_float32
from ..core.flops import NORM, BlockShape, Cost
from ..core.schedule import Amount
from ..core.selection import pack_ragged
from .base import (
    Adaptive,
    BlockContext,
    BlockOps,
    BlockOutput,
    check_class_token,
    check_number,
    check_whole,
    present,
    run_unfused,
)

_START = 0.5  # logits of the keep probabilities of fresh interpreters
_SURE = (1e-6, 1 - 1e-6)  # probabilities beyond have no finite logit in float32
_SHARPNESS = 4.0  # of the chances in training, as a factor of their logits


@dataclass(frozen=True)
class Decision:
    """The decision of one interpreter. kept: B, the share kept of all input patches.

    log_probability: B, of the sampled decisions, as a mean over those patches; 0 in inference.
    """

    block: int
    kept: Tensor
    log_probability: Tensor


@dataclass(frozen=True)
class Policy:
    """All decisions so far, of a model of `depth` blocks on images of so many patches."""

    patches: int
    depth: int
    decisions: tuple[Decision, ...] = ()

    def kept(self) -> Tensor:
        """The share of patches that blocks run on, averaged over all blocks: B."""
        ends = [decision.block for decision in self.decisions[1:]] + [self.depth]
        shares = [decision.kept * (end - decision.block) for decision, end in zip(self.decisions, ends, strict=True)]
        return (torch.stack(shares).sum(dim=0) + self.decisions[0].block) / self.depth

    def log_probability(self) -> Tensor:
        """Of all sampled decisions: B."""
        return torch.stack([decision.log_probability for decision in self.decisions]).sum(dim=0)


@dataclass(frozen=True)
class IARED2(Adaptive):
    """r other than 0 gives a block an interpreter, which decides how many tokens it drops.

    keep: the target share of kept patches, 0 for as few as possible. penalty: the cost of a wrong prediction.
    weight: of the loss. group: None, or the one group (1, 2, 3) that learns: earlier ones decide as in inference, later
        ones keep every token.
    """

    keep: float = 0.7
    penalty: float = 1.0
    weight: float = 1.0
    group: int | None = None

    name: ClassVar[str] = "ia_red2"
    summary: ClassVar[str] = "IA-RED2 (NeurIPS 2021), learned: interpreters drop tokens before three blocks, by reward"
    drops: ClassVar[bool] = True
    learned: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(1, keep=self.keep)
        check_number(penalty=self.penalty, weight=self.weight)
        check_whole(1, optional=True, group=self.group)

    def resolve(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def default_blocks(self, depth: int) -> tuple[int, ...]:
        """The first blocks of three groups: 0, 4, 8 of twelve."""
        return tuple(sorted({round(depth * part / 3) for part in range(3)}))

    def make_layers(self, shapes: Sequence[BlockShape], schedule: Sequence[Amount]) -> nn.ModuleDict:
        chosen = [index for index, amount in enumerate(schedule) if amount]
        return nn.ModuleDict({str(index): Interpreter(shapes[index].channels, shapes[index].heads) for index in chosen})

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if not ctx.amount:
            return BlockOutput(run_unfused(block, x, sizes), sizes, method_state=ctx.method_state)
        policy: Policy = ctx.method_state or Policy(x.shape[1] - ctx.protected, ctx.depth)
        kept, decision = self._decide(x, present(x, sizes), policy, ctx)
        policy = replace(policy, decisions=(*policy.decisions, decision))
        ragged = pack_ragged(kept, protected=ctx.protected)
        if ragged is None:
            return BlockOutput(run_unfused(block, x, sizes), sizes, method_state=policy)
        block = block.fused(ragged.assignment, ragged.weights)
        x = run_unfused(block, ragged.gather(x), ragged.sizes)
        return BlockOutput(x, ragged.sizes, ragged.assignment, ragged.weights, method_state=policy)

    def _decide(self, x: Tensor, present: Tensor, policy: Policy, ctx: BlockContext) -> tuple[Tensor, Decision]:
        """Which of the tokens that are not padding (B N) are kept, B N, bool; and the decision's record."""
        probability = self.layers_of(ctx)(x.detach())
        group = len(policy.decisions) + 1
        learns = ctx.training and self.group in (None, group)
        chance = _SHARPNESS * probability.clamp(*_SURE).logit()
        kept = chance.detach().sigmoid().bernoulli().bool() if learns else ~(probability <= 0.5)  # NaN is kept
        if self.group is not None and group > self.group:
            kept = torch.ones_like(kept)
        patches = present & (torch.arange(x.shape[1], device=x.device) >= ctx.protected)
        log_probability = probability.new_zeros(len(x))
        if ctx.training:  # groups that do not learn take part with weight 0: every parameter needs a gradient
            chosen = F.logsigmoid(torch.where(kept, chance, -chance))
            log_probability = learns * (chosen * patches).sum(dim=1) / policy.patches
        share = (kept & patches).sum(dim=1) / policy.patches
        return (kept & present) | (present & ~patches), Decision(ctx.index, share, log_probability)

    def extra_loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Any], *, infer: Callable[[], Any]
    ) -> Tensor:
        """The loss beside the cross-entropy; see `ExtraLoss` in `mctf.train.objective`."""
        sampled = branches[0]
        policy: Policy | None = sampled.method_states[-1]
        if policy is None:
            return sampled.logits.new_zeros(())
        greedy = infer()
        inferred = greedy.method_states[-1].kept()
        shift = inferred.mean() - policy.kept().mean()
        advantage = self.reward(sampled.logits, policy.kept() + shift, labels)
        advantage = advantage - self.reward(greedy.logits, inferred, labels)
        return -self.weight * (advantage * policy.log_probability()).mean()

    @torch.no_grad()
    def reward(self, logits: Tensor, kept: Tensor, labels: Tensor) -> Tensor:
        """The reward of predictions (B K) at this share of kept patches (B): B."""
        gain = 1 - (self.keep + (kept - self.keep).abs()).square()
        return gain.where(logits.argmax(dim=1) == labels, -self.penalty)

    def cost_of(self, shape: BlockShape, tokens: int, num_remaining: int, *, protected: int) -> Cost:
        cost = shape.plain(num_remaining) + Interpreter.cost(shape.channels, shape.heads, tokens)
        return Cost(paper=cost, run=cost)


class Interpreter(nn.Module):
    """Keep probability of each token, from its product with the class token."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        width = channels // heads
        self.query = nn.Linear(channels, heads * width)
        self.key = nn.Linear(channels, heads * width)
        for linear in (self.query, self.key):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.constant_(linear.bias, (_START / width**0.5) ** 0.5)  # q . k / sqrt(d) = _START

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities from tokens B N C, the class token first: B N, in at least float32."""
        h = F.layer_norm(x, x.shape[-1:])
        q = self.query(h[:, :1]).unflatten(2, (self.heads, -1)).transpose(1, 2)  # B H 1 d
        k = self.key(h).unflatten(2, (self.heads, -1)).permute(0, 2, 3, 1)  # B H d N
        logits = at_least_float32(q @ k)[:, :, 0] / q.shape[-1] ** 0.5
        return logits.sigmoid().mean(dim=1)

    @staticmethod
    def cost(channels: int, heads: int, tokens: int) -> int:
        """Multiply-adds for so many tokens."""
        width = channels // heads * heads
        return tokens * (NORM - 1) * channels + (tokens + 1) * channels * width + tokens * width
