"""Density-peak clustering of tokens in its simple form: centres are dense and far from anything denser.

Axes: B images, N tokens, K clusters, C channels.
"""

import torch
from torch import Tensor

from .criteria import at_least_float32
from .matching import rank_descending


@torch.no_grad()
def density_peaks(x: Tensor, clusters: int, *, neighbours: int) -> Tensor:
    """The cluster of each token, B N in 0 .. clusters - 1, from the strongest centre to the weakest.

    rho_i = exp(-mean of d_ij^2 over the nearest neighbours of i), delta_i = distance to the nearest token with a
    larger rho (or as large a one, and before i), or to the farthest of all for the densest. Centres are the largest
    rho * delta; every other token joins the nearest centre. d^2 is |x_i - x_j|^2 / C, so that the width of a model
    does not sharpen rho.
    """
    batch, tokens, _ = x.shape
    if clusters >= tokens:
        return torch.arange(tokens, device=x.device).expand(batch, -1)
    squared = _squared_distances(x)
    sparsity = _to_neighbours(squared, min(neighbours, tokens - 1))
    rank = rank_descending(-sparsity)
    denser = rank[:, None, :] < rank[:, :, None]
    to_denser = squared.masked_fill(~denser, float("inf")).amin(dim=2)
    delta = torch.where(rank == 0, squared.amax(dim=2), to_denser)
    peaks = delta.log() / 2 - sparsity  # log(delta * rho): rho itself may underflow
    centres = peaks.argsort(dim=1, descending=True, stable=True)[:, :clusters]
    joined = squared.gather(2, centres[:, None, :].expand(-1, tokens, -1)).argmin(dim=2)
    # a centre stays in its own cluster, even where another lies on top of it
    return joined.scatter(1, centres, torch.arange(clusters, device=x.device).expand(batch, -1))


def _squared_distances(x: Tensor) -> Tensor:
    """|x_i - x_j|^2 / C: B N N, at least 0."""
    x = at_least_float32(x)
    x = x - x.mean(dim=1, keepdim=True)  # what all tokens share would only cost digits
    squares = x.square().sum(dim=2)
    squared = squares[:, :, None] + squares[:, None, :] - 2 * (x @ x.transpose(1, 2))
    return squared.clamp_min(0) / x.shape[2]


def _to_neighbours(squared: Tensor, neighbours: int) -> Tensor:
    """Mean squared distance of each token to its nearest others: B N N -> B N."""
    itself = torch.eye(squared.shape[1], dtype=torch.bool, device=squared.device)
    return squared.masked_fill(itself, float("inf")).topk(neighbours, dim=2, largest=False).values.mean(dim=2)
