"""The worked example of docs/adding_a_host.md: a model that is in no library, with a host that mctf does not hold."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.families.base import CLASSES, DEPTH, Family
from helpers.reference_blocks import Cover, Pieces, heads_of

EXAMPLES = Path(__file__).parents[3] / "examples"


def build(**features: Any) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return import_module("own_host").OwnViT(**{"depth": DEPTH, "classes": CLASSES, **features})


class Own(Family):
    title = "your own: [a worked example](adding_a_host.md)"
    models = "a ViT of 60 lines that is in no library"
    classes = ("OwnViT",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {"own_vit": build}
    chosen = ("own_vit",)
    timm = False

    def container(self, model: Any) -> nn.Module:
        return model.layers

    def image_size(self, model: Any) -> tuple[int, int]:
        return model.image, model.image

    def prefix(self, model: Any) -> int:
        return 1

    def tokens(self, model: Any) -> int:
        return model.positions.shape[1]

    def width(self, model: Any) -> int:
        return model.positions.shape[2]

    def embed(self, model: Any, images: Tensor) -> Tensor:
        return model.embed(images)

    def features(self, model: Any, images: Tensor) -> Tensor:
        return self.through_blocks(model, model.embed(images), equal=1)

    def finish(self, model: Any, tokens: Tensor) -> Tensor:
        return tokens

    def head(self, model: Any, features: Tensor) -> Tensor:
        return model.classify(model.norm(features[:, 0]))

    def through_blocks(self, model: Any, tokens: Tensor, *, equal: int) -> Tensor:
        for layer in model.layers:
            tokens = layer(tokens)
        return tokens

    def pieces(self, model: Any) -> list[Pieces]:
        return [OwnPieces(layer) for layer in model.layers]

    def checkpoint(self, model: Any, enable: bool) -> None:
        """The model has no switch of its own, so its user checkpoints the layers."""

        def forward(images: Tensor) -> Tensor:
            x = model.embed(images)
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(model, x)

        model.forward = forward

    def gain(self, path: str) -> float:
        return 2.0 if path.endswith("inward.weight") else 1.0


class OwnPieces(Pieces):
    """The example's Layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.attention = layer.attention

    def read(self, x: Tensor) -> Tensor:
        return self.layer.norms[0](x)

    def inward(self, read: Tensor) -> list[Tensor]:
        return [heads_of(part, self.attention.heads) for part in self.attention.inward(read).chunk(3, dim=1)]

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k, _ = self.inward(read)
        return q, k

    def values(self, read: Tensor) -> Tensor:
        return self.inward(read)[2]

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.layer.scales[0] * self.attention.outward(context)

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + self.layer.scales[1] * self.layer.mlp(self.layer.norms[1](x))
