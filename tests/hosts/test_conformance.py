"""Every host's BlockOps keeps the contract that methods rely on; one block of every model of the matrix.

The host's own block, called as a whole, is the reference for the pieces. Everything else is compared with the explicit
attention map, in float64. Axes: B images, H heads, N tokens, M tokens after fusion, d channels per head.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import mctf
from helpers.models import NAMES, family_of, make, make_images, run
from mctf.core.assignment import Assignment
from mctf.methods.base import BlockOps, BlockOutput
from mctf.methods.mctf import MCTF

BLOCK = 2


def capture(name: str) -> tuple[Any, Tensor, int]:
    """The pieces of one block inside a forward pass of the model, its input tokens, and the number of prefix tokens."""
    model = make(name).double()
    calls: list[tuple[BlockOps, Tensor]] = []

    def record(method: MCTF, block: BlockOps, x: Tensor, *_: object) -> BlockOutput:
        calls.append((block, x))
        return BlockOutput(block.plain(x), None)

    with patch.object(MCTF, "run", record), torch.no_grad():
        run(mctf.fuse(model, r=0), make_images(model, 2))
    return *calls[BLOCK], family_of(model).prefix(model)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_assignment(tokens: int, count: int, *, prefix: int, seed: int) -> tuple[Assignment, Tensor]:
    """Two images' tokens merged to `count`, prefix tokens kept, and weights; one token is dropped (weight 0)."""
    slots = torch.empty(2, tokens, dtype=torch.long)
    weights = 0.5 + draw(seed + 2, 2, tokens)
    for image in range(2):
        order = draw(seed + image, tokens - prefix).argsort() % (count - prefix)  # every slot has a token
        slots[image] = torch.cat([torch.arange(prefix), prefix + order])
        weights[image, int((slots[image] == prefix).nonzero()[0])] = 0.0  # slot `prefix` has at least two tokens
    return Assignment(slots, count), weights


def shares(assignment: Assignment, weights: Tensor) -> Tensor:
    """The share of each token in each slot, as a matrix whose rows sum to 1: B M N."""
    member = torch.nn.functional.one_hot(assignment.slots, assignment.count).transpose(1, 2)
    weighted = member * weights[:, None]
    return weighted / weighted.sum(dim=2, keepdim=True)


def join(heads: Tensor) -> Tensor:
    """B H N d -> B N (H d)."""
    return heads.transpose(1, 2).flatten(2)


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to float32's rounding: some rotary tables and eager softmaxes of the hosts are in float32."""
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6, msg=lambda text: f"{what}: {text}")


def pieces(block: BlockOps, x: Tensor) -> Tensor:
    """The block, composed of its pieces."""
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    context = block.finish_context(block.attend(q, k, v, sizes=None), h)
    return block.add_mlp(block.add_attention(x, context))


def mean_rows(full_map: Tensor, rows: str) -> Tensor:
    mean, first = full_map.mean(dim=(1, 2)), full_map[:, :, 0].mean(dim=1)
    return {"mean": mean, "class": first, "both": (mean + first) / 2}[rows].clamp_min(0)  # CaiT's maps may be negative


