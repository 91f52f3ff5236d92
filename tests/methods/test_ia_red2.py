"""IA-RED2 against its description: one image at a time, one token after the other."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import mctf
from helpers import reference
from helpers.dropping import assert_as_unpadded, dropped, run_each
from helpers.models import CLASSES, ONE_PER_OPS, family_of, make, make_images, run, tokens_of
from helpers.naive import PLAIN, NaiveBlock, NaiveContext, assert_refused_for_want_of_a_class_token, plain_block
from helpers.reference import Groups, Tokens
from helpers.reference_blocks import Pieces
from mctf import MctfError
from mctf.api import fused_stack
from mctf.methods._layers import UntrainedWarning
from mctf.methods.base import BlockOutput
from mctf.train.objective import Objective
from mctf.train.two_branch import Branch, run_branch, run_inference

pytestmark = pytest.mark.filterwarnings("ignore::mctf.methods._layers.UntrainedWarning")
SCHEDULE = [1, 0, 1, 1]


@torch.no_grad()
def answers(model: nn.Module, images: Tensor) -> Tensor:
    """What the model says of images in inference: as labels, they make inference right and other draws wrong."""
    training = model.training
    labels = model.eval()(images).argmax(dim=1)
    model.train(training)
    return labels


def fused(model: nn.Module, r: Any = None, **options: Any) -> nn.Module:
    """The model fused, its interpreters drawn at random, so that they drop some tokens and keep others."""
    mctf.fuse(model, "ia_red2", r=SCHEDULE if r is None else r, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.token_reduction.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def naive_ia_red2(layers: nn.ModuleDict) -> NaiveBlock:
    """Before a block that has layers (query, key), the tokens whose probability is 1/2 at most go."""

    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        if not ctx.amount:
            return plain_block(pieces, tokens)
        layer = layers[str(ctx.index)]
        stay = [
            token
            for token in range(len(tokens.x))
            if token < ctx.protected or naive_probability(layer, tokens.x[0], tokens.x[token]) > 0.5
        ]
        remaining, groups = dropped(tokens, stay, tokens.x[stay], ctx.protected)
        return reference.whole_block(pieces, remaining, PLAIN), groups

    return block


def naive_probability(layer: Any, class_token: Tensor, token: Tensor) -> float:
    def normed(x: Tensor) -> Tensor:
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()

    q, k = (each.view(layer.heads, -1) for each in (layer.query(normed(class_token)), layer.key(normed(token))))
    worth = [float(q[head] @ k[head]) / math.sqrt(q.shape[1]) for head in range(layer.heads)]
    return sum(1 / (1 + math.exp(-value)) for value in worth) / len(worth)


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    model = make(name).double()
    if family_of(model).prefix(model) == 0:
        assert_refused_for_want_of_a_class_token(model, "ia_red2")
        return
    images = make_images(model, 3)
    layers = fused(model).token_reduction
    mctf.unfuse(model)
    expected = run_each(model, images, naive_ia_red2(layers), SCHEDULE)
    counts = assert_as_unpadded(fused(model, restore="copy"), images, expected)
    assert len({tuple(each) for each in counts}) > 1  # padding is tested
    assert max(each[-1] for each in counts) < tokens_of(model)


@torch.no_grad()
def test_the_comparison_can_fail() -> None:
    model = make("plain").double()
    images = make_images(model, 2)
    layers = fused(model).token_reduction
    mctf.unfuse(model)
    layers["2"].key.bias += 0.05
    expected = run_each(model, images, naive_ia_red2(layers), SCHEDULE)
    with pytest.raises(AssertionError):
        assert_as_unpadded(fused(model), images, expected)


@contextmanager
def staying(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within, which tokens stay in each block that drops any, B N, is added to the list."""
    found: list[Tensor] = []

    class Observer:
        def record(self, index: int, x: Tensor, step: BlockOutput) -> None:
            if step.weights is not None:
                found.append(step.weights > 0)

    with fused_stack(model).observed_by(Observer()):
        yield found


