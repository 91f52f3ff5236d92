"""What the references of all methods share: one image at a time, an explicit map, groups of tokens as lists.

A method's test writes a `NaiveBlock` from the method's description, sharing no code with the library, and compares
by `assert_as_naive`. The host's part of a block comes from the family of the model, as in `reference`.

Axes: H heads, N tokens entering a block, M tokens leaving it, C channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers import reference
from helpers.families import DEPTH
from helpers.models import family_of, make, make_images, run
from helpers.reference import Groups, Options, Tokens
from helpers.reference_blocks import Pieces

# Sizes and shares of places are float32 in the library, and so are some rotary tables; the rest is float64 here.
TOLERANCE = 1e-5
PLAIN = Options(proportional=False)  # attention that does not know of sizes


@dataclass(frozen=True)
class NaiveContext:
    """What a naive block knows beside its tokens: its number, what the user asked of it, the leading tokens that stay.

    initial: tokens that entered the first block. kept: a dictionary that lives as long as one image's pass, for
    methods that hand something on from block to block.
    """

    index: int
    amount: float
    protected: int
    initial: int
    kept: dict[str, Any]


NaiveBlock = Callable[[Pieces, Tokens, NaiveContext], tuple[Tokens, Groups]]


def run_naive(model: nn.Module, tokens: Tensor, schedule: Sequence[float], block: NaiveBlock) -> reference.Result:
    """All blocks of the model on one image's tokens (N C); amount l of the schedule is for block l."""
    family, count = family_of(model), len(tokens)
    present = Tokens(tokens, [1.0] * count, [{place: 1.0} for place in range(count)])
    every, covered, kept = [], [], {}
    for index, (pieces, amount) in enumerate(zip(family.pieces(model), schedule, strict=True)):
        ctx = NaiveContext(index, amount, family.prefix(model), count, kept)
        present, groups = block(pieces, present, ctx)
        every.append(groups)
        covered.append(present.covered())
    return reference.Result(present.x, present.sizes, every, covered)


def assert_as_naive(
    model: nn.Module,
    images: Tensor,
    block: NaiveBlock,
    *,
    method: str,
    schedule: Sequence[float],
    with_sizes: bool = True,
    **options: Any,
) -> None:
    """The fused model's final tokens, source map, dropped tokens, output and (where counted) sizes are the naive ones.

    The model must be in float64, so that no rounding decides between nearly equal tokens.
    """
    family = family_of(model)
    tokens = family.embed(model, images)
    expected = [run_naive(model, one, schedule, block) for one in tokens]

    mctf.fuse(model, method, r=list(schedule), restore="copy", **options)
    with mctf.trace(model) as trace:
        output = run(model, images)
        features = family.features(model, images)
    mctf.unfuse(model)

    assert_dropped_as_naive(trace, expected)
    for image, slow in enumerate(expected):
        where = slow.source_map(tokens.shape[1])
        assert trace.source_map()[image].tolist() == where
        if with_sizes:
            assert trace.blocks[-1].sizes[image].tolist() == pytest.approx(slow.sizes, rel=TOLERANCE)
        final = family.finish(model, (slow.tokens[where] if family.keeps_every_token(model) else slow.tokens)[None])
        torch.testing.assert_close(features[image], final[0], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(output[image], family.head(model, final)[0], atol=TOLERANCE, rtol=TOLERANCE)


def assert_dropped_as_naive(trace: mctf.Trace, expected: Sequence[reference.Result]) -> None:
    """After every block those input tokens of each image are dropped that have no share in any token."""
    for image, slow in enumerate(expected):
        for block, covered in enumerate(slow.covered):
            found = trace.dropped(block)[image].tolist()
            assert found == [place not in covered for place in range(len(found))]


def assert_as_naive_or_refused(name: str, block: NaiveBlock, *, method: str, schedule: Sequence[float]) -> None:
    """A method that reads the class token runs the model of this name as naively, or refuses it for want of one."""
    model = make(name).double()
    if family_of(model).prefix(model) > 0:
        assert_as_naive(model, make_images(model, 2), block, method=method, schedule=schedule)
    else:
        assert_refused_for_want_of_a_class_token(model, method)


def plain_block(block: Pieces, tokens: Tokens, options: Options = PLAIN) -> tuple[Tokens, Groups]:
    """The block as it is: every token stays, attention is proportional where the options say so."""
    return reference.whole_block(block, tokens, options), [[i] for i in range(len(tokens.x))]


def attended(block: Pieces, tokens: Tokens, options: Options = PLAIN) -> tuple[Tensor, Tensor]:
    """The tokens after the attention branch, N C, and the attention they were given, H N N."""
    read = block.read(tokens.x)
    full_map = reference.attention_map(block, read, tokens, options)
    context = reference.joined_heads(full_map @ block.values(read))
    return block.add_attention(tokens.x, block.finish(context, read)), full_map


def fused_by_size(
    block: Pieces, tokens: Tokens, options: Options, grouped: Callable[[Tensor], Groups]
) -> tuple[Tokens, Groups]:
    """Groups of keys, averaged over heads (N d), become size-weighted means between attention and MLP."""
    x, _ = attended(block, tokens, options)
    _, keys = block.queries_keys(block.read(tokens.x), tokens.cover)
    groups = grouped(keys.mean(dim=0))
    rows = reference.pool(x, groups, tokens.sizes, "size")
    return tokens.fused(groups, tokens.sizes, block.add_mlp(rows)), groups


def by_falling(scores: Sequence[float], places: Sequence[int]) -> list[int]:
    """These places, from the largest of their scores to the smallest, equal ones in their order."""
    return sorted(places, key=lambda place: -scores[place])


def assert_r_0_is_plain(model: nn.Module, images: Tensor, method: str, **options: Any) -> None:
    """A method that is to take nothing leaves the model's output as it is, bit for bit."""
    before = run(model, images)
    for nothing in (0, 0.0, [0] * DEPTH):
        mctf.fuse(model, method, r=nothing, **options)
        assert torch.equal(run(model, images), before)
        assert torch.equal(run(mctf.unfuse(model), images), before)


def assert_images_do_not_meet(model: nn.Module, images: Tensor) -> None:
    """A fused model in float64 gives a batch what it gives its images one by one."""
    apart = torch.cat([run(model, images[i : i + 1]) for i in range(len(images))])
    torch.testing.assert_close(run(model, images), apart, atol=1e-9, rtol=1e-9)


def assert_refused_for_want_of_a_class_token(model: nn.Module, method: str) -> None:
    """The error says why, and the model can still be fused by another method."""
    with pytest.raises(mctf.MctfError, match=r"the class token, which this model's blocks do not have: use '"):
        mctf.fuse(model, method)
    mctf.unfuse(mctf.fuse(model, "tome", r=4))
