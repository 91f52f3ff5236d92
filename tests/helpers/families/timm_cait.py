"""Tiny timm CaiTs: talking heads, and a stage in which a class token reads all patches."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from timm.models.cait import Cait
from torch import Tensor, nn

from helpers.families.base import CLASSES, Family
from helpers.families.timm_vit import SIZES
from helpers.reference_blocks import Cover, Pieces, heads_of


def _cait(**features: Any) -> Cait:
    return Cait(**{**SIZES, "num_classes": CLASSES, **features})


class TimmCait(Family):
    title = "timm `Cait`"
    models = "CaiT"
    classes = ("Cait",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "cait": _cait,
        "cait_odd": partial(_cait, qkv_bias=False, img_size=72, num_heads=2),
    }
    chosen = ("cait",)

    def prefix(self, model: Cait) -> int:
        return 0

    def embed(self, model: Cait, images: Tensor) -> Tensor:
        return model.patch_embed(images) + model.pos_embed

    def finish(self, model: Cait, tokens: Tensor) -> Tensor:
        summary = model.cls_token.expand(len(tokens), -1, -1)
        for block in model.blocks_token_only:
            summary = block(tokens, summary)
        return model.norm(torch.cat([summary, tokens], dim=1))

    def pieces(self, model: Cait) -> list[Pieces]:
        return [PreNorm(block) for block in model.blocks]

    def randomize(self, path: str, module: nn.Module, parameter: Tensor, generator: torch.Generator) -> None:
        super().randomize(path, module, parameter, generator)
        if path.endswith(("proj_l.weight", "proj_w.weight")):  # heads still differ
            parameter.copy_(torch.eye(len(parameter)) + 0.3 * parameter)
        if path.endswith("proj_w.bias"):  # beside attention weights of 1/64
            parameter.mul_(0.05)


class PreNorm(Pieces):
    """Cait's LayerScaleBlock."""

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k, _ = self.attn.qkv(read).chunk(3, dim=1)
        return heads_of(q, self.attn.num_heads), heads_of(k, self.attn.num_heads)

    def values(self, read: Tensor) -> Tensor:
        return heads_of(self.attn.qkv(read).chunk(3, dim=1)[2], self.attn.num_heads)

    def attention_map(self, q: Tensor, k: Tensor, sizes: list[float], cover: Cover) -> Tensor:
        """As if each token of size s were s equal keys, whose columns are added up in the end."""
        copies = torch.tensor([j for j, size in enumerate(sizes) for _ in range(round(size))])
        logits = torch.einsum("hid,hjd->ijh", q, k[:, copies]) * self.attn.scale
        weights = self.attn.proj_w(self.attn.proj_l(logits).softmax(dim=1)).permute(2, 0, 1)
        return torch.zeros(len(q), q.shape[1], k.shape[1], dtype=q.dtype).index_add(2, copies, weights)

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.gamma_1 * self.attn.proj(context)

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + self.block.gamma_2 * self.block.mlp(self.block.norm2(x))
