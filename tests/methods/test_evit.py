"""EViT against its description, one image at a time, and its published token counts and costs."""

import math

import pytest
import timm
import torch

import mctf
from helpers.models import ONE_PER_OPS, make, make_images
from helpers.naive import (
    NaiveBlock,
    NaiveContext,
    assert_as_naive,
    assert_as_naive_or_refused,
    attended,
    by_falling,
    plain_block,
)
from helpers.reference import Groups, Tokens
from helpers.reference_blocks import Pieces
from mctf import MctfError

SCHEDULE = [0.3, 9, 0, 0.5]


def attentive_tokens(amount: float, free: int, *, extra: int) -> int:
    """ceil(kappa * n) for a ratio 1 - kappa; for a count, so many that `amount` fewer tokens go on."""
    kept = free - amount - extra if isinstance(amount, int) else math.ceil((1 - amount) * free - 1e-9)
    return max(1, kept)


def naive_evit(*, fuse: bool) -> NaiveBlock:
    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        first, count = ctx.protected, len(tokens.x)
        kept = attentive_tokens(ctx.amount, count - first, extra=int(fuse))
        if ctx.amount == 0:
            return plain_block(pieces, tokens)
        x, full_map = attended(pieces, tokens)
        a = full_map[:, 0].mean(dim=0).tolist()
        ranked = by_falling(a, range(first, count))
        groups = [[i] for i in [*range(first), *ranked[:kept]]]
        rest = ranked[kept:]
        rows = [x[i] for (i,) in groups]
        if fuse:
            groups.append(rest)
            rows.append(sum(a[i] * x[i] for i in rest))
        else:
            groups[-1] += rest
        weights = a if fuse else [0.0 if i in rest else 1.0 for i in range(count)]
        return tokens.fused(groups, weights, pieces.add_mlp(torch.stack(rows))), groups

    return block


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    assert_as_naive_or_refused(name, naive_evit(fuse=True), method="evit", schedule=SCHEDULE)


@pytest.mark.parametrize("name", ["plain", "registers", "eva02"])
@torch.no_grad()
def test_inattentive_tokens_can_be_dropped(name: str) -> None:
    model = make(name).double()
    assert_as_naive(
        model,
        make_images(model, 2),
        naive_evit(fuse=False),
        method="evit",
        schedule=SCHEDULE,
        with_sizes=False,
        fuse_inattentive=False,
    )


@torch.no_grad()
def test_the_fused_token_is_a_sum_that_nobody_divides() -> None:
    """The comparison above would notice a mean in its place."""
    model = make("plain").double()

    def with_a_mean(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        x, full_map = attended(pieces, tokens)
        a = full_map[:, 0].mean(dim=0)
        ranked = by_falling(a.tolist(), range(1, len(x)))
        kept, rest = ranked[:40], ranked[40:]
        mean = (a[rest, None] * x[rest]).sum(dim=0) / a[rest].sum()
        groups = [[i] for i in [0, *kept]] + [rest]
        return tokens.fused(groups, a.tolist(), pieces.add_mlp(torch.stack([x[0], *x[kept], mean]))), groups

    def in_the_last_block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        return with_a_mean(pieces, tokens, ctx) if ctx.amount else plain_block(pieces, tokens)

    images, schedule = make_images(model, 1), [0, 0, 0, 23]
    assert_as_naive(model, images, naive_evit(fuse=True), method="evit", schedule=schedule)
    with pytest.raises(AssertionError):
        assert_as_naive(model, images, in_the_last_block, method="evit", schedule=schedule)


# kappa 0.7: 196 patches, ceil(0.7 * 196) = 138 and the fused one; ceil(0.7 * 139) = 98 and it; ceil(0.7 * 99) = 70
KEEP_70 = [197] * 3 + [140] * 3 + [100] * 3 + [72] * 3


@pytest.mark.parametrize(("name", "gflops"), [("deit_tiny_patch16_224", 0.8), ("deit_small_patch16_224", 3.0)])
def test_the_published_setting(name: str, gflops: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    plan = mctf.plan(model, method="evit")
    assert plan.token_counts == KEEP_70
    assert plan.gflops == pytest.approx(gflops, abs=0.1)
    assert plan.notes == []  # the fused token is no cap
    dropped = mctf.plan(model, method="evit", fuse_inattentive=False)
    assert dropped.token_counts == [197] * 3 + [139] * 3 + [98] * 3 + [69] * 3


def test_lv_vit_at_the_published_setting() -> None:
    plan = mctf.plan("lvvit_s", method="evit")
    assert plan.gflops == pytest.approx(4.7, abs=0.1)
    assert plan.token_counts[3:5] == [197, 140]  # a quarter of sixteen blocks


@pytest.mark.parametrize(("fuse", "left"), [(True, 2), (False, 1)])
@torch.no_grad()
def test_one_attentive_token_always_stays(fuse: bool, left: int) -> None:
    model = make("registers")
    mctf.fuse(model, "evit", r=[1000, 0, 0.9, 3], fuse_inattentive=fuse)
    with mctf.trace(model) as trace:
        assert model(make_images(model, 2)).isfinite().all()
    plan = mctf.plan(model, method="evit", r=[1000, 0, 0.9, 3], fuse_inattentive=fuse)
    assert trace.token_counts == plan.token_counts == [5 + left] * 4
    assert (plan.reductions[0].num_requested, plan.reductions[0].num_reduced) == (1000, 64 - left)
    assert plan.capped == [0, 3]


def test_an_option_that_is_no_switch_is_refused() -> None:
    with pytest.raises(MctfError, match="fuse_inattentive='no' must be True or False"):
        mctf.fuse(make("plain"), "evit", fuse_inattentive="no")
