"""A Vision Transformer that is in no library, with names and a layout of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.inward(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v)
        return self.outward(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and an MLP, each with a norm before it and a learned scale after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.scales = nn.Parameter(torch.full((2, width), 0.1))
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scales[0] * self.attention(self.norms[0](x))
        return x + self.scales[1] * self.mlp(self.norms[1](x))


class OwnViT(nn.Module):
    """Images, B 3 H W -> logits, B K, from a summary token before the patches."""

    def __init__(
        self, *, image: int = 64, patch: int = 8, width: int = 48, depth: int = 4, heads: int = 3, classes: int = 10
    ) -> None:
        super().__init__()
        self.image = image
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.summary = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 1 + (image // patch) ** 2, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def embed(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.summary.expand(len(images), -1, -1), patches], dim=1) + self.positions

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for layer in self.layers:
            x = layer(x)
        return self.classify(self.norm(x[:, 0]))
