"""What timm's Vision Transformers have in common: a patch embedding, a container of blocks, a norm, pooling, a head.

Axes: B images, N tokens, C channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from timm.layers import AttentionPoolLatent
from torch import nn

from ..core.cost import BlockShape
from ..core.places import Places
from ..errors import MctfError
from ..kernels.patches import PatchProduct, is_patch_convolution
from ..methods.base import BlockOps
from ..stack import FusedStack
from .base import Architecture, Host
from .common import check_whole, macs_per_token, run_on_shapes


@dataclass(eq=False)
class TimmHost(Host):
    """One model of timm. Heads are looked at when asked: `reset_classifier` may change them any time.

    known: the block classes whose pieces are rebuilt here, each with the attention classes it may hold.
    """

    model: Any
    known: ClassVar[Mapping[type[nn.Module], tuple[type[nn.Module], ...]]]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The host of this model; refuses what it would get wrong."""
        host = cls(model)
        if not isinstance(host.container, FusedStack):
            check_whole("blocks", host.container)
        for name, block in host.container.named_children():
            host.check_block(f"blocks.{name}", block)
        return host

    def check_block(self, name: str, block: Any) -> None:
        """Refuse a block whose forward is not the one the pieces rebuild."""
        self._check_type(name, block, tuple(self.known))
        self._check_type(f"{name}.attn", block.attn, self.known[type(block)])
        for path in ("", ".attn", ".attn.attn_drop"):
            check_whole(f"{name}{path}", block.get_submodule(path[1:]))

    def _check_type(self, name: str, module: nn.Module, known: tuple[type[nn.Module], ...]) -> None:
        if type(module) not in known:
            wanted = " or ".join(cls.__name__ for cls in known)
            raise MctfError(
                f"{name} is a {type(module).__name__}, which mctf cannot fuse faithfully: "
                f"use a model with timm's {wanted}"
            )

    @property
    def container(self) -> nn.Module:
        return self.model.blocks

    @property
    def embedding(self) -> Any:
        """The module that makes patches of images."""
        return self.model.patch_embed

    def install(self, stack: FusedStack) -> None:
        """Put the fused stack in the place of the blocks, and let a GPU embed patches by a matrix product."""
        self.model.blocks = stack
        if is_patch_convolution(getattr(self.embedding, "proj", None)):
            self.embedding.proj = PatchProduct.of(self.embedding.proj, stack.fuses)

    def uninstall(self, stack: FusedStack) -> None:
        """Undo `install`."""
        self.model.blocks = stack.restored()
        if isinstance(getattr(self.embedding, "proj", None), PatchProduct):
            self.embedding.proj = self.embedding.proj.restored()

    @property
    def image_size(self) -> tuple[int, int]:
        return tuple(self.embedding.img_size or (224, 224))

    @property
    def class_token(self) -> bool:
        return self.model.cls_token is not None

    @property
    def protected(self) -> int:
        return self.model.num_prefix_tokens

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], places: Places | None) -> BlockOps:
        raise NotImplementedError

    def block_shape(self, block: Any) -> BlockShape:
        raise NotImplementedError

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        model = self.model
        patches, stem = self._stem(image_size or self.image_size)
        tokens = patches + self.protected
        return Architecture(
            name=(getattr(model, "pretrained_cfg", None) or {}).get("architecture", type(model).__name__),
            tokens=tokens,
            protected=self.protected,
            blocks=tuple(self.block_shape(block) for block in model.blocks.children()),
            stem=stem + tokens * macs_per_token(getattr(model, "norm_pre", None)),
            head=self.head_cost(tokens),
            head_per_token=macs_per_token(model.norm),
            reads_every_token=self.reads_every_token,
        )

    def _stem(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Patches of an image and the multiply-adds of embedding them."""
        height, width = image_size
        images = torch.empty(1, getattr(self.model, "in_chans", 3), height, width, device="meta")
        try:
            embedded, cost = run_on_shapes(self.embedding, lambda embedding: embedding(images))
        except (AssertionError, RuntimeError) as refusal:
            raise MctfError(
                f"the model does not take {height}x{width} images ({refusal}): "
                f"create it with img_size=({height}, {width}) or dynamic_img_size=True"
            ) from None
        return self._patches(embedded), cost

    def _patches(self, embedded: Any) -> int:
        """How many patches the embedding made of one image."""
        return embedded.numel() // self.model.embed_dim

    def head_cost(self, tokens: int) -> int:
        """Multiply-adds of pooling and classifier; whatever reads more than the class token reads all tokens."""
        model = self.model
        classifier = macs_per_token(model.fc_norm, model.head, getattr(model, "head_dist", None))
        pool = getattr(model, "attn_pool", None)
        if pool is None:
            return classifier * (1 if model.global_pool else tokens)
        pooled = tokens if getattr(model, "pool_include_prefix", True) else tokens - self.protected
        return classifier + _attention_pool(pool, pooled, model.embed_dim)


def _attention_pool(pool: Any, tokens: int, width: int) -> int:
    if not isinstance(pool, AttentionPoolLatent):
        return 2 * tokens * tokens * width + tokens * macs_per_token(pool)
    fixed = macs_per_token(pool.q, pool.proj, pool.norm, pool.mlp)
    return pool.latent_len * fixed + tokens * (macs_per_token(pool.kv) + 2 * pool.latent_len * width)
