"""One reduction of tokens as one integer vector: the output slot of every input token.

Everything downstream reads this vector: pooling is a weighted mean over each slot, sizes are sums over it, unpooling is
a gather by it, and the map through many blocks is one vector composed with the next.

Axes: B images, N tokens before, M slots after, C channels.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from . import portable


@dataclass(frozen=True)
class Assignment:
    """The slot of each token.

    slots: B N, int64, values in 0 .. count - 1; every slot is used by at least one token of its image, unless it is
    padding.
    count: M, the number of slots, the same for all images of the batch.
    order, start: B N and B M+1, int32, optional: tokens sorted by slot, and where each slot begins in that order.
    split: optional, for sums in an exported graph; see `portable.SlotSplit`.
    """

    slots: Tensor
    count: int
    order: Tensor | None = None
    start: Tensor | None = None
    split: portable.SlotSplit | None = None

    @classmethod
    def of_roots(cls, roots: Tensor, count: int, *, protected: int) -> "Assignment":
        """Tokens that join another (its index among the unprotected ones: B n, of tokens that stay their own).

        Protected tokens come first; tokens that stay keep their order. count: how many stay.
        """
        stays = roots == torch.arange(roots.shape[1], device=roots.device)
        slots = protected + (stays.cumsum(1) - 1).gather(1, roots)
        return cls(portable.prepend_protected(slots, protected), protected + count)

    def members(self) -> tuple[Tensor, Tensor]:
        """Tokens sorted by slot (B N) and where each slot begins there (B M+1), both int32."""
        if self.order is not None and self.start is not None:
            return self.order, self.start
        order = self.slots.argsort(dim=1, stable=True)
        counts = self.total(torch.ones_like(self.slots))
        return order.int(), F.pad(counts.cumsum(1), (1, 0)).int()

    def total(self, values: Tensor) -> Tensor:
        """Sum of the values (B N) in each slot: B M."""
        if portable.exporting():
            return self.sum(values[..., None])[..., 0]
        zeros = values.new_zeros(values.shape[0], self.count)
        return zeros.scatter_add(1, self.slots, values)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the tokens in each slot: B N C -> B M C."""
        if portable.exporting():
            return portable.sum_slots(x, self._split)
        batch, _, channels = x.shape
        rows = x.flatten(0, 1)
        index = self._flat_slots()[:, None].expand_as(rows)
        return (
            rows.new_zeros(batch * self.count, channels).scatter_add(0, index, rows).view(batch, self.count, channels)
        )

    def shares(self, weights: Tensor) -> Tensor:
        """Each token's share of its slot's weight, B N: w_i / sum of w over the slot; 0 where that sum is 0."""
        total = self.total(weights)
        return weights / self.unpool(total.where(total > 0, 1))

    def pool(self, x: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of the tokens in each slot: sum_i w_i x_i / sum_i w_i, B M C; 0 where all weights are 0.

        x: B N C; weights: B N, non-negative, without gradient. Sums run in the wider of the two dtypes.
        """
        shares = self.shares(weights)
        # On a CPU, bags of tokens are as fast as scattering, and up to 30 times as fast where rows are many or wide.
        # Not in a graph, whose batch may vary, nor for gradients, nor in mixed dtypes.
        eager = x.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        if eager and x.dtype == shares.dtype and not (torch.is_grad_enabled() and x.requires_grad):
            order, start = self._bags
            rows, row_shares = x.flatten(0, 1), shares.flatten()[order]
            pooled = F.embedding_bag(order, rows, start, mode="sum", per_sample_weights=row_shares)
            return pooled.view(x.shape[0], self.count, x.shape[2])
        return self.sum(x * shares[..., None]).to(x.dtype)

    @cached_property
    def _split(self) -> portable.SlotSplit:
        return portable.split_slots(self.slots, self.count) if self.split is None else self.split

    @cached_property
    def _bags(self) -> tuple[Tensor, Tensor]:
        """All tokens of the batch sorted by slot, B*N, and where each slot begins there, B*M."""
        batch, tokens = self.slots.shape
        image = torch.arange(batch, device=self.slots.device)[:, None] * tokens
        order, start = self.members()
        return (order + image).flatten(), (start[:, :-1] + image).flatten()

    def max_pool(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the tokens in each slot: B M C."""
        batch, _, channels = x.shape
        floor = x.new_full((batch, self.count, channels), float("-inf"))
        index = self.slots[..., None].expand_as(x)
        return floor.scatter_reduce(1, index, x, "amax")

    def unpool(self, fused: Tensor) -> Tensor:
        """Each token takes the value of its slot: B M … -> B N …."""
        batch, tokens = self.slots.shape
        if portable.exporting():
            return portable.gather_rows(fused, self.slots)
        rows = fused.reshape(batch * self.count, fused.shape[2:].numel()).index_select(0, self._flat_slots())
        return rows.view(batch, tokens, *fused.shape[2:])

    def first_of_slot(self, x: Tensor) -> Tensor:
        """The first token of each slot, B N C -> B M C: undoes `unpool` exactly, gradient included.

        Padding, which no token maps to, takes the last token.
        """
        batch, tokens = self.slots.shape
        if portable.exporting():
            return portable.gather_rows(x, self._split.order[:, : self.count])
        position = torch.arange(tokens, device=x.device).expand(batch, -1)
        last = position.new_full((batch, self.count), tokens - 1)
        first = last.scatter_reduce(1, self.slots, position, "amin")
        return x.gather(1, first[..., None].expand(-1, -1, x.shape[-1]))

    def compose(self, later: "Assignment") -> "Assignment":
        """This reduction followed by a later one, as one: slots of the later, per token of this."""
        return Assignment(later.slots.gather(1, self.slots), later.count)

    def _flat_slots(self) -> Tensor:
        """Slots numbered through the whole batch, B*N. Moving rows of a flat matrix is ~10x faster on a CPU."""
        offsets = torch.arange(self.slots.shape[0], device=self.slots.device) * self.count
        return (self.slots + offsets[:, None]).flatten()


def joint_weights(weights: Tensor | None, sizes: Tensor, by_size: bool) -> Tensor:
    """Each token's weight in its slot, B N: its weight, times its size if `by_size`; 1 where there is neither."""
    if weights is None:
        return sizes if by_size else torch.ones_like(sizes)
    return weights * sizes if by_size else weights
