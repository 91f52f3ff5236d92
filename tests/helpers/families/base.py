"""Interface of a family of test models: tiny models by name, how to run them, and their parts.

The defaults fit timm's models; a family overrides the others.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from helpers.reference_blocks import Pieces

DEPTH = 4
CLASSES = 10


class Family:
    """Tiny models that share one host.

    title, models: of its row in docs/models.md.
    classes: names of the model classes, to find the family of a model without importing its library.
    builders: name -> model with parameters as the library draws them; each takes the library's own options.
    chosen: the few names that slow tests run on.
    """

    title: ClassVar[str]
    models: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]]
    chosen: ClassVar[tuple[str, ...]]
    timm: ClassVar[bool] = True  # has forward_intermediates, set_grad_checkpointing and the like

    def includes(self, model: nn.Module) -> bool:
        return any(cls.__name__ in self.classes for cls in type(model).__mro__)

    def container(self, model: Any) -> nn.Module:
        """The module that holds the blocks."""
        return model.blocks

    def image_size(self, model: Any) -> tuple[int, int]:
        return model.patch_embed.img_size

    def prefix(self, model: Any) -> int:
        """How many leading tokens (class, registers) the blocks see."""
        return model.num_prefix_tokens

    def tokens(self, model: Any) -> int:
        """Tokens entering the first block."""
        return model.patch_embed.num_patches + self.prefix(model)

    def width(self, model: Any) -> int:
        """Channels of a token."""
        return model.embed_dim

    def run(self, model: Any, images: Tensor) -> Tensor:
        """The output of the model for images: logits, or pooled features."""
        return model(images)

    def features(self, model: Any, images: Tensor) -> Tensor:
        """The tokens that the model's head reads: B N C, or B M C where a fused model keeps its tokens fused."""
        return model.forward_features(images)

    def keeps_every_token(self, model: Any) -> bool:
        """Whether `features` of a fused model has one token per input token."""
        return True

    def embed(self, model: Any, images: Tensor) -> Tensor:
        """The tokens that enter the first block: B N C."""
        raise NotImplementedError

    def finish(self, model: Any, tokens: Tensor) -> Tensor:
        """`features` from the outputs of the last block."""
        return model.norm(tokens)

    def head(self, model: Any, features: Tensor) -> Tensor:
        """`run` from `features`."""
        return model.forward_head(features)

    def pieces(self, model: Any) -> list[Pieces]:
        """The blocks for the slow reference."""
        raise NotImplementedError

    def through_blocks(self, model: Any, tokens: Tensor, *, equal: int) -> Tensor:
        """All blocks on given tokens, B N C -> B N C or B M C.

        After the prefix tokens come runs of `equal` identical ones. In blocks that use positions, the tokens of a run
        are at one position.
        """
        return self.container(model)(tokens)

    def uncounted(self, model: Any) -> int:
        """Multiply-adds outside of embedding, blocks and head, which a plan omits and fvcore counts."""
        return 0

    def checkpoint(self, model: Any, enable: bool) -> None:
        """Switch gradient checkpointing."""
        model.set_grad_checkpointing(enable)

    def gain(self, path: str) -> float:
        """Factor on random weights: queries and keys twice as long, so that the attention is far from uniform."""
        return 2.0 if path.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight")) else 1.0

    def randomize(self, path: str, module: nn.Module, parameter: Tensor, generator: torch.Generator) -> None:
        """A value of a size that matters: a LayerScale of 1e-5 or a class token of 0 would hide mistakes."""
        noise = torch.randn(parameter.shape, generator=generator)
        if path.endswith("bias"):
            parameter.copy_(0.2 * noise)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            parameter.copy_(self.gain(path) * noise / parameter[0].numel() ** 0.5)
        elif parameter.dim() == 1:
            parameter.copy_(1 + 0.3 * noise)  # norms and LayerScale
        else:
            parameter.copy_(0.5 * noise)  # class token, registers, positions, latent queries


def positions_of_runs(tokens: int, equal: int, *, prefix: int) -> Tensor:
    """A position for each token, the same for a run of `equal` neighbours after the prefix tokens: N."""
    return torch.cat([torch.arange(prefix), prefix + torch.arange(tokens - prefix) // equal])


@contextmanager
def biases_at(positions: Tensor, method: str, modules: list[nn.Module]) -> Iterator[None]:
    """Within, modules that return a bias per pair of positions (… N N) return that of tokens at these positions."""

    def at_positions(every: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: every()[..., positions, :][..., positions]

    with ExitStack() as replaced:
        for module in modules:
            replaced.enter_context(patch.object(module, method, at_positions(getattr(module, method))))
        yield
