"""open_clip's own image tower: attention of PyTorch's MultiheadAttention, LayerScale, a class token."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from helpers.families.base import CLASSES, DEPTH, Family
from helpers.reference_blocks import Cover, Pieces, heads_of


def build(*, depth: int = DEPTH, **features: Any) -> nn.Module:
    from open_clip.transformer import VisionTransformer

    sizes = {"image_size": 64, "patch_size": 8, "width": 48, "layers": depth, "heads": 3, "mlp_ratio": 2.0}
    return VisionTransformer(**{**sizes, "output_dim": CLASSES, "ls_init_value": 0.1, **features})


class Block(Pieces):
    """A ResidualAttentionBlock."""

    def read(self, x: Tensor) -> Tensor:
        return self.block.ln_1(x)

    def projected(self, read: Tensor) -> list[Tensor]:
        flat = nn.functional.linear(read, self.attn.in_proj_weight, self.attn.in_proj_bias)
        return [heads_of(part, self.attn.num_heads) for part in flat.split(flat.shape[1] // 3, dim=1)]

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k, _ = self.projected(read)
        return q, k

    def values(self, read: Tensor) -> Tensor:
        return self.projected(read)[2]

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.ls_1.gamma * self.attn.out_proj(context)

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + self.block.ls_2.gamma * self.block.mlp(self.block.ln_2(x))


class OpenClip(Family):
    title = "open_clip `VisionTransformer`"
    models = "ViT-B-32 and the other image towers of its own, alone or in a CLIP or CoCa model"
    classes = ("VisionTransformer",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {"open_clip": build}
    chosen = ()
    timm = False

    def includes(self, model: nn.Module) -> bool:
        return any(cls.__module__ == "open_clip.transformer" for cls in type(model).__mro__)

    def container(self, model: Any) -> nn.Module:
        return model.transformer.resblocks

    def image_size(self, model: Any) -> tuple[int, int]:
        return tuple(model.image_size)

    def prefix(self, model: Any) -> int:
        return 1

    def tokens(self, model: Any) -> int:
        return 65

    def width(self, model: Any) -> int:
        return 48

    def features(self, model: Any, images: Tensor) -> Tensor:
        return self.finish(model, model.transformer(self.embed(model, images)))

    def embed(self, model: Any, images: Tensor) -> Tensor:
        return model._embeds(images)

    def finish(self, model: Any, tokens: Tensor) -> Tensor:
        return model.ln_post(tokens)

    def head(self, model: Any, features: Tensor) -> Tensor:
        return features[:, 0] @ model.proj

    def pieces(self, model: Any) -> list[Pieces]:
        return [Block(block) for block in model.transformer.resblocks.children()]

    def through_blocks(self, model: Any, tokens: Tensor, *, equal: int) -> Tensor:
        for block in self.container(model):
            tokens = block(tokens)
        return tokens

    def randomize(self, path: str, module: nn.Module, parameter: Tensor, generator: torch.Generator) -> None:
        super().randomize(path, module, parameter, generator)
        if path.endswith("in_proj_weight"):  # a parameter of its own: queries and keys twice as long as values
            scale = torch.tensor([2.0, 2.0, 1.0]).repeat_interleave(len(parameter) // 3)[:, None]
            parameter.mul_(2 * scale / parameter.shape[1] ** 0.5)
