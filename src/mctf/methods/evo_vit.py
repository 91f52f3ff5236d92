"""Evo-ViT: half of the patches, those the class token attends to, go through a block; the others wait where they are.

Xu et al., "Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision Transformer", AAAI 2022. The first third of the
blocks runs as ever. The global class attention g is the class token's attention to each patch in the block before;
from then on it is the mean of itself and of each block's attention, for the patches that the block has seen. In the
other blocks the patches with the largest g and the protected tokens pass through attention and MLP, while the rest,
the placeholders, are left as they are and keep their places. The number of tokens between blocks does not change. (If
the user has a block in between run whole, its attention counts where the block after it chooses.)

Patches are chosen at one third and two thirds of the depth (blocks 4 and 8 of twelve), and the choice holds for the
stage. The authors' training chooses in every block first, and by stages in its last third: see `every_block`.

Choices: placeholders are left alone as in the released code for DeiT, without the paper's representative token. The
model keeps its own head, most often that of the class token; the authors train a second one on the mean of the
patches, and use it alone. There is nothing to learn beside the model's own weights, and no further loss.

Axes: B images, N tokens, M of them in the block, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from ..core.flops import BlockShape, Cost
from ..core.schedule import Amount, ReductionSpec
from ..core.selection import TopK, keep_topk
from ..errors import MctfError
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, check_class_token


@dataclass(frozen=True)
class _Attention:
    """Handed on from block to block. whole: B N, the global class attention. chosen: for the present stage."""

    whole: Tensor
    chosen: TopK | None = None

    def after(self, chosen: TopK, seen: Tensor) -> "_Attention":
        """After a block that the chosen tokens went through, where they received so much attention: B M."""
        mixed = (self.whole.gather(1, chosen.index) + seen) / 2
        return _Attention(self.whole.scatter(1, chosen.index, mixed), chosen)


@dataclass(frozen=True)
class EvoViT(Method):
    """r is the share, or the number, of the patches that wait: 0.5 by default.

    every_block: in training, choose anew in every block; inference chooses by stages in any case.
    """

    every_block: bool = False

    name: ClassVar[str] = "evo_vit"
    summary: ClassVar[str] = "Evo-ViT (AAAI 2022): half of the patches wait outside of a block, none is lost"
    default_r: ClassVar[ReductionSpec] = 0.5

    def __post_init__(self) -> None:
        check_bool(every_block=self.every_block)

    def resolve(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def default_blocks(self, depth: int) -> range:
        return range(_stages(depth)[0], depth)

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """How many patches wait, as long as one does not."""
        asked = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(asked, tokens - protected - 1))

    def num_remaining(self, tokens: int, r: int) -> int:
        return tokens

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        attention: _Attention | None = ctx.method_state
        if ctx.r == 0 and not ctx.next_reduces:
            return BlockOutput(block.plain(x), None, method_state=attention)
        if ctx.r == 0:
            x, seen = _through(block, x)
            whole = seen if attention is None else (attention.whole + seen) / 2
            return BlockOutput(x, None, informativeness=whole, method_state=_Attention(whole))
        if attention is None:
            raise MctfError("evo_vit chooses by the attention of the block before: let r begin after block 0")
        return self._evolve(block, x, attention, ctx)

    def _evolve(self, block: BlockOps, x: Tensor, attention: _Attention, ctx: BlockContext) -> BlockOutput:
        """The chosen tokens through the block, and back to their places."""
        chosen, keep = attention.chosen, x.shape[1] - ctx.protected - ctx.r
        if chosen is None or chosen.assignment.count != ctx.protected + keep or self._chooses(ctx):
            chosen = keep_topk(attention.whole[:, ctx.protected :], keep, protected=ctx.protected)
        inside = block.fused(chosen.assignment, chosen.weights)
        evolved, seen = _through(inside, chosen.gather(x))
        index = chosen.index[..., None].expand_as(evolved)
        x = x.scatter(1, index, evolved.to(x.dtype))
        return BlockOutput(x, None, informativeness=attention.whole, method_state=attention.after(chosen, seen))

    def _chooses(self, ctx: BlockContext) -> bool:
        """Whether a block chooses even though the one before has done so."""
        return ctx.index in _stages(ctx.depth) or (ctx.training and self.every_block)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        cost = shape.plain(tokens - r)
        return Cost(paper=cost, run=cost)


def _stages(depth: int) -> Sequence[int]:
    """The blocks in which patches are chosen: 4 and 8 of twelve."""
    return tuple(max(1, round(depth * part / 3)) for part in (1, 2))


def _through(block: BlockOps, x: Tensor) -> tuple[Tensor, Tensor]:
    """A block by its pieces, and the attention of the class token in it: B M C and B M."""
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    context, received = block.attend_with_received(q, k, v, sizes=None, rows="class")
    return block.add_mlp(block.add_attention(x, block.finish_context(context, h))), received.sum(dim=1)
