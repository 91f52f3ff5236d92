"""A host for the model of own_vit.py, explained in docs/adding_a_host.md.

Run it to see the model fused: python examples/own_host.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mctf
from mctf.hosts import (
    Architecture,
    BlockShape,
    FusedStack,
    Host,
    SoftmaxAttention,
    TokenPositions,
    check_whole,
    count_on_meta,
    linear_slice,
    macs_per_token,
)
from own_vit import Layer, OwnViT


class LayerOps(SoftmaxAttention):
    """The pieces of a layer, through its own modules.

    Axes: B images, H heads, N tokens, C channels, d channels per head.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.attention = layer.attention
        self.width = layer.attention.outward.in_features

    @property
    def scale(self) -> float:
        return (self.width // self.attention.heads) ** -0.5

    def plain(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def norm1(self, x: Tensor) -> Tensor:
        return self.layer.norms[0](x)

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q, k = linear_slice(self.attention.inward, h, 0, 2 * self.width).chunk(2, dim=2)
        return self.split_heads(q), self.split_heads(k)

    def values(self, h: Tensor) -> Tensor:
        return linear_slice(self.attention.inward, h, 2 * self.width, 3 * self.width)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split_heads, self.attention.inward(h).chunk(3, dim=2))
        return q, k, v

    def split_heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(2, (self.attention.heads, -1)).transpose(1, 2)  # B N (H d) -> B H N d

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.layer.scales[0] * self.attention.outward(context)

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + self.layer.scales[1] * self.layer.mlp(self.layer.norms[1](x))


@dataclass(eq=False)
class OwnHost(Host):
    """One OwnViT. Layers that the pieces would not reproduce are refused when the host is created."""

    model: Any
    class_token = True
    protected = 1  # the summary token

    def __post_init__(self) -> None:
        for name, layer in self.container.named_children():
            if type(layer) is not Layer:
                raise mctf.MctfError(f"layers.{name} is a {type(layer).__name__}: this host supports Layer alone")
            check_whole(f"layers.{name}", layer)
            check_whole(f"layers.{name}.attention", layer.attention)

    @property
    def container(self) -> nn.Module:
        return self.model.layers

    def install(self, stack: FusedStack) -> None:
        self.model.layers = stack

    def uninstall(self, stack: FusedStack) -> None:
        self.model.layers = stack.restored()

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> LayerOps:
        return LayerOps(block)

    @property
    def image_size(self) -> tuple[int, int]:
        return self.model.image, self.model.image

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        if image_size not in (None, self.image_size):
            raise mctf.MctfError(f"the model takes images of {self.model.image} pixels only")
        images = torch.empty(1, 3, *self.image_size, device="meta")
        _, stem = count_on_meta(self.model.patches, lambda patches: patches(images))
        return Architecture(
            name="own_vit",
            tokens=self.model.positions.shape[1],
            protected=self.protected,
            blocks=tuple(block_shape(layer) for layer in self.container.children()),
            stem=stem,
            head=macs_per_token(self.model.norm, self.model.classify),  # of the summary token alone
            head_per_token=0,
            reads_every_token=self.reads_every_token,
        )


def block_shape(layer: Any) -> BlockShape:
    width = layer.attention.outward.in_features
    mlp = macs_per_token(layer.mlp)
    return BlockShape(channels=width, attention=width, heads=layer.attention.heads, mlp=mlp, norms=width)


mctf.register_host(OwnViT, OwnHost)


@torch.no_grad()
def main() -> None:
    """Fuse the model, print the effect, and unfuse it."""
    model, images = OwnViT().eval(), torch.randn(2, 3, 64, 64)
    baseline = model(images)
    print(mctf.plan(model, r=8))
    mctf.fuse(model, r=0)
    print("r = 0 equals the baseline bit for bit:", torch.equal(model(images), baseline))
    mctf.set_r(model, 8)
    with mctf.trace(model) as trace:
        fused = model(images)
    change = (fused - baseline).abs().max()
    print(f"r = 8 reduces the tokens to {trace.token_counts} and changes a logit by at most {change:.3f}")
    print("unfused it equals the baseline:", torch.equal(mctf.unfuse(model)(images), baseline))


if __name__ == "__main__":
    main()
