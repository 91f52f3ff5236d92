"""Operations in the form that every runtime takes: no sort, no scattered sum, no loop, few nodes.

`torch.export` writes down what runs, and ONNX Runtime, OpenVINO and TensorRT execute it. Sorting with ties and sums
over scattered indices are missing or slow there. While a model is exported (`exporting`), ranks are counted, sums over
slots are a gather and one small matrix product, and clustering moves centers by matrix products.

Axes: B images, N tokens, n of them unprotected, M slots, C channels, K candidates, k tokens that join in a round.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FOR_ONNX: ContextVar[bool] = ContextVar("for_onnx", default=False)


def exporting() -> bool:
    """Whether a graph is being exported for another runtime.

    By the flag itself: torch.compile of PyTorch 2.11 takes `torch.compiler.is_exporting()` for true.
    """
    return torch.compiler._is_exporting_flag


@contextmanager
def onnx_operators() -> Iterator[None]:
    """While open, an exported graph may use operators of ONNX that PyTorch has no equal of."""
    token = _FOR_ONNX.set(True)
    try:
        yield
    finally:
        _FOR_ONNX.reset(token)


def for_onnx() -> bool:
    """Whether the exported graph becomes an ONNX file."""
    return exporting() and _FOR_ONNX.get()  # in this order: torch.compile cannot trace a context variable


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B N …) by index (B M, or B M 1): B M …."""
    if x.dim() == 2:
        return x.gather(1, index)
    batch, rows = x.shape[:2]
    if for_onnx():  # one node; `torch.gather` needs an index per channel
        shape = (batch, index.shape[1], *x.shape[2:])
        inputs = (x, index if index.dim() == 3 else index[..., None])
        return torch.onnx.ops.symbolic("GatherND", inputs, {"batch_dims": 1}, dtype=x.dtype, shape=shape)
    index = index.flatten(1)
    offsets = torch.arange(batch, device=x.device)[:, None] * rows
    return x.flatten(0, 1).index_select(0, (index + offsets).flatten()).unflatten(0, index.shape[:2])


def rank_descending(values: Tensor) -> Tensor:
    """Rank of each value when sorted from large to small, equal values by index: B n."""
    index = torch.arange(values.shape[1], device=values.device)
    mine, other = values[:, :, None], values[:, None, :]
    return ((other > mine) | ((other == mine) & (index < index[:, None]))).sum(dim=2)


def prepend_protected(slots: Tensor, protected: int) -> Tensor:
    """Slots of all tokens from those of the unprotected ones: B n -> B N. Protected tokens keep the first slots."""
    if protected == 0:
        return slots
    first = torch.arange(protected, device=slots.device)
    return F.pad(slots, (protected, 0)) + F.pad(first, (0, slots.shape[1]))


class SlotSplit(NamedTuple):
    """Tokens by their part in a sum over slots.

    order: B N, one token of each slot, then all others. slots_of_others: B N-M, where the others go.
    """

    order: Tensor
    slots_of_others: Tensor


def split_slots(slots: Tensor, count: int) -> SlotSplit:
    """The first token of each slot, then the others in their order. slots: B N, all of `count` slots are used."""
    tokens = slots.shape[1]
    position = torch.arange(tokens, device=slots.device)
    owns = slots[:, None, :] == torch.arange(count, device=slots.device)[:, None]  # B M N
    first = torch.where(owns, position, tokens).amin(dim=2)
    joins = first.gather(1, slots) != position
    others = torch.where(joins, tokens - position, 0).topk(tokens - count, dim=1).indices
    return SlotSplit(torch.cat([first, others], dim=1), slots.gather(1, others))


def sum_slots(x: Tensor, split: SlotSplit) -> Tensor:
    """Sum of the tokens in each slot, B N C -> B M C: its first token, and a product with those that join it."""
    count = x.shape[1] - split.slots_of_others.shape[1]
    if count == x.shape[1]:
        return gather_rows(x, split.order)
    first, others = gather_rows(x, split.order).split([count, x.shape[1] - count], dim=1)
    into = split.slots_of_others[:, None, :] == torch.arange(count, device=x.device)[:, None]  # B M N-M
    return first + into.to(x.dtype) @ others


