"""A-ViT against its description: one image at a time, each token's halting followed by itself."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import mctf
from helpers import reference
from helpers.models import DEPTH, ONE_PER_OPS, family_of, make, make_images, run, tokens_of
from helpers.naive import PLAIN, TOLERANCE
from helpers.reference import Tokens
from mctf import MctfError
from mctf.api import fused_stack
from mctf.methods.a_vit import prior_divergence
from mctf.train.two_branch import run_branch

GAMMA, BETA = 3.0, 2.0  # at these the first channels of the tiny models halt tokens after every block


@dataclass
class Naive:
    """One image: the mean of each token, N C; blocks run and remainder, N; scores and running tokens by block.

    places: by block the tokens that have a place: those that run on, the protected ones, and, where these are none, the
    first of those that had one.
    """

    means: Tensor
    ponder: list[float]
    scores: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    places: list[set[int]] = field(default_factory=list)


def naive_a_vit(model: nn.Module, x: Tensor, blocks: list[int] | None = None) -> Naive:
    """All blocks on one image's tokens (N C). blocks: those after which tokens may halt, all by default."""
    family = family_of(model)
    pieces, protected, tokens = family.pieces(model), family.prefix(model), len(x)
    found = Naive(torch.zeros_like(x), [0.0] * tokens)
    gathered, rest = [0.0] * tokens, [1.0] * tokens
    running, places = list(range(tokens)), set(range(tokens))
    for index, block in enumerate(pieces):
        if running:
            x = reference.whole_block(block, Tokens(x, [1.0] * len(x), [{place: 1.0} for place in running]), PLAIN).x
        still, score = [], 0.0
        for row, token in enumerate(running):
            h = 1 / (1 + math.exp(BETA - GAMMA * float(x[row, 0])))
            h = h if blocks is None or index in blocks else 0.0
            score += h if token >= protected else 0.0
            h = 1.0 if index == len(pieces) - 1 else h
            gathered[token] += h
            found.ponder[token] += 1
            if gathered[token] > 0.99:
                found.means[token] += rest[token] * x[row]
                found.ponder[token] += rest[token]
            else:
                found.means[token] += h * x[row]
                rest[token] -= h
                still.append(row)
        if index < len(pieces) - 1:
            x, running = x[still], [running[row] for row in still]
            places = {*range(protected), *running} or {min(places)}
        found.places.append(places)
        found.scores.append(score / (tokens - protected))
        found.counts.append(len(running))
    return found


def naive_images(model: nn.Module, images: Tensor, blocks: list[int] | None = None) -> list[Naive]:
    return [naive_a_vit(model, one, blocks) for one in family_of(model).embed(model, images)]


