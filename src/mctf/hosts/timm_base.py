"""Base of the hosts for timm: the model around the blocks (`TimmHost`) and the pieces of a block (`TimmOps`).

A timm model has a patch embedding, a container of blocks, a norm, pooling and a head. The pieces of a block call the
block's own modules.

Axes: B images, H heads, N tokens, C channels, d channels per head.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from ..core.flops import NORM, BlockShape
from ..errors import MctfError
from ..stack import FusedStack
from ._inspect import check_unsharded, check_whole, count_on_meta, linear_slice, macs_per_token
from .base import Architecture, Host, SoftmaxAttention
from .patch_embed import MatmulPatchEmbed, is_patch_convolution

BlockClasses = Mapping[type[nn.Module], tuple[type[nn.Module], ...]]


@dataclass(eq=False)
class TimmHost(Host):
    """One timm model. Heads are read in each call: `reset_classifier` may change them at any time.

    block_classes: the supported block classes, each with the attention classes that it may hold. Subclasses are
    excluded, as they may compute something else.
    """

    model: Any
    block_classes: ClassVar[BlockClasses]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The host of this model; raises MctfError for blocks that it would not reproduce."""
        host = cls(model)
        if not isinstance(host.container, FusedStack):
            check_whole("blocks", host.container)
        for name, block in host.container.named_children():
            host.check_block(f"blocks.{name}", block)
        return host

    def check_block(self, name: str, block: Any) -> None:
        """Raise MctfError for a block whose forward is not the composition of the pieces."""
        check_unsharded(name, block)
        _check_class(name, block, tuple(self.block_classes))
        _check_class(f"{name}.attn", block.attn, self.block_classes[type(block)])
        for path in ("", ".attn", ".attn.attn_drop"):
            check_whole(f"{name}{path}", block.get_submodule(path[1:]))

    @property
    def container(self) -> nn.Module:
        return self.model.blocks

    @property
    def embedding(self) -> Any:
        """The module that turns images into patches."""
        return self.model.patch_embed

    def install(self, stack: FusedStack) -> None:
        """Replace the blocks by the fused stack, and the patch convolution by a matrix product on GPUs."""
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

    @abstractmethod
    def block_shape(self, block: Any) -> BlockShape:
        """The sizes that decide the cost of a block."""

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        model = self.model
        height, width = image_size or self.image_size
        images = torch.empty(1, getattr(model, "in_chans", 3), height, width, dtype=torch.float32, device="meta")
        try:
            embedded, stem = count_on_meta(self.embedding, lambda embedding: embedding(images))
        except (AssertionError, RuntimeError) as refusal:
            raise MctfError(
                f"the model does not take {height}x{width} images ({refusal}): "
                f"create it with img_size=({height}, {width}) or dynamic_img_size=True"
            ) from None
        tokens = self.num_patches(embedded) + self.protected
        return Architecture(
            name=(getattr(model, "pretrained_cfg", None) or {}).get("architecture", type(model).__name__),
            tokens=tokens,
            protected=self.protected,
            blocks=tuple(self.block_shape(block) for block in model.blocks._modules.values()),
            stem=stem + tokens * macs_per_token(getattr(model, "norm_pre", None)),
            head=self.head_cost(tokens),
            head_per_token=macs_per_token(model.norm),
            reads_every_token=self.reads_every_token,
            reads_protected_only=self.reads_protected_only,
        )

    def num_patches(self, embedded: Any) -> int:
        """Number of patches of one image, from the output of the embedding."""
        return embedded.numel() // self.model.embed_dim

    def head_cost(self, tokens: int) -> int:
        """Multiply-adds of pooling and classifier; a head that reads more than the class token reads all tokens."""
        model = self.model
        classifier = macs_per_token(model.fc_norm, model.head, getattr(model, "head_dist", None))
        pool = getattr(model, "attn_pool", None)
        if pool is None:
            return classifier * (1 if model.global_pool else tokens)
        pooled = tokens if getattr(model, "pool_include_prefix", True) else tokens - self.protected
        if not isinstance(pool, AttentionPoolLatent):
            return classifier + 2 * pooled * pooled * model.embed_dim + pooled * macs_per_token(pool)
        fixed = macs_per_token(pool.q, pool.proj, pool.norm, pool.mlp)
        per_token = macs_per_token(pool.kv) + 2 * pool.latent_len * model.embed_dim
        return classifier + pool.latent_len * fixed + pooled * per_token


