"""Operations in the form that every runtime takes: no sort, no scattered sum, no loop, few nodes.

`torch.export` writes down what runs, and ONNX Runtime, OpenVINO and TensorRT execute it. Sorting with ties and sums
over scattered indices are missing or slow there. While a model is exported (`exporting`), ranks are counted, sums over
slots are a gather and one small matrix product, and clustering updates its distances by matrix products.

Axes: B images, N tokens, n of them unprotected, M slots, C channels, k tokens that join in a round.
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


def _where_above(x: Tensor, threshold: float) -> Tensor:
    """x where it is above the threshold, 0 elsewhere."""
    if for_onnx():  # one node; a choice by a condition takes as long as six sums
        return torch.onnx.ops.symbolic("ThresholdedRelu", (x,), {"alpha": threshold}, dtype=x.dtype, shape=x.shape)
    return F.threshold(x, threshold, 0.0)


def cluster(
    unit: Tensor, mass: Tensor, joining_per_round: Sequence[int], *, protected: int, many_ties: bool
) -> tuple[Tensor, SlotSplit]:
    """Root of each token (B n) after rounds of clustering, and the same as a split of all tokens.

    unit: B n C, rows of length 1. mass: B n, above 0. many_ties: masses are whole numbers, which tie in every round.
    As `core.clustering.cluster`, by matrix products: with T the targets of the joining tokens (k n, one-hot), J those
    tokens and p their shares in their clusters, distances change by matrices of rank k,

        L = p (T - J),    V = L D - (L D LT) T / 2,    D' = D - TT V - VT T, less half the spread of each cluster

    The cost of a pair is its distance times w / (1 + w / w'); the first w follows once the row is searched.
    """
    n, eps = mass.shape[1], torch.finfo(mass.dtype).eps
    limit = torch.finfo(torch.float32).max / 2
    index = torch.arange(n, device=mass.device)
    earlier = index < index[:, None]
    mass = mass[:, :, None]  # B n 1, as all vectors below
    if not many_ties:  # of equal ones the earlier counts as the larger: steps of rounding order them for all rounds
        twins = ((mass.transpose(1, 2) == mass) & earlier).to(mass.dtype).sum(dim=2, keepdim=True)
        mass = mass - mass * twins * (8 * eps)
    distances = F.relu(0.25 - 0.25 * (unit @ unit.transpose(1, 2)))  # an eighth of the squared ones: in the same order
    itself = torch.where(mass > 0, index[:, None], 0)  # B n 1, without a shape to work out
    joined: list[Tensor] = []
    targets: list[Tensor] = []
    for k in joining_per_round:
        inverse = mass.reciprocal()  # infinite for tokens that joined: nothing joins them
        ratios = mass * inverse.transpose(1, 2).clamp_max(limit)
        costs = distances / (1 + ratios)  # below 1; times the mass of the row
        if many_ties:
            costs = torch.where((ratios < 1) | ((ratios == 1) & earlier), costs, 1.0)
        else:
            costs = costs + _where_above(ratios, 1 - 2 * eps)
        best = costs.amin(dim=2, keepdim=True) * mass
        if joined:  # not those that joined
            best = best + F.relu(inverse - limit)
        joining = best.topk(k, dim=1, largest=False).indices  # B k 1
        partner = gather_rows(costs, joining).argmin(dim=2, keepdim=True)  # of few tokens: a search is slow
        parent = itself.scatter(1, joining, partner)
        for _ in range((k - 1).bit_length()):  # a partner may join another: chains of at most k tokens
            parent = parent.gather(1, parent)
        target = parent.gather(1, joining)
        joined.append(joining)
        targets.append(target)
        if len(joined) == len(joining_per_round):
            break
        into, merged = (target == index).to(mass.dtype), (joining == index).to(mass.dtype)  # B k n
        added, moves = mass.gather(1, joining), into - merged
        mass = mass + moves.transpose(1, 2) @ added  # exactly 0 for tokens that joined
        left = moves * (added / mass.gather(1, target))
        moved = left @ distances
        moved = moved - (moved @ left.transpose(1, 2)) @ (into / 2)
        moved = moved - (into * moved).sum(dim=2, keepdim=True)
        distances = distances - torch.cat([into, moved], 1).transpose(1, 2) @ torch.cat([moved, into], 1)
    joining = torch.cat(joined, dim=1)
    root = itself.scatter(1, joining, torch.cat(targets, dim=1))
    for _ in range((len(joined) - 1).bit_length()):  # a target may join another in a later round
        root = root.gather(1, root)
    root, others = root[:, :, 0], joining[:, :, 0]
    stays = root == index
    kept = torch.where(stays, n - index, 0).topk(n - others.shape[1], dim=1).indices
    slots = stays.cumsum(1).gather(1, root.gather(1, others)) + (protected - 1)
    offset = F.pad(index.new_full((n,), protected), (protected, 0)) + F.pad(
        torch.arange(protected, device=mass.device), (0, n)
    )
    return root, SlotSplit(F.pad(torch.cat([kept, others], dim=1), (protected, 0)) + offset, slots)
