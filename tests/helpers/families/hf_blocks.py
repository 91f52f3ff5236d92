"""The layers of transformers for the slow reference, on their own modules.

Axes: H heads, N tokens, P positions of the input, d channels per head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from helpers.reference_blocks import Cover, Pieces, heads_of, mean_pairs, mean_rows


def part(module: Any, *names: str) -> Any:
    """The one of these parts that the module has; None where it has none."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


class Layer(Pieces):
    """A pre-norm layer, in the flat layout or with attention and MLP split over more modules."""

    def __init__(self, layer: Any) -> None:
        self.block = layer
        self.attn = part(layer, "attention", "self_attn")
        self.inner = getattr(self.attn, "attention", self.attn)
        self.heads = part(self.inner, "num_attention_heads", "num_heads")

    def read(self, x: Tensor) -> Tensor:
        return part(self.block, "layernorm_before", "norm1", "layer_norm1")(x)

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k = self.projected(0, read, "q_proj", "query"), self.projected(1, read, "k_proj", "key")
        if hasattr(self.inner, "q_norm"):  # InternVL's, of all heads together
            q, k = self.inner.q_norm(q), self.inner.k_norm(k)
        return heads_of(q, self.heads), heads_of(k, self.heads)

    def values(self, read: Tensor) -> Tensor:
        return heads_of(self.projected(2, read, "v_proj", "value"), self.heads)

    def projected(self, number: int, read: Tensor, *names: str) -> Tensor:
        """q, k or v, of which BLIP has one matrix."""
        if not hasattr(self.inner, "qkv"):
            return part(self.inner, *names)(read)
        return self.inner.qkv(read).unflatten(-1, (3, -1))[..., number, :]

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        split = self.attn is not self.inner
        project = (
            self.attn.output.dense if split else part(self.attn, "o_proj", "out_proj", "projection_layer", "projection")
        )
        return x + self.scaled(project(context), "layer_scale1", "lambda_1")

    def add_mlp(self, x: Tensor) -> Tensor:
        h = part(self.block, "layernorm_after", "norm2", "layer_norm2")(x)
        split = hasattr(self.block, "intermediate")
        h = self.block.output.dense(self.block.intermediate(h)) if split else self.block.mlp(h)
        return x + self.scaled(h, "layer_scale2", "lambda_2")

    def scaled(self, x: Tensor, *names: str) -> Tensor:
        scale = part(self.block, *names)
        if isinstance(scale, nn.Module):
            scale = scale.lambda1
        return x if scale is None else x * scale


class Rotary(Layer):
    """DINOv3's layer; tables: cosines and sines of every patch, P d."""

    def __init__(self, layer: Any, tables: tuple[Tensor, Tensor], prefix: int) -> None:
        super().__init__(layer)
        cos, sin = tables
        self.cos = torch.cat([torch.ones(prefix, cos.shape[1], dtype=cos.dtype), cos])
        self.sin = torch.cat([torch.zeros(prefix, sin.shape[1], dtype=sin.dtype), sin])

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k = super().queries_keys(read, cover)
        return self.rotated(q, cover), self.rotated(k, cover)

    def rotated(self, x: Tensor, cover: Cover) -> Tensor:
        """Channels c and c + d/2 of a head are a pair: (a, b) -> (a cos - b sin, b cos + a sin)."""
        cos, sin = mean_rows(self.cos, cover), mean_rows(self.sin, cover)
        half = x.shape[2] // 2
        a, b = x[..., :half], x[..., half:]
        first = a * cos[:, :half] - b * sin[:, :half]
        return torch.cat([first, b * cos[:, half:] + a * sin[:, half:]], dim=2)


class Biased(Layer):
    """BEiT's layer; shared: biases that all layers have, H P P each."""

    def __init__(self, layer: Any, shared: list[Tensor]) -> None:
        super().__init__(layer)
        own = part(layer, "relative_position_bias")
        own = part(self.inner, "relative_position_bias") if own is None else own
        self.pairs = sum([*shared, beit_pairs(own)])

    def bias(self, cover: Cover) -> Tensor:
        return mean_pairs(self.pairs, cover)


def beit_pairs(bias: Any) -> Tensor:
    """The bias of each pair of positions, the class token and then an 8 by 8 grid: H P P.

    The table lists displacements row by row, then class to patch, patch to class, and class to itself.
    """
    table = bias.relative_position_bias_table
    rows = torch.empty(65, 65, dtype=torch.long)
    for query in range(64):
        for key in range(64):
            down, right = query // 8 - key // 8, query % 8 - key % 8
            rows[1 + query, 1 + key] = (down + 7) * 15 + right + 7
    rows[0, :], rows[:, 0], rows[0, 0] = len(table) - 3, len(table) - 2, len(table) - 1
    return table[rows].permute(2, 0, 1)
