"""What EViT and BAT have in common: at a few blocks the class token's attention ranks the tokens, and some become one.

Both act between attention and MLP, at a quarter, half and three quarters of the depth (blocks 3, 6, 9 of twelve), and
bring N tokens to the same number: of the n unprotected ones ceil(kappa n) + 1 remain, kappa being the keep rate. In
terms of r, kappa = 1 - r for a ratio; a count is the number of tokens fewer after the block.

Axes: B images, N tokens, n of them unprotected, C channels.
"""

from abc import abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from ..core.cost import BlockShape, Cost
from ..core.schedule import Entry, ReductionSpec, fast_blocks, tokens_asked
from .base import BlockOps, Method, Step, Turn, check_class_token


class Attentive(Method):
    """A method that reads the class token's row of the attention and reduces by it before the MLP."""

    default_r: ClassVar[ReductionSpec] = 0.3

    @property
    def added(self) -> int:
        """Tokens made of the inattentive ones that come on top of the ceil(kappa n) of the keep rate."""
        return 1

    def suited(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def default_blocks(self, depth: int) -> tuple[int, ...]:
        return fast_blocks(depth)

    def asked(self, entry: Entry, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        inattentive = tokens_asked(entry, tokens - protected)  # n - ceil(kappa n) for a ratio
        return inattentive if isinstance(entry, int) else max(0, inattentive - self.added)

    def leaving(self, entry: Entry, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """What is asked, as long as one attentive token remains."""
        asked = self.asked(entry, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(asked, tokens - protected - 1 - self.added))

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, turn: Turn) -> Step:
        """Plain attention on all N tokens, then the reduction, then the MLP on what remains."""
        if turn.r == 0:
            return Step(block.plain(x), sizes)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context, received = block.attend_and_look(q, k, v, sizes=None, rows="class")
        a = received.sum(dim=1)
        step = self.reduce(block.add_attention(x, block.finish_context(context, h)), a, sizes, turn)
        return Step(block.add_mlp(step.x), step.sizes, step.assignment, step.weights, a)

    @abstractmethod
    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, turn: Turn) -> Step:
        """Which tokens of x (B N C) become one, by the class token's attention a (B N, without gradient)."""

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        cost = shape.attention_branch(tokens) + shape.mlp_branch(tokens - r)
        return Cost(paper=cost, run=cost)
