"""The pieces of a transformers encoder layer, through its own modules.

Axes: B images, H heads, N tokens, M tokens after fusion, P patches, C channels, d channels a head.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core.assignment import Assignment
from ..core.positions import TokenPositions, positions_after
from ..methods.base import run_pieces
from .base import SoftmaxAttention
from .hf_layers import parts_of


class LayerOps(SoftmaxAttention):
    """A layer that takes nothing but tokens.

    follows: names of what else a layer may be told, because its meaning follows the fused tokens here.
    """

    follows: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, layer: Any, arguments: Mapping[str, Any], positions: TokenPositions | None, *, prefix: int
    ) -> None:
        self.layer = layer
        self.arguments = arguments
        self.positions = positions
        self.prefix = prefix
        self.parts = parts_of(layer)

    @property
    def scale(self) -> float:
        return self.parts.scale

    @property
    def attention_dropout(self) -> float:
        return self.parts.dropout

    def plain(self, x: Tensor) -> Tensor:
        output = type(self.layer).forward(self.layer, x, **self.arguments)
        return output[0] if isinstance(output, tuple) else output

    def norm1(self, x: Tensor) -> Tensor:
        return self.parts.norm1(x)

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.split_heads(self.parts.query(h)), self.split_heads(self.parts.key(h))

    def values(self, h: Tensor) -> Tensor:
        return self.parts.value(h)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.queries_keys(h)
        return q, k, self.split_heads(self.values(h))

    def split_heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(2, (self.parts.heads, self.parts.head_size)).transpose(1, 2)

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        for step in self.parts.after_attention:
            context = step(context)
        return context + x

    def add_mlp(self, x: Tensor) -> Tensor:
        h = self.parts.norm2(x)
        for step in self.parts.mlp:
            h = step(h)
        return h + x


class PlacedLayerOps(LayerOps):
    """A layer that is told anew where its tokens are."""

    def plain(self, x: Tensor) -> Tensor:
        return super().plain(x) if self.positions is None else run_pieces(self, x, None)

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        positions = positions_after(self.positions, assignment, weights)
        return type(self)(self.layer, self.arguments, positions, prefix=self.prefix)


class RotaryLayerOps(PlacedLayerOps):
    """DINOv3: queries and keys of patches are turned by their positions; leading tokens are not."""

    follows = frozenset(["position_embeddings"])

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().queries_keys(h)
        cos, sin = (self._table(table, fill) for table, fill in zip(self._tables(), (1.0, 0.0), strict=True))
        return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin

    def _tables(self) -> tuple[Tensor, Tensor]:
        cos, sin = self.arguments["position_embeddings"]
        return cos, sin

    def _table(self, table: Tensor, fill: float) -> Tensor:
        """Rows for leading tokens added, and the mean over the positions of each token: P d -> N d or B 1 M d."""
        rows = torch.cat([table.new_full((self.prefix, table.shape[-1]), fill), table])
        return rows if self.positions is None else self.positions.mean(rows)[:, None]


class BiasedLayerOps(PlacedLayerOps):
    """BEiT: attention logits have a bias for each pair of positions, of the layer, shared by all layers, or both."""

    # the mask carries the bias that layers share; nobody else gets one past the tower
    follows = frozenset(["relative_position_bias", "attention_mask", "resolution", "interpolate_pos_encoding"])
    _known: Tensor | None = None

    @property
    def bias(self) -> Tensor | None:
        """H N N, or B H M M once tokens were fused; None for a layer without."""
        if self._known is None:
            every = self._every_pair()
            self._known = every if every is None or self.positions is None else self.positions.mean_bias(every)
        return self._known

    def _every_pair(self) -> Tensor | None:
        """Of all positions of the input: 1 H N N."""
        shared = self.arguments.get("relative_position_bias", self.arguments.get("attention_mask"))
        table = self.parts.relative_position_bias
        if table is None:
            return shared
        height, width = self.arguments["resolution"]
        patch = self.parts.config.patch_size
        window = (height // patch, width // patch)
        interpolates = self.arguments.get("interpolate_pos_encoding", False)
        own = table(window, interpolates, dim_size=self.prefix + window[0] * window[1])
        return own if shared is None else own + shared


def _half_turned(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) for the two halves of the channels."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
