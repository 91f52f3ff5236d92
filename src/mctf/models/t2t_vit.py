"""T2T-ViT with transformer token modules (Yuan et al., 2021), under the key names of its public checkpoints.

Images become tokens in three soft splits, overlapping windows that are unfolded, with a narrow transformer after
each of the first two. The blocks that follow are timm's with another scale of attention.

Axes: B images, D pixel or token channels, h w rows and columns of tokens, N = h * w tokens, C channels.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, Mlp
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ._common import COMMON, ConstantScale, Stem, block_layer, build, pretrained_config, stem_layer


@dataclass(frozen=True)
class SoftSplit:
    """Overlapping square windows, each of which becomes one token."""

    window: int
    stride: int
    padding: int

    def __call__(self, grid: Tensor) -> Tensor:
        """B D h w -> B N (D window window), N the number of windows."""
        unfolded = F.unfold(grid, kernel_size=self.window, stride=self.stride, padding=self.padding)
        return unfolded.transpose(1, 2)


class TokenAttention(nn.Module):
    """Attention with one head that changes the width. Its skip connection adds the values, not the input.

    The scale is that of the input width, not that of the queries.
    """

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.qkv = nn.Linear(width, 3 * narrow, bias=False)
        self.proj = nn.Linear(narrow, narrow)

    def forward(self, h: Tensor) -> Tensor:
        """B N width -> B N narrow."""
        q, k, v = self.qkv(h).unsqueeze(1).chunk(3, dim=-1)  # B 1 N narrow: fused attention needs a head axis
        context = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return (v + self.proj(context)).squeeze(1)


class TokenTransformer(nn.Module):
    """The pre-norm block between two soft splits."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=1e-5)
        self.attn = TokenAttention(width, narrow)
        self.norm2 = LayerNorm(narrow, eps=1e-5)
        self.mlp = Mlp(narrow, hidden_features=narrow)

    def forward(self, tokens: Tensor) -> Tensor:
        """B N width -> B N narrow."""
        x = self.attn(self.norm1(tokens))
        return x + self.mlp(self.norm2(x))


class TokensToToken(Stem):
    """B D H W images -> B N C tokens, sixteen pixels apart: by 4, then twice by 2."""

    first = SoftSplit(window=7, stride=4, padding=2)
    again = SoftSplit(window=3, stride=2, padding=1)

    def __init__(self, img_size: int | tuple[int, int], *, in_chans: int, embed_dim: int, token_dim: int) -> None:
        super().__init__(img_size)
        again = self.again.window**2 * token_dim
        self.attention1 = TokenTransformer(self.first.window**2 * in_chans, token_dim)
        self.attention2 = TokenTransformer(again, token_dim)
        self.project = nn.Linear(again, embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        height, width = self.img_size
        x = self.attention1(self.first(images))
        x = self.again(_as_grid(x, height // 4, width // 4))
        x = self.attention2(x)
        x = self.again(_as_grid(x, height // 8, width // 8))
        return self.project(x)


def _as_grid(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """B N D -> B D h w."""
    return tokens.transpose(1, 2).unflatten(2, (rows, columns))


def sinusoids(positions: int, channels: int) -> Tensor:
    """Table of sines in even and cosines in odd channels, 1 N C: angle[n, c] = n / 10000^(2 * (c // 2) / C)."""
    even = torch.arange(0, channels, 2, dtype=torch.float64)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (even / channels)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[None, :, :channels].float()


def _scale_by_whole_width(block: Block) -> None:
    """softmax(q kT C^-0.5) in a block that computes softmax(q kT d^-0.5): C = heads * d, so q takes heads^-0.5.

    The released checkpoints were trained with this scale. It replaces timm's norm of the queries, so every caller of
    the block's parts applies it.
    """
    block.attn.q_norm = ConstantScale(block.attn.num_heads**-0.5)


class T2TViT(VisionTransformer):
    """timm's VisionTransformer with the T2T stem, fixed sinusoidal positions and a narrow attention scale.

    token_dim: channels of the token transformers. options: timm's, as img_size or drop_path_rate.

    The position table is computed for the size a model is created with; `set_input_size` resamples it like learned
    positions, because trained weights identify a position by its values in the table.
    """

    def __init__(self, *, token_dim: int = 64, mlp_ratio: float = 3.0, **options: Any) -> None:
        super().__init__(
            mlp_ratio=mlp_ratio,
            embed_layer=stem_layer(TokensToToken, token_dim=token_dim),
            block_fn=block_layer(_scale_by_whole_width),
            **COMMON,
            **options,
        )
        self.pos_embed.requires_grad_(False)

    @property
    def patch_embed(self) -> Stem:
        """The stem under timm's name for it."""
        return self.tokens_to_token

    def __setattr__(self, name: str, value: object) -> None:
        # timm's constructor names the stem patch_embed, public checkpoints name it tokens_to_token
        super().__setattr__("tokens_to_token" if name == "patch_embed" else name, value)

    def init_weights(self, *args: Any, **options: Any) -> None:
        """timm's initial weights, and the position table instead of random positions."""
        super().init_weights(*args, **options)
        with torch.no_grad():
            self.pos_embed.copy_(sinusoids(*self.pos_embed.shape[1:]))

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Take images of another height and width, positions resampled."""
        super().set_input_size(img_size, patch_size)
        self.pos_embed.requires_grad_(False)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters belong to which layer, for timm's layer-wise learning rates."""
        return {**super().group_matcher(coarse), "stem": r"^cls_token|pos_embed|tokens_to_token"}


default_cfgs = generate_default_cfgs({"t2t_vit_t_14": pretrained_config(), "t2t_vit_t_19": pretrained_config()})


@register_model
def t2t_vit_t_14(pretrained: bool = False, **options: Any) -> T2TViT:
    """T2T-ViT_t-14: 21.5 M parameters, 6.1 GFLOPs."""
    sizes = {"embed_dim": 384, "depth": 14, "num_heads": 6}
    return build(T2TViT, "t2t_vit_t_14", pretrained, **{**sizes, **options})


@register_model
def t2t_vit_t_19(pretrained: bool = False, **options: Any) -> T2TViT:
    """T2T-ViT_t-19: 39.2 M parameters, 9.8 GFLOPs."""
    sizes = {"embed_dim": 448, "depth": 19, "num_heads": 7}
    return build(T2TViT, "t2t_vit_t_19", pretrained, **{**sizes, **options})
