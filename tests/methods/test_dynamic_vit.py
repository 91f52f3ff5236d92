"""DynamicViT against its description, one image at a time, and its published token counts and costs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mctf
from helpers import reference
from helpers.dropping import dropped
from helpers.learned import assert_as_taught_or_refused, gelu, layer_norm, linear, perceptron, teach
from helpers.models import ONE_PER_OPS, make, make_images
from helpers.naive import PLAIN, NaiveBlock, NaiveContext, assert_as_naive, by_falling, plain_block
from helpers.reference import Groups, Tokens
from helpers.reference_blocks import Pieces
from mctf import MctfError

SCHEDULE = [0, 0.3, 0.3, 0.3]


def keep_scores(layers: dict[str, Tensor], block: int, patches: Tensor) -> list[float]:
    """Log-probability of keeping each of the patches (n C), all of them still there."""
    prefix = f"token_reduction.{block}"
    read = torch.stack(
        [gelu(linear(layers, f"{prefix}.read.1", layer_norm(layers, f"{prefix}.read.0", patch))) for patch in patches]
    )
    half = patches.shape[1] // 2
    common = read[:, half:].mean(dim=0)
    logits = [perceptron(layers, f"{prefix}.score", torch.cat([row[:half], common])) for row in read]
    return [float(pair.log_softmax(dim=0)[0]) for pair in logits]


def naive_dynamic_vit(layers: dict[str, Tensor]) -> NaiveBlock:
    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        if ctx.amount == 0:
            return plain_block(pieces, tokens)
        first = ctx.protected
        ctx.kept["stage"] = ctx.kept.get("stage", 0) + 1
        keep = int((ctx.initial - first) * (1 - ctx.amount) ** ctx.kept["stage"])
        scores = [0.0] * first + keep_scores(layers, ctx.index, tokens.x[first:])
        stay = [*range(first), *sorted(by_falling(scores, range(first, len(scores)))[:keep])]
        left, groups = dropped(tokens, stay, tokens.x[stay], first)
        return reference.whole_block(pieces, left, PLAIN), groups

    return block


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    assert_as_taught_or_refused(name, naive_dynamic_vit, method="dynamic_vit", schedule=SCHEDULE)


@torch.no_grad()
def test_another_predictor_would_be_noticed() -> None:
    model = make("plain").double()
    block = naive_dynamic_vit(teach(model, "dynamic_vit", SCHEDULE, seed=1))
    teach(model, "dynamic_vit", SCHEDULE)
    with pytest.raises(AssertionError):
        assert_as_naive(model, make_images(model, 1), block, method="dynamic_vit", schedule=SCHEDULE, with_sizes=False)


# rho 0.7 of 196 patches: int(137.2), int(96.04), int(67.2), and the class token
KEEP_70 = [197] * 3 + [138] * 3 + [97] * 3 + [68] * 3


def test_the_published_setting() -> None:
    plan = mctf.plan("deit_small_patch16_224", method="dynamic_vit")
    assert plan.token_counts == KEEP_70
    assert plan.gflops == pytest.approx(2.9, abs=0.1)
    assert plan.parameters == pytest.approx(23e6, abs=0.5e6)
    assert plan.notes == []
    assert str(plan).endswith("22.8 M parameters, 0.72 M of them learned")
    lv_vit = mctf.plan("lvvit_s", method="dynamic_vit")
    assert lv_vit.gflops == pytest.approx(4.6, abs=0.1)
    assert lv_vit.parameters == pytest.approx(26.9e6, abs=0.1e6)


@pytest.mark.parametrize(
    ("r", "counts"),
    [
        (16, [65, 49, 33, 17]),
        ([0, 1000, 0.3, 3], [65, 2, 2, 2]),
        (0.9, [65, 7, 2, 2]),
        ([0.5, 0, 0, 0.5], [33, 33, 33, 17]),
    ],
)
@torch.no_grad()
def test_counts_ratios_and_one_patch_that_stays(r: Any, counts: list[int]) -> None:
    model = make("plain")
    teach(model, "dynamic_vit", r)
    mctf.fuse(model, "dynamic_vit", r=r)
    with mctf.trace(model) as trace:
        model(make_images(model, 2))
    assert trace.token_counts == mctf.plan(model, method="dynamic_vit", r=r).token_counts == counts


@pytest.mark.parametrize("option", ["ratio_weight", "answer_weight", "token_weight"])
@pytest.mark.parametrize("value", [-1, "much", True, float("inf")])
def test_bad_weights_are_refused(option: str, value: object) -> None:
    with pytest.raises(MctfError, match=f"{option}=.* must be a finite number, 0 or above"):
        mctf.fuse(make("plain"), "dynamic_vit", **{option: value})
