"""Where the tokens of a block come from: the positions of the input that each of them covers, and by what share.

Some models tell every block anew where its tokens are (rotary tables, relative position biases). Such numbers belong
to positions of the input, so a fused token takes the mean over its positions, weighted as its content was: attention logits
are linear in them, so the logits of a fused token are the mean over the positions it covers.

Axes: B images, N positions of the input, M tokens, K numbers a position.
"""

from dataclasses import dataclass

from torch import Tensor

from .assignment import Assignment


@dataclass(frozen=True)
class TokenPositions:
    """What the present tokens stand for.

    source: B N -> M, the token that covers each position.
    shares: B N, float32, weight of each position in its token, summing to 1 over a token; None where nobody asks.
    """

    source: Assignment
    shares: Tensor | None = None

    def compose(self, later: Assignment, weights: Tensor | None) -> "TokenPositions":
        """After one more fusion with these pooling weights (B M); without weights, shares are given up."""
        if self.shares is None or weights is None:
            return TokenPositions(self.source.compose(later))
        return TokenPositions(self.source.compose(later), self.shares * self.source.unpool(_shares(later, weights)))

    def mean(self, table: Tensor) -> Tensor:
        """Mean of a table over the positions of each token: N K or B N K -> B M K."""
        if self.shares is None:
            raise ValueError("shares were not kept: the host must say that it carries positions")
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


def initial_positions(assignment: Assignment, weights: Tensor | None) -> TokenPositions:
    """The positions after the first fusion."""
    return TokenPositions(assignment, None if weights is None else _shares(assignment, weights))


def positions_after(before: TokenPositions | None, assignment: Assignment, weights: Tensor | None) -> TokenPositions:
    """The positions after one more fusion; None before while nothing was fused."""
    return initial_positions(assignment, weights) if before is None else before.compose(assignment, weights)


def _shares(assignment: Assignment, weights: Tensor) -> Tensor:
    return weights / assignment.unpool(assignment.total(weights))
