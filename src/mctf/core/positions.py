"""Positions of fused tokens: the input positions that each token covers, and their shares in it.

Some models pass positions to every block anew (rotary tables, relative position biases). Such numbers belong to input
positions, so a fused token takes the mean over the positions it covers, weighted as its content was. Attention logits
are linear in them, so the logits of a fused token are the mean over its positions.

Axes: B images, N input positions, M tokens, H heads, K numbers per position.
"""

from dataclasses import dataclass

from torch import Tensor

from .assignment import Assignment


@dataclass(frozen=True)
class TokenPositions:
    """The input positions of the current tokens.

    source: B N -> M, the token that covers each position.
    shares: B N, at least float32, weight of each position in its token, summing to 1 per token; None where they are
    not needed.
    """

    source: Assignment
    shares: Tensor | None = None

    def compose(self, later: Assignment, weights: Tensor | None) -> "TokenPositions":
        """After one more reduction with these pooling weights (B M); without weights, shares are given up."""
        source = self.source.compose(later)
        if self.shares is None or weights is None:
            return TokenPositions(source)
        return TokenPositions(source, self.shares * self.source.unpool(later.shares(weights)))

    def mean(self, table: Tensor) -> Tensor:
        """Mean of a table over the positions of each token: N K or B N K -> B M K."""
        if self.shares is None:
            raise ValueError("the shares of positions were not kept: the host's `uses_positions` must be True")
        rows = table.expand(self.source.slots.shape[0], -1, -1) * self.shares[..., None]
        return self.source.sum(rows).to(table.dtype)

    def mean_bias(self, table: Tensor) -> Tensor:
        """Mean of a table of pairs over the positions of two tokens: H N N or B H N N -> B H M M."""
        batch, positions = self.source.slots.shape
        heads = table.shape[-3]
        rows = table.expand(batch, -1, -1, -1).permute(0, 2, 1, 3).flatten(2)  # B N (H N)
        half = self.mean(rows).unflatten(2, (heads, positions))  # B M H N
        columns = self.mean(half.permute(0, 3, 1, 2).flatten(2))  # B M (M H)
        return columns.unflatten(2, (self.source.count, heads)).permute(0, 3, 2, 1)


def positions_after(before: TokenPositions | None, assignment: Assignment, weights: Tensor | None) -> TokenPositions:
    """The positions after one more reduction; before is None while nothing was fused."""
    if before is not None:
        return before.compose(assignment, weights)
    return TokenPositions(assignment, None if weights is None else assignment.shares(weights))
