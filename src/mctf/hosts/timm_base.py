"""What timm's Vision Transformers have in common: a patch embedding, a container of blocks, a norm, pooling, a head.

Axes: B images, N tokens, C channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from ..core.flops import NORM, BlockShape
from ..core.positions import TokenPositions
from ..errors import MctfError
from ..methods.base import BlockOps
from ..stack import FusedStack
from ._inspect import check_whole, macs_per_token, part_of, run_on_shapes
from .base import Architecture, Host, SoftmaxAttention
from .patch_embed import MatmulPatchEmbed, is_patch_convolution


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
        """Put the fused stack in the position of the blocks, and let a GPU embed patches by a matrix product."""
        self.model.blocks = stack
        if is_patch_convolution(getattr(self.embedding, "proj", None)):
            self.embedding.proj = MatmulPatchEmbed.of(self.embedding.proj, stack.fuses)

    def uninstall(self, stack: FusedStack) -> None:
        """Undo `install`."""
        self.model.blocks = stack.restored()
        if isinstance(getattr(self.embedding, "proj", None), MatmulPatchEmbed):
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

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> BlockOps:
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


# MERGED from mctf.hosts.timm_base:
# The pieces of timm's blocks, through their own modules.
#
# Axes: B images, H heads, N tokens, C channels, d channels a head.


class TimmOps(SoftmaxAttention):
    """What all of timm's blocks have in common: one product for q, k and v, optional norms and gate, a projection."""

    def __init__(self, block: Any) -> None:
        self.block = block

    @property
    def scale(self) -> float:
        return self.block.attn.scale

    @property
    def attention_dropout(self) -> float:
        attn = self.block.attn
        return attn.attn_drop.p if attn.training else 0.0

    def plain(self, x: Tensor) -> Tensor:
        return self.block(x)

    def norm1(self, x: Tensor) -> Tensor:
        return self.block.norm1(x)

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self._split(qkv_part(self.block.attn, h, 0, 2), 2)
        return self._finished(q, k)

    def values(self, h: Tensor) -> Tensor:
        return qkv_part(self.block.attn, h, 2, 3)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(qkv_part(self.block.attn, h, 0, 3), 3)
        return *self._finished(q, k), v

    def split_heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(2, (self.block.attn.num_heads, -1)).transpose(1, 2)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        context = self._normed("norm", context)
        gate = getattr(self.block.attn, "gate", None)
        return context if gate is None else context * gate(h).sigmoid()

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.ls1(self._project(context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def _split(self, flat: Tensor, parts: int) -> tuple[Tensor, ...]:
        """B N (parts H d) -> parts of B H N d."""
        return flat.unflatten(2, (parts, self.block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def _finished(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after what the block does to them behind their product: norms, positions."""
        return self._placed(self._normed("q_norm", q), q.dtype), self._placed(self._normed("k_norm", k), k.dtype)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        norm = getattr(self.block.attn, name, None)
        return x if norm is None else norm(x)

    def _placed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries or keys (B H N d) told where their tokens are, in this dtype: most blocks do nothing."""
        return x

    def _project(self, context: Tensor) -> Tensor:
        attn = self.block.attn
        return attn.proj_drop(attn.proj(context))


class PostNorm(TimmOps):
    """A block whose norms follow attention and MLP."""

    def norm1(self, x: Tensor) -> Tensor:
        return x

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.norm1(self._project(context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.norm2(block.mlp(x)))


class GammaScaled(TimmOps):
    """A block whose LayerScale is a pair of bare parameters, or None."""

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self._drop_path(1, scaled(self._project(context), self.block.gamma_1))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + self._drop_path(2, scaled(block.mlp(block.norm2(x)), block.gamma_2))

    def _drop_path(self, branch: int, x: Tensor) -> Tensor:
        return getattr(self.block, f"drop_path{branch}")(x)


def scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


def qkv_part(attn: Any, h: Tensor, first: int, last: int) -> Tensor:
    """Parts first .. last of q, k and v side by side, from attention's one product: B N (parts H d).

    EVA and BEiT keep the biases of q and v apart; the bias of k is a buffer of zeros.
    """
    width = attn.proj.in_features
    start, stop = first * width, last * width
    if getattr(attn, "q_bias", None) is None:
        return part_of(attn.qkv, h, start, stop)
    bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias][first:last])
    if attn.qkv_bias_separate:
        return part_of(attn.qkv, h, start, stop) + bias
    return F.linear(h, attn.qkv.weight[start:stop], bias)


def block_shape(block: Any, *, norm_first: bool = True) -> BlockShape:
    """What a block's cost follows from."""
    attn = block.attn
    optional = {name: getattr(attn, name, None) for name in ("q_norm", "k_norm", "norm", "gate")}
    return BlockShape(
        channels=attn.proj.out_features,
        attention=attn.proj.in_features,
        heads=attn.num_heads,
        mlp=macs_per_token(block.mlp),
        norms=macs_per_token(block.norm1) // NORM,
        norm_first=norm_first,
        head_norms=macs_per_token(optional["q_norm"], optional["k_norm"]) // NORM * attn.num_heads,
        context=macs_per_token(optional["norm"], optional["gate"]),
    )
