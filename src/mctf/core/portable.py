"""Operations in the form that every runtime takes: no sort, no scattered sum, no loop, few nodes.

`torch.export` writes down what runs, and ONNX Runtime, OpenVINO and TensorRT execute it. Sorting with ties and sums
over scattered indices are missing or slow there. While a model is exported (`exporting`), ranks are counted, sums over
slots are a gather and one small matrix product.

Axes: B images, N tokens, n of them unprotected, M slots, C channels.
"""

from collections.abc import Iterator
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