class TestFresh:
    @pytest.mark.parametrize("name", ["plain", "registers", "eva02"])
    @torch.no_grad()
    def test_interpreters_keep_everything(self, name: str) -> None:
        model = make(name)
        images = make_images(model, 2)
        plain = run(model, images)
        mctf.fuse(model, "ia_red2")
        assert torch.equal(run(model, images), plain)
        probability = model.token_reduction["0"](family_of(model).embed(model, images))
        assert (probability > 0.5).all()
        assert probability.mean().item() == pytest.approx(0.62, abs=0.02)

    def test_layers_are_under_their_prefix_and_said_to_be_untrained(self) -> None:
        model = make("plain")
        with pytest.warns(UntrainedWarning, match="ia_red2"):
            mctf.fuse(model, "ia_red2")
        own = {name for name in model.state_dict() if name.startswith("token_reduction.")}
        assert own == {
            f"token_reduction.{block}.{layer}.{kind}"
            for block in (0, 1, 3)
            for layer in ("query", "key")
            for kind in ("weight", "bias")
        }
        assert "token_reduction" not in dict(mctf.unfuse(model).named_children())

    def test_a_block_without_layers_cannot_decide(self) -> None:
        model = mctf.fuse(make("plain"), "ia_red2")
        with pytest.raises(MctfError, match="ia_red2 has no layers for block 2: unfuse the model"):
            mctf.set_r(model, [0, 0, 1, 0])


class TestTraining:
    @pytest.fixture
    def model(self) -> Any:
        return fused(make("registers")).train()

    def test_draws_tokens_by_their_probability_made_sharper(self, model: Any) -> None:
        images = make_images(model, 1).expand(200, -1, -1, -1)
        with torch.no_grad():
            (tokens,) = family_of(model).embed(model, images[:1])
            probability = model.token_reduction["0"](tokens[None])[0, 5:]
            with staying(model) as stays:
                model(images)
        drawn = stays[0][:, 5:].float().mean(dim=0)
        assert (drawn - sharper(probability)).abs().max() < 0.15  # four standard deviations
        assert (drawn - probability).abs().max() > 0.15
        assert not torch.equal(run(model, images), run(model, images))
        model.eval()
        assert torch.equal(run(model, images[:2]), run(model, images[:2]))

    def test_remembers_what_was_kept_and_how_likely_it_was(self, model: Any) -> None:
        model.double()
        images = make_images(model, 3)
        with mctf.trace(model) as trace, staying(model) as stays:
            policy = run_branch(model, images).method_states[-1]
        counts = torch.stack([(block.sizes > 0).sum(dim=1) for block in trace.blocks]) - 5
        torch.testing.assert_close(policy.kept(), counts.double().mean(dim=0).float() / 64)
        patches = model.token_reduction["0"](family_of(model).embed(model, images))[:, 5:]
        chance = torch.where(stays[0][:, 5:], sharper(patches), 1 - sharper(patches)).log().sum(dim=1) / 64
        torch.testing.assert_close(policy.decisions[0].log_probability, chance)

    def test_the_blocks_learn_from_the_labels_and_the_interpreters_from_the_reward(self, model: Any) -> None:
        images = make_images(model, 6)
        labels = answers(model, images)
        interpreters = list(model.token_reduction.parameters())
        Objective(model)(images, labels, None, None).total.backward()
        assert all(parameter.grad is None for parameter in interpreters)
        assert all(parameter.grad is not None for parameter in model.blocks.parameters())
        model.zero_grad()
        extra_loss(model, images, labels, run_branch(model, images)).backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in interpreters)
        assert all(parameter.grad is None for parameter in model.blocks.parameters())
        assert model.training
        assert all(module.training for module in model.modules())

    @pytest.mark.parametrize("group", [1, 2, 3])
    def test_one_group_may_learn_alone(self, group: int) -> None:
        model = fused(make("registers"), group=group).train()
        images = make_images(model, 6)
        with mctf.trace(model) as trace:
            objective = Objective(model, extra=fused_stack(model).method.extra_loss)
            objective(images, answers(model, images), None, None).total.backward()
        for number, block in enumerate(("0", "2", "3"), start=1):
            slopes = [each.grad for each in model.token_reduction[block].parameters()]
            assert all(each is not None for each in slopes)  # processes that learn together need one
            assert any(each.abs().sum() > 0 for each in slopes) == (number == group)
        counts = [block.tokens for block in trace.blocks]
        assert (counts[1] == counts[2]) == (group < 2)
        assert (counts[2] == counts[3]) == (group < 3)


