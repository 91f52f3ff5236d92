"""SPViT against its description, one image at a time, and its published costs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mctf
from helpers import reference
from helpers.learned import assert_as_taught_or_refused, gelu, layer_norm, linear, perceptron, teach
from helpers.models import ONE_PER_OPS, make, make_images
from helpers.naive import PLAIN, NaiveBlock, NaiveContext, assert_as_naive, by_falling, plain_block
from helpers.reference import Groups, Tokens
from helpers.reference_blocks import Pieces

SCHEDULE = [0, 0.383, 0.383, 0.383]
SHARES = [0.617, 0.369, 0.137]


def keep_probabilities(layers: dict[str, Tensor], block: int, patches: Tensor, heads: int) -> list[float]:
    """Probability of keeping each of the patches (n C): a mean over heads, which share their layers."""
    prefix = f"token_reduction.{block}"
    parts = patches.view(len(patches), heads, -1)
    width = parts.shape[2]
    read = [
        [gelu(linear(layers, f"{prefix}.read.1", layer_norm(layers, f"{prefix}.read.0", part))) for part in patch]
        for patch in parts
    ]
    common = [sum(row[head][width // 2 :] for row in read) / len(read) for head in range(heads)]
    probabilities = []
    for patch, row in zip(parts, read, strict=True):
        hidden = gelu(linear(layers, f"{prefix}.weigh.0", patch.mean(dim=1)))
        weights = torch.sigmoid(linear(layers, f"{prefix}.weigh.2", hidden))
        logits = [
            perceptron(layers, f"{prefix}.score", torch.cat([own[: width // 2], mean]))
            for own, mean in zip(row, common, strict=True)
        ]
        keep = sum(weight * pair.softmax(dim=0)[0] for weight, pair in zip(weights, logits, strict=True))
        probabilities.append(float(keep / weights.sum()))
    return probabilities


def naive_spvit(layers: dict[str, Tensor]) -> NaiveBlock:
    heads = layers["token_reduction.1.weigh.0.weight"].shape[1]

    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        if ctx.amount == 0:
            return plain_block(pieces, tokens)
        first, packages = ctx.protected, ctx.kept.get("packages", 0)
        last = len(tokens.x) - packages
        ctx.kept["packages"] = packages + 1
        share = SHARES[packages] ** (math.log(1 - ctx.amount) / math.log(SHARES[0]))
        keep = int(share * (ctx.initial - first))
        scores = [0.0] * first + keep_probabilities(layers, ctx.index, tokens.x[first:last], heads)
        ranked = by_falling(scores, range(first, last))
        groups = [[i] for i in [*range(first), *sorted(ranked[:keep]), *range(last, len(tokens.x))]]
        groups.append(sorted(ranked[keep:]))
        weights = [1.0] * len(tokens.x)
        for i in ranked[keep:]:
            weights[i] = scores[i]
        fused = tokens.fused(groups, weights, reference.pool(tokens.x, groups, weights, "attention"))
        return reference.whole_block(pieces, fused, PLAIN), groups

    return block


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    assert_as_taught_or_refused(name, naive_spvit, method="spvit", schedule=SCHEDULE)


@torch.no_grad()
def test_an_unweighted_package_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("plain").double()
    block = naive_spvit(teach(model, "spvit", SCHEDULE))
    pool = reference.pool
    monkeypatch.setattr(reference, "pool", lambda x, groups, weights, how: pool(x, groups, [1.0] * len(x), how))
    with pytest.raises(AssertionError):
        assert_as_naive(model, make_images(model, 1), block, method="spvit", schedule=SCHEDULE, with_sizes=False)


def test_the_published_setting() -> None:
    small = mctf.plan("deit_small_patch16_224", method="spvit")
    assert small.gflops == pytest.approx(2.6, abs=0.1)
    assert small.parameters == pytest.approx(22e6, abs=0.5e6)
    assert mctf.plan("lvvit_s", method="spvit").gflops == pytest.approx(4.3, abs=0.1)
    assert mctf.plan("deit_tiny_patch16_224", method="spvit", r=0.2).gflops == pytest.approx(0.9, abs=0.1)


def test_the_shares_of_the_released_script() -> None:
    plan = mctf.plan("deit_small_patch16_224", method="spvit", r=0.383)
    kept = [int(196 * share) for share in SHARES]
    assert kept == [120, 72, 26]
    # and the class token, and one package more at each stage
    assert plan.token_counts == [197] * 3 + [122] * 3 + [75] * 3 + [30] * 3
    assert plan.gflops == pytest.approx(2.5, abs=0.05)
    assert plan.notes == []


@pytest.mark.parametrize(
    ("r", "counts"),
    [
        (16, [65, 50, 35, 20]),
        (0.001, [65, 65, 65, 65]),  # one patch would become a package of one
        ([0, 1000, 0, 5], [65, 3, 3, 3]),
        ([0, 30, 2, 1000], [65, 36, 35, 5]),
        ([2, 0.34, 0.34, 0.34], [64, 30, 15, 7]),
    ],
)
@torch.no_grad()
def test_counts_ratios_and_one_patch_that_stays(r: Any, counts: list[int]) -> None:
    model = make("plain")
    teach(model, "spvit", r)
    mctf.fuse(model, "spvit", r=r)
    with mctf.trace(model) as trace:
        model(make_images(model, 2))
    assert trace.token_counts == mctf.plan(model, method="spvit", r=r).token_counts == counts
