"""Multiply-adds of a transformer block, in fvcore's convention.

One FLOP per multiply-add, five per element of a LayerNorm, none for softmax, activations and additions. Two accounts
are kept apart: `paper`, the published formula behind the paper's tables, and `run`, what this implementation executes.

Axes: N tokens before fusion, M after, C channels, H heads, d channels per head.
"""

from dataclasses import dataclass

NORM = 5  # fvcore's cost of one LayerNorm element


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of one block under the two accounts."""

    paper: int
    run: int


@dataclass(frozen=True)
class BlockShape:
    """The sizes that decide a block's cost, all per token.

    channels: C, the residual stream. attention: H * d, usually C as well. heads: H.
    mlp: multiply-adds of the MLP. norms: elements of one pre- or post-norm that fvcore counts, usually C.
    norm_first: whether the norms precede attention and MLP. head_norms: elements of the q and k norms together.
    context: extra multiply-adds on attention's output before its projection (norm, gate).
    shared: number of query heads per key-value head. mixing: extra multiply-adds per pair of tokens in the attention
    map (talking heads).
    """

    channels: int
    attention: int
    heads: int
    mlp: int
    norms: int
    norm_first: bool = True
    head_norms: int = 0
    context: int = 0
    shared: int = 1
    mixing: int = 0

    def projection(self) -> int:
        """One of q and the output projection, for one token; k and v cost as much unless heads share them."""
        return self.channels * self.attention

    def queries_keys(self, tokens: int) -> int:
        return tokens * (self.projection() + self.projection() // self.shared + NORM * self.head_norms)

    def values(self, tokens: int) -> int:
        return tokens * self.projection() // self.shared

    def product(self, rows: int, columns: int) -> int:
        """A v over all heads."""
        return rows * columns * self.attention

    def map(self, rows: int, columns: int) -> int:
        """The attention map A: q kT over all heads, and the mixing of heads."""
        return self.product(rows, columns) + rows * columns * self.mixing

    def finish_context(self, tokens: int) -> int:
        return tokens * self.context

    def project(self, tokens: int) -> int:
        """The output projection and, in post-norm blocks, the norm after it."""
        return tokens * (self.projection() + (0 if self.norm_first else NORM * self.norms))

    def norm(self, tokens: int) -> int:
        """The norm before attention."""
        return tokens * NORM * self.norms if self.norm_first else 0

    def mlp_branch(self, tokens: int) -> int:
        return tokens * (self.mlp + NORM * self.norms)

    def attention_branch(self, tokens: int) -> int:
        inputs = self.norm(tokens) + self.queries_keys(tokens) + self.values(tokens)
        attention = self.map(tokens, tokens) + self.product(tokens, tokens)
        return inputs + attention + self.finish_context(tokens) + self.project(tokens)

    def first(self, tokens: int, count: int) -> int:
        """The whole block for the first `count` tokens, which attend to all."""
        inputs = self.norm(tokens) + self.queries_keys(tokens) + self.values(tokens)
        queries = (tokens - count) * (self.projection() + NORM * self.head_norms // 2)
        attention = self.map(count, tokens) + self.product(count, tokens)
        return inputs - queries + attention + self.finish_context(count) + self.project(count) + self.mlp_branch(count)

    def plain(self, tokens: int) -> int:
        """The whole block without reduction."""
        return self.attention_branch(tokens) + self.mlp_branch(tokens)


def split_product(tokens: int, channels: int) -> int:
    """Similarities between the two halves of all tokens, as the paper counts them."""
    return -(-tokens // 2) * (tokens // 2) * channels