def check_attention(block: Any, x: Tensor, assignment: Assignment) -> None:
    """`attend`, `attention_received` and `attend_with_received` agree with `attention_map`, whatever the sizes."""
    q, k, v = block.queries_keys_values(block.norm1(x))
    sizes = (draw(3, *x.shape[:2]) * 4).ceil()
    slot_values = draw(4, v.shape[0], v.shape[1], assignment.count, v.shape[3])
    index = assignment.slots[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    for given in (None, sizes):
        full_map = block.attention_map(q, k, sizes=given)
        context = join(full_map @ v)
        close(block.attend(q, k, v, sizes=given), context, "attend")
        unpooled = block.attend(q, k, slot_values, sizes=given, unpool=assignment)
        close(unpooled, join(full_map @ slot_values.gather(2, index)), "attend with unpool")
        for rows in ("mean", "class", "both"):
            expected = mean_rows(full_map, rows)
            received = block.attention_received(q, k, sizes=given, rows=rows, keep=True)
            close(received.partial.sum(dim=1), expected, f"attention_received of {rows}")
            close(block.attend(q, k, v, sizes=given, received=received), context, "attend with received")
            both, partial = block.attend_with_received(q, k, v, sizes=given, rows=rows)
            close(both, context, f"context of attend_with_received of {rows}")
            close(partial.sum(dim=1), expected, f"attend_with_received of {rows}")
    check_sizes(block, q, k, sizes)


def check_sizes(block: Any, q: Tensor, k: Tensor, sizes: Tensor) -> None:
    """A key of size s counts like s equal keys."""
    sized, unsized = (block.attention_map(q, k, sizes=given) for given in (sizes, None))
    if block.bias is not None:  # its shape does not admit repeated keys; rows are proportional to s
        weighted = unsized * sizes[:, None, None]
        close(sized, weighted / weighted.sum(dim=-1, keepdim=True), "attention_map with sizes")
        return
    for image, counts in enumerate(sizes.long()):
        repeated = block.attention_map(q[image, None], k[image, None].repeat_interleave(counts, dim=2), sizes=None)
        copies = torch.arange(len(counts)).repeat_interleave(counts)
        summed = torch.zeros_like(sized[image, None]).index_add(3, copies, repeated)
        close(sized[image, None], summed, "attention_map with sizes")


def check_fused(block: Any, x: Tensor, assignment: Assignment, weights: Tensor, *, prefix: int) -> None:
    """After `fused`, positions are the means over the merged tokens, and again after a second fusion."""
    share = shares(assignment, weights)
    fused = block.fused(assignment, weights)
    check_means(block, fused, share @ x, assignment, share)
    close(pieces(fused, share @ x), fused.plain(share @ x), "pieces after fused")

    later, later_weights = random_assignment(assignment.count, assignment.count - 7, prefix=prefix, seed=50)
    both = shares(later, later_weights) @ share
    check_means(block, fused.fused(later, later_weights), both @ x, assignment.compose(later), both)


def check_means(block: Any, fused: Any, x: Tensor, assignment: Assignment, share: Tensor) -> None:
    """Queries, keys and bias of fused tokens (B M C) are linear in positions: means over those of the input tokens."""
    h = fused.norm1(x)
    at_every_position = block.queries_keys(assignment.unpool(h))
    for name, actual, every in zip(("queries", "keys"), fused.queries_keys(h), at_every_position, strict=True):
        close(actual, share[:, None] @ every, f"{name} after fused")
    if block.bias is not None:
        close(fused.bias, share[:, None] @ block.bias @ share[:, None].mT, "bias after fused")


@torch.no_grad()
def check_block(block: Any, x: Tensor, *, prefix: int) -> None:
    """The whole contract of BlockOps, for one block on tokens x (B N C)."""
    close(pieces(block, x), block.plain(x), "pieces")
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    for name, one, other in zip("qk", block.queries_keys(h), (q, k), strict=True):
        close(one, other, f"{name} of queries_keys")
    close(block.split_heads(block.values(h)), v, "values")
    assignment, weights = random_assignment(x.shape[1], x.shape[1] - 20, prefix=prefix, seed=10)
    check_attention(block, x, assignment)
    check_fused(block, x, assignment, weights, prefix=prefix)


@pytest.mark.parametrize("name", NAMES)
def test_the_pieces_of_a_block_keep_their_contract(name: str) -> None:
    block, x, prefix = capture(name)
    check_block(block, x, prefix=prefix)


def scaled_values(kind: type) -> type:
    class Wrong(kind):
        def values(self, h: Tensor) -> Tensor:
            return 1.001 * super().values(h)

    return Wrong


def without_norm(kind: type) -> type:
    class Wrong(kind):
        def norm1(self, x: Tensor) -> Tensor:
            return x

    return Wrong


def without_gate(kind: type) -> type:
    class Wrong(kind):
        def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
            return context

    return Wrong


def without_layer_scale(kind: type) -> type:
    class Wrong(kind):
        def add_mlp(self, x: Tensor) -> Tensor:
            return x + self.block.mlp(self.block.norm2(x))

    return Wrong


def without_bias(kind: type) -> type:
    class Wrong(kind):
        bias = None

    return Wrong


def without_sizes_in_attend(kind: type) -> type:
    class Wrong(kind):
        def attend(self, *args: Tensor, sizes: Tensor | None, **more: Any) -> Tensor:
            return super().attend(*args, sizes=None, **more)

    return Wrong


def without_sizes(kind: type) -> type:
    class Wrong(without_sizes_in_attend(kind)):
        def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
            return super().attention_map(q, k, sizes=None)

        def attention_received(self, *args: Tensor, sizes: Tensor | None, **more: Any) -> Any:
            return super().attention_received(*args, sizes=None, **more)

        def attend_with_received(self, *args: Tensor, sizes: Tensor | None, **more: Any) -> Any:
            return super().attend_with_received(*args, sizes=None, **more)

    return Wrong


def with_mean_rows(kind: type) -> type:
    class Wrong(kind):
        def attention_received(self, *args: Tensor, rows: str, **more: Any) -> Any:
            return super().attention_received(*args, rows="mean", **more)

    return Wrong


def without_weights(kind: type) -> type:
    class Wrong(kind):
        def fused(self, assignment: Assignment, weights: Tensor) -> Any:
            return super().fused(assignment, torch.ones_like(weights))

    return Wrong


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("plain", scaled_values, "values"),
        ("hf_vit", scaled_values, "pieces"),
        ("plain", without_norm, "pieces"),
        ("gated", without_gate, "pieces"),
        ("layer_scale", without_layer_scale, "pieces"),
        ("beit", without_bias, "pieces"),
        ("hf_beit", without_bias, "pieces"),
        ("registers", without_sizes_in_attend, "attend"),
        ("plain", without_sizes, "attention_map with sizes"),
        ("relpos", without_sizes, "attention_map with sizes"),
        ("cait", without_sizes, "attention_map with sizes"),
        ("plain", with_mean_rows, "attention_received of class"),
        ("eva02", without_weights, "queries after fused"),
        ("naflex_rope", without_weights, "queries after fused"),
        ("beit_shared", without_weights, "bias after fused"),
        ("hf_dinov3", without_weights, "queries after fused"),
    ],
)
def test_a_wrong_piece_is_found(name: str, change: Callable[[type], type], text: str) -> None:
    if name not in NAMES:
        pytest.skip("the extra hf is not installed")
    block, x, prefix = capture(name)
    block.__class__ = change(type(block))
    with pytest.raises(AssertionError, match=f"^{text}: "):
        check_block(block, x, prefix=prefix)
