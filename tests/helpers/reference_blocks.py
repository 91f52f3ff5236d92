"""The pieces of a block for the slow reference: one image, one block, plain formulas on the host's own modules.

A family of models gives one `Pieces` a block. Where a block is told the places of its tokens anew (rotary tables,
relative position biases), a fused token takes the mean over the places it covers, weighted as its content was.

Axes: H heads, N tokens, P places of the input, d channels a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

Cover = list[dict[int, float]]  # for each token the places it covers, and the share of each


class Pieces:
    """A pre-norm block with plain softmax attention; subclasses change what theirs does otherwise."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.attn = block.attn

    def read(self, x: Tensor) -> Tensor:
        """What attention reads."""
        return self.block.norm1(x)

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        """H N d each."""
        raise NotImplementedError

    def values(self, read: Tensor) -> Tensor:
        """H N d."""
        raise NotImplementedError

    def bias(self, cover: Cover) -> Tensor | float:
        """What is added to the logits of the present tokens, H N N."""
        return 0.0

    def attention_map(self, q: Tensor, k: Tensor, sizes: list[float], cover: Cover) -> Tensor:
        """A = softmax(q kT / sqrt(d) + bias + log s of the key), H N N."""
        logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[2]) + self.bias(cover)
        return (logits + torch.tensor(sizes, dtype=q.dtype).log()).softmax(dim=2)

    def finish(self, context: Tensor, read: Tensor) -> Tensor:
        """What some blocks do between attention and its output projection: a norm, a gate."""
        return context

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        raise NotImplementedError

    def add_mlp(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class PostNormed(Pieces):
    """A block whose norms follow attention and MLP; it goes before the pieces of its pre-norm twin."""

    def read(self, x: Tensor) -> Tensor:
        return x

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.norm1(self.attn.proj(context))

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + self.block.norm2(self.block.mlp(x))


def heads_of(flat: Tensor, heads: int) -> Tensor:
    """N (H d) -> H N d."""
    return flat.view(len(flat), heads, -1).transpose(0, 1)


def normed_and_gated(attn: Any, context: Tensor, read: Tensor) -> Tensor:
    """timm's `finish`: a norm, and a gate where its version has one."""
    context = attn.norm(context)
    gate = getattr(attn, "gate", None)
    return context if gate is None else context * torch.sigmoid(gate(read))


def scaled(y: Tensor, gamma: Tensor | None) -> Tensor:
    """A branch as timm's BEiT and EVA scale it, where they do."""
    return y if gamma is None else gamma * y


def mean_rows(table: Tensor, cover: Cover) -> Tensor:
    """Each token's mean over the rows of its places: … P K -> … N K."""
    means = [sum(share * table[..., place, :] for place, share in places.items()) for places in cover]
    return torch.stack(means, dim=-2)


def mean_pairs(table: Tensor, cover: Cover) -> Tensor:
    """Mean over the pairs of places that two tokens cover: H P P -> H N N."""
    return mean_rows(mean_rows(table, cover).transpose(1, 2), cover).transpose(1, 2)