class TestReward:
    def test_is_efficiency_when_right_and_a_penalty_when_wrong(self) -> None:
        method = mctf.methods.make_method("ia_red2", {"keep": 0.5, "penalty": 2.0})
        logits = torch.eye(3)[[0, 0, 1, 2]]
        kept = torch.tensor([1.0, 0.6, 0.2, 0.9])
        found = method.reward(logits, kept, torch.tensor([0, 0, 1, 1]))
        torch.testing.assert_close(found, torch.tensor([0.0, 1 - 0.36, 1 - 0.64, -2.0]))

    def test_the_loss_weighs_the_drawn_by_what_they_gain_over_inference(self) -> None:
        model = fused(make("plain").double()).train()
        images = make_images(model, 5)
        labels = answers(model, images)
        drawn = run_branch(model, images)
        found = extra_loss(model, images, labels, drawn)
        model.eval()
        greedy = run_branch(model, images)
        shares = [branch.method_states[-1].kept() for branch in (drawn, greedy)]
        shares[0] = shares[0] + (shares[1].mean() - shares[0].mean())  # the target is one for inference
        gains = [
            reward(branch, share.tolist(), labels, keep=0.7)
            for branch, share in zip((drawn, greedy), shares, strict=True)
        ]
        chance = drawn.method_states[-1].log_probability().tolist()
        expected = -sum((a - b) * c for a, b, c in zip(*gains, chance, strict=True)) / 5
        assert found.item() == pytest.approx(expected, rel=1e-5)
        assert found.item() != 0

    @pytest.mark.slow
    def test_teaches_to_keep_as_much_as_is_rewarded(self) -> None:
        """A model that is always right is rewarded for nothing else."""
        torch.manual_seed(0)
        model = mctf.fuse(make("plain"), "ia_red2", keep=0.5).train()
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.copy_(torch.eye(CLASSES)[0])
        labels = torch.zeros(8, dtype=torch.int64)
        optimiser = torch.optim.Adam(model.token_reduction.parameters(), lr=0.01)
        for step in range(100):
            images = make_images(model, 8, seed=step)
            extra_loss(model, images, labels, run_branch(model, images)).backward()
            optimiser.step()
            optimiser.zero_grad()
        model.eval()
        with torch.no_grad():
            kept = run_branch(model, make_images(model, 32, seed=1000)).method_states[-1].kept()
        assert 0.4 < kept.mean() < 0.6  # all of them at first


def extra_loss(model: Any, images: Tensor, labels: Tensor, branch: Branch) -> Tensor:
    """The term of the method, as the objective computes it."""
    method = fused_stack(model).method
    return method.extra_loss(model, images, labels, (branch,), infer=lambda: run_inference(model, images))


def sharper(probability: Tensor) -> Tensor:
    """With four times the logit."""
    return probability**4 / (probability**4 + (1 - probability) ** 4)


def reward(branch: Branch, shares: list[float], labels: Tensor, *, keep: float) -> list[float]:
    right = branch.logits.argmax(dim=1) == labels
    return [
        1 - max(share, 2 * keep - share) ** 2 if hit else -1.0
        for share, hit in zip(shares, right.tolist(), strict=True)
    ]


def test_blocks_layers_and_cost_at_the_published_setting() -> None:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        model = timm.create_model("deit_small_patch16_224")
        before = sum(each.numel() for each in model.parameters())
        plan = mctf.plan(model, method="ia_red2")
        mctf.fuse(model, "ia_red2")
    assert [int(block) for block in model.token_reduction] == [0, 4, 8]
    assert model.token_reduction["0"].heads == 6
    assert sum(each.numel() for each in model.parameters()) - before == 3 * 2 * 384 * 385
    assert plan.token_counts == [197] * 12
    interpreter = 197 * (4 * 384 + 384 * 384 + 384) + 384 * 384
    assert plan.gflops - plan.gflops_base == pytest.approx(3 * interpreter / 1e9)


@pytest.mark.parametrize(
    "options", [{"keep": 1.5}, {"penalty": -1}, {"weight": True}, {"group": 0}, {"group": "first"}, {"keep": "half"}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MctfError, match="must be"):
        mctf.fuse(make("plain"), "ia_red2", **options)