_FAR = 1e37  # above every distance; times the lowest weight it still is above every cost


def strictly_descending(weights: Tensor) -> Tensor:
    """Weights (B n …) for comparison: equal ones become smaller from token to token, by a few steps of rounding."""
    step = 4 * torch.finfo(weights.dtype).eps
    index = torch.arange(weights.shape[1], device=weights.device, dtype=weights.dtype)
    return weights * (1 - step * index).view(-1, *[1] * (weights.dim() - 2))


def cluster(
    unit: Tensor, mass: Tensor, all_k: Sequence[int], *, candidates: int, protected: int
) -> tuple[Tensor, SlotSplit]:
    """Slots of all tokens (B N) after rounds of clustering, and the same as a split.

    unit: B n C, rows of length 1. mass: B n 1, above 0. all_k: tokens that join in each round.
    As `core.clustering.cluster`, in few operations: tokens are sorted by weight, so that those of larger weight come
    first, and later rounds compare centers. Vectors are columns, B n 1, throughout.
    """
    n = mass.shape[1]
    index = torch.arange(n, device=mass.device)
    order = strictly_descending(mass).topk(n, dim=1).indices
    mass, centers = mass.gather(1, order), gather_rows(unit, order)
    inverse = mass.reciprocal()
    apart = ((index >= index[:, None]) * _FAR + 1) - centers @ centers.transpose(1, 2)  # half the squared distances
    costs = apart / (inverse + inverse.transpose(1, 2))
    rows = costs.amin(dim=2, keepdim=True).topk(candidates, dim=1, largest=False).indices  # B K 1
    position = rows
    left: Tensor | float = 0.0  # far below 0 for tokens that joined: B 1 n
    joined: list[Tensor] = []
    targets: list[Tensor] = []
    for k in all_k:
        if joined:
            own = gather_rows(centers, rows)
            half_squares = centers.square().sum(dim=2, keepdim=True) / 2
            apart = (half_squares.gather(1, rows) - own @ centers.transpose(1, 2)) + half_squares.transpose(1, 2)
            ranked, inverse = strictly_descending(mass), mass.reciprocal()
            is_larger = ranked.transpose(1, 2) + left > ranked.gather(1, rows)
            costs = apart / (inverse.gather(1, rows) + inverse.transpose(1, 2))
            costs = costs.where(is_larger, _FAR)
            position = costs.amin(dim=2, keepdim=True).topk(rows.shape[1], dim=1, largest=False).indices
            rows = rows.gather(1, position)
        joining, rows = rows[:, :k], rows[:, k:]
        leaves = (joining == index).to(mass.dtype).sum(dim=1, keepdim=True) * _FAR  # B 1 n
        target = (gather_rows(costs, position[:, :k]) + leaves).argmin(dim=2, keepdim=True)
        joined.append(joining)
        targets.append(target)
        if len(joined) < len(all_k):
            left = left - leaves
            into = (target == index).to(mass.dtype).transpose(1, 2)  # B n k
            w_joining = mass.gather(1, joining)
            mass = mass + into @ w_joining
            shares = w_joining / mass.gather(1, target)
            centers = centers + into @ ((gather_rows(centers, joining) - gather_rows(centers, target)) * shares)
    joining, target = torch.cat(joined, dim=1), torch.cat(targets, dim=1)
    itself = torch.where(mass > 0, index[:, None], 0)  # B n 1, without a shape to work out
    root = itself.scatter(1, joining, target)
    for _ in range((len(all_k) - 1).bit_length()):  # a target may join another in a later round
        root = root.gather(1, root)
    roots, others = order.gather(1, root.gather(1, joining)), order.gather(1, joining)  # B r 1
    root = itself.scatter(1, others, roots)
    stays = root == itself
    number = stays.cumsum(1) + (protected - 1)
    kept = torch.where(stays, n - itself, 0).topk(n - others.shape[1], dim=1).indices
    tokens = torch.cat([kept, others], dim=1)[:, :, 0] + protected
    slots = prepend_protected(number.gather(1, root)[:, :, 0], protected)
    return slots, SlotSplit(prepend_protected(tokens, protected), number.gather(1, roots)[:, :, 0])