def _check_class(name: str, module: nn.Module, supported: tuple[type[nn.Module], ...]) -> None:
    if type(module) not in supported:
        names = " or ".join(cls.__name__ for cls in supported)
        raise MctfError(
            f"{name} is a {type(module).__name__}, which mctf cannot fuse faithfully: use a model with timm's {names}"
        )


class TimmOps(SoftmaxAttention):
    """The pieces of timm's pre-norm Block: one product for q, k and v, optional norms and gate, a projection."""

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
        q, k = self._split(qkv_slice(self.block.attn, h, 0, 2), 2)
        return self._norm_and_rotate(q, k)

    def values(self, h: Tensor) -> Tensor:
        return qkv_slice(self.block.attn, h, 2, 3)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(qkv_slice(self.block.attn, h, 0, 3), 3)
        return *self._norm_and_rotate(q, k), v

    def first_queries(self, h: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Protected tokens have no rotary positions."""
        attn = self.block.attn
        (q,) = self._split(qkv_slice(attn, h[:, :count], 0, 1), 1)
        k, v = self._split(qkv_slice(attn, h, 1, 3), 2)
        return _optional(attn, "q_norm", q), self._rotate(_optional(attn, "k_norm", k), k.dtype), v

    def split_heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(2, (self.block.attn.num_heads, -1)).transpose(1, 2)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        context = _optional(self.block.attn, "norm", context)
        gate = getattr(self.block.attn, "gate", None)
        return context if gate is None else context * gate(h).sigmoid()

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.ls1(project(self.block.attn, context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def _split(self, flat: Tensor, parts: int) -> tuple[Tensor, ...]:
        """B N (parts H d) -> parts of B H N d."""
        return flat.unflatten(2, (parts, self.block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def _norm_and_rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms and rotary positions, where the block has them."""
        attn = self.block.attn
        return self._rotate(_optional(attn, "q_norm", q), q.dtype), self._rotate(_optional(attn, "k_norm", k), k.dtype)

    def _rotate(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries or keys (B H N d) rotated by the positions of their tokens, in this dtype; here the identity."""
        return x


class PostNormMixin:
    """Mixin for blocks whose norms follow attention and MLP. It precedes a TimmOps class in the bases."""

    block: Any

    def norm1(self, x: Tensor) -> Tensor:
        return x

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.norm1(project(self.block.attn, context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.norm2(block.mlp(x)))


class GammaScaleMixin:
    """Mixin for blocks whose LayerScale is a pair of bare parameters, or None. It precedes a TimmOps class."""

    block: Any

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self._drop_path(1, _scale(project(self.block.attn, context), self.block.gamma_1))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + self._drop_path(2, _scale(block.mlp(block.norm2(x)), block.gamma_2))

    def _drop_path(self, branch: int, x: Tensor) -> Tensor:
        return getattr(self.block, f"drop_path{branch}")(x)


def _scale(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


def _optional(attn: Any, name: str, x: Tensor) -> Tensor:
    """x after a submodule that this version of attention may lack or hold as None."""
    module = getattr(attn, name, None)
    return x if module is None else module(x)


def project(attn: Any, context: Tensor) -> Tensor:
    """The output projection of attention."""
    return attn.proj_drop(attn.proj(context))


def qkv_slice(attn: Any, h: Tensor, first: int, last: int) -> Tensor:
    """Parts first .. last of q, k and v side by side, from attention's one product: B N (parts H d).

    EVA and BEiT hold the biases of q and v separately; the bias of k is a buffer of zeros.
    """
    width = attn.proj.in_features
    start, stop = first * width, last * width
    if getattr(attn, "q_bias", None) is None:
        return linear_slice(attn.qkv, h, start, stop)
    bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias][first:last])
    if attn.qkv_bias_separate:
        return linear_slice(attn.qkv, h, start, stop) + bias
    return F.linear(h, attn.qkv.weight[start:stop], bias)


def block_shape(block: Any, *, norm_first: bool = True) -> BlockShape:
    """The shapes that determine the cost of a block."""
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
