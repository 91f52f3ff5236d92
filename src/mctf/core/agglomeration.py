"""Classical agglomerative clustering: the two closest clusters become one, again and again.

Distances of a merged cluster follow from those of its two parts (Lance and Williams), so that tokens are compared once.

Axes: B images, n tokens.
"""

import torch
from torch import Tensor

LINKAGES = ("average", "single", "complete")
_FAR = 1e30  # the distance of tokens that are not finite; infinite is only what may not be merged


@torch.library.custom_op("mctf::agglomerate", mutates_args=())
def agglomerate(distances: Tensor, r: int, linkage: str) -> Tensor:
    """The first token of each token's cluster after r merges: B n, int64.

    distances: B n n, symmetric. linkage: the distance between two clusters is the "average" over their pairs of
    tokens, the smallest ("single") or the largest ("complete").
    One operator: a compiler need not unroll the merges.
    """
    inf = float("inf")
    batch, n, _ = distances.shape
    image, index = torch.arange(batch, device=distances.device), torch.arange(n, device=distances.device)
    distances = distances.nan_to_num(_FAR, _FAR, -_FAR).masked_fill(index[:, None] == index, inf)
    counts = distances.new_ones(batch, n)
    roots = index.repeat(batch, 1)
    nearest, partner = distances.min(dim=2)  # of each cluster
    for _ in range(r):
        one = nearest.argmin(dim=1)
        other = partner[image, one]
        root, gone = torch.minimum(one, other), torch.maximum(one, other)
        row = _linked(distances[image, root], distances[image, gone], counts[image, root], counts[image, gone], linkage)
        row[image, root] = inf
        row[image, gone] = inf
        distances[image, root], distances[image, :, root] = row, row
        distances[image, gone], distances[image, :, gone] = inf, inf
        counts[image, root] += counts[image, gone]
        roots = torch.where(roots == gone[:, None], root[:, None], roots)
        if distances.is_cuda:  # finding the rows that changed would wait for the GPU
            nearest, partner = distances.min(dim=2)
            continue
        nearer = row < nearest
        nearest, partner = torch.where(nearer, row, nearest), torch.where(nearer, root[:, None], partner)
        lost = (partner == gone[:, None]) | ((partner == root[:, None]) & ~nearer)
        lost[image, root] = True
        lost[image, gone] = True
        where = lost.nonzero(as_tuple=True)
        nearest[where], partner[where] = distances[where].min(dim=1)
    return roots


def _linked(one: Tensor, other: Tensor, size: Tensor, other_size: Tensor, linkage: str) -> Tensor:
    """Distances (B n) of a cluster merged from two of these sizes (B)."""
    if linkage == "single":
        return torch.minimum(one, other)
    if linkage == "complete":
        return torch.maximum(one, other)
    share = (size / (size + other_size))[:, None]
    return share * one + (1 - share) * other


@agglomerate.register_fake
def _(distances: Tensor, r: int, linkage: str) -> Tensor:
    return distances.new_empty(distances.shape[:2], dtype=torch.int64)