def assert_as_described(model: nn.Module, images: Tensor, expected: list[Naive]) -> None:
    """Running and dropped tokens, means and output of the fused model are those of the images alone."""
    family = family_of(model)
    with mctf.trace(model) as trace:
        output, features = run(model, images), family.features(model, images)
    found = torch.stack([(block.sizes > 0).sum(dim=1) for block in trace.blocks], dim=1)
    assert found.tolist() == [[max(1, count) for count in each.counts] for each in expected]
    for image, naive in enumerate(expected):
        for block, places in enumerate(naive.places):
            dropped = trace.dropped(block)[image].tolist()
            assert dropped == [token not in places for token in range(len(dropped))]
        final = family.finish(model, naive.means[None])
        torch.testing.assert_close(features[image], final[0], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(output[image], family.head(model, final)[0], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described(name: str) -> None:
    model = make(name).double()
    images = make_images(model, 3)
    expected = naive_images(model, images)
    mctf.fuse(model, "a_vit", gamma=GAMMA, beta=BETA)
    assert_as_described(model, images, expected)
    assert len({tuple(each.counts) for each in expected}) > 1  # padding is tested
    assert all(each.counts[-1] < tokens_of(model) for each in expected)


@torch.no_grad()
def test_some_class_tokens_halt_before_the_end() -> None:
    """So that the tests above say something of them; what follows cannot matter to the class token's mean."""
    model = make("plain").double()
    assert any(each.ponder[0] < DEPTH for each in naive_images(model, make_images(model, 16)))


@pytest.mark.parametrize("blocks", [[1], [0, 2], [3]])
@torch.no_grad()
def test_some_blocks_only(blocks: list[int]) -> None:
    model = make("plain", seed=1).double()
    images = make_images(model, 2)
    expected = naive_images(model, images, blocks)
    mctf.fuse(model, "a_vit", blocks=blocks, gamma=GAMMA, beta=BETA)
    assert_as_described(model, images, expected)


@pytest.mark.parametrize("name", ["plain", "mean_pool"])
@torch.no_grad()
def test_images_whose_tokens_have_all_halted_leave_their_means(name: str) -> None:
    model = make(name).double()
    family, images = family_of(model), make_images(model, 2)
    x = family.embed(model, images)
    after_one = model.blocks[0](x)
    means = (after_one + model.blocks[1](after_one)) / 2
    mctf.fuse(model, "a_vit", gamma=0.0, beta=0.0)  # h is 1/2 everywhere: all halt after the second block
    with mctf.trace(model) as trace:
        output = run(model, images)
    assert [(block.sizes > 0).sum(dim=1).tolist() for block in trace.blocks][1:] == [[1, 1]] * 3
    assert trace.dropped().tolist() == [[False] + [True] * (tokens_of(model) - 1)] * 2  # the first one stands in
    torch.testing.assert_close(output, family.head(model, family.finish(model, means)), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_the_comparison_can_fail() -> None:
    model = make("plain").double()
    images = make_images(model, 2)
    expected = naive_images(model, images)
    mctf.fuse(model, "a_vit", gamma=GAMMA, beta=BETA + 0.1)
    with pytest.raises(AssertionError):
        assert_as_described(model, images, expected)


class TestLoss:
    @pytest.fixture
    def model(self) -> Any:
        return make("registers").double()

    def test_is_that_of_the_naive_pass(self, model: Any) -> None:
        images = make_images(model, 3)
        with torch.no_grad():
            expected = naive_images(model, images)
        mctf.fuse(model, "a_vit", gamma=GAMMA, beta=BETA, ponder_weight=2.0, prior_weight=0.5)
        loss = fused_stack(model).method.extra_loss(model, images, None, (run_branch(model.train(), images),))
        ponder = sum(sum(each.ponder) for each in expected) / (3 * tokens_of(model))
        scores = torch.tensor([each.scores for each in expected], dtype=torch.float64).mean(dim=0)
        assert loss.item() == pytest.approx(2 * ponder + 0.5 * naive_prior(scores.tolist(), centre=3), rel=1e-6)

    @pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
    def test_a_wanted_share_weighs_the_ponder_loss_by_what_is_amiss(self, model: Any, keep: float) -> None:
        images = make_images(model, 3)
        with torch.no_grad():
            expected = naive_images(model, images)
        options = {"ponder_weight": 0.5, "prior_weight": 0.0, "keep": keep, "keep_weight": 4.0}
        mctf.fuse(model, "a_vit", gamma=GAMMA, beta=BETA, **options)
        loss = fused_stack(model).method.extra_loss(model, images, None, (run_branch(model.train(), images),))
        ponders = [each for image in expected for each in image.ponder]
        run = sum(math.ceil(each) - 1 for each in ponders) / len(ponders) / len(model.blocks)
        weight = 0.5 + 4 * (run - keep)
        assert 0 < run < 1
        assert loss.item() == pytest.approx(weight * sum(ponders) / len(ponders), rel=1e-6)

    def test_reaches_every_parameter_of_the_blocks(self, model: Any) -> None:
        images = make_images(model, 3)
        mctf.fuse(model.train(), "a_vit", gamma=GAMMA, beta=BETA)
        fused_stack(model).method.extra_loss(model, images, None, (run_branch(model, images),)).backward()
        assert all(each.grad.abs().sum() > 0 for each in model.blocks[1].parameters())

    def test_a_longer_way_to_the_end_costs_more(self, model: Any) -> None:
        images = make_images(model, 2)
        losses = []
        for beta in (0.5, 2.0, 8.0):
            mctf.fuse(model, "a_vit", gamma=GAMMA, beta=beta, ponder_weight=1.0, prior_weight=0.0)
            losses.append(fused_stack(model).method.extra_loss(model, images, None, (run_branch(model, images),)))
            mctf.unfuse(model)
        assert losses[0] < losses[1] < losses[2]

    def test_is_0_where_nothing_halts(self, model: Any) -> None:
        mctf.fuse(model, "a_vit", r=0)
        images = make_images(model, 1)
        assert fused_stack(model).method.extra_loss(model, images, None, (run_branch(model, images),)) == 0

    def test_the_prior_is_as_described(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(12, generator=generator, dtype=torch.float64)
        assert prior_divergence(scores, None).item() == pytest.approx(naive_prior(scores.tolist(), centre=8))
        assert prior_divergence(scores, 5).item() == pytest.approx(naive_prior(scores.tolist(), centre=5))
        tiny = prior_divergence(
            scores * 1e-9, None
        )  # where tokens hardly halt yet, their order is learned all the same
        assert tiny.item() == pytest.approx(naive_prior(scores.tolist(), centre=8))


def naive_prior(scores: list[float], *, centre: int) -> float:
    density = [math.exp(-((block + 1 - centre) ** 2) / 2) for block in range(len(scores))]
    wanted = [0.98 * value / sum(density[:centre]) for value in density]
    found = [min(0.99, max(0.01, score / sum(scores))) for score in scores]
    return sum(f * math.log(f / w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("channels", "beta"), [(192, 30), (288, 30), (384, 75), (768, 75)])
@torch.no_grad()
def test_beta_goes_by_the_channels(channels: int, beta: float) -> None:
    x = torch.zeros(1, 2, channels, dtype=torch.float64)
    x[..., 0] = torch.tensor([0.0, 7.0])
    by_default, given = (mctf.methods.make_method("a_vit", options)._scores(x) for options in ({}, {"beta": beta}))
    assert torch.equal(by_default, given)
    assert given[0, 1].item() == pytest.approx(1 / (1 + math.exp(beta - 70)))


@torch.no_grad()
def test_a_model_whose_first_channels_are_small_starts_as_it_was() -> None:
    model = make("plain").double()
    images = make_images(model, 2)
    plain = run(model, images)
    mctf.fuse(model, "a_vit", beta=90.0)
    torch.testing.assert_close(run(model, images), plain, atol=1e-6, rtol=1e-6)


def test_the_prior_is_finite_where_all_scores_underflow() -> None:
    scores = torch.zeros(12, requires_grad=True)
    divergence = prior_divergence(scores, None)
    divergence.backward()
    assert divergence.isfinite()
    assert scores.grad.isfinite().all()


def test_the_plan_is_an_upper_bound() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
    plan = mctf.plan(model, method="a_vit")
    assert plan.token_counts == [197] * 12
    assert plan.gflops == plan.gflops_base
    assert plan.notes == ["how many tokens leave depends on the image: token counts and GFLOPs are upper bounds"]
    assert (
        mctf.fuse(timm.create_model("test_vit"), "a_vit").state_dict().keys()
        == timm.create_model("test_vit").state_dict().keys()
    )


def test_there_are_no_layers_beside_the_model_s_own() -> None:
    names = set(make("plain").state_dict())
    assert set(mctf.fuse(make("plain"), "a_vit").state_dict()) == names


@pytest.mark.parametrize(
    "options", [{"gamma": -1}, {"beta": float("inf")}, {"ponder_weight": True}, {"centre": 0}, {"centre": 1.5}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MctfError, match="must be"):
        mctf.fuse(make("plain"), "a_vit", **options)
