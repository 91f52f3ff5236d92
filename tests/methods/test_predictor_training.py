"""How DynamicViT and SPViT train: patches are masked, decisions drawn, and their loss rules how many are kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mctf
from helpers.learned import taught_model, teach
from helpers.models import family_of, make, make_images, run, tokens_of
from mctf.api import fused_stack
from mctf.methods import _predictor, dynamic_vit, spvit
from mctf.methods._predictor import Decisions, masked_map, ratio_loss, token_distance
from mctf.train.compile import compile_blocks
from mctf.train.two_branch import Branch, TeacherOutput, run_branch

MODULES = {"dynamic_vit": dynamic_vit, "spvit": spvit}
every_method = pytest.mark.parametrize("method", list(MODULES))
R = [0, 0.4, 0.4, 0]


class BestOnes:
    """Decides like inference: the best patches of each stage, by what the layers said last."""

    def __init__(self, model: nn.Module, keep: list[int]) -> None:
        self.keep = iter(keep)
        self.left: Tensor | None = None
        for layer in fused_stack(model).layers.values():
            layer.register_forward_hook(self.listen)

    def listen(self, _: nn.Module, inputs: Any, output: Any) -> None:
        self.scores = output[1] if isinstance(output, tuple) else output[..., 0]

    def __call__(self, log_probabilities: Tensor) -> Tensor:
        scores = self.scores if self.left is None else self.scores.masked_fill(self.left == 0, -100)
        best = scores.topk(next(self.keep), dim=1).indices
        self.left = torch.zeros_like(scores).scatter(1, best, 1.0)
        return self.left


def train_by(decide: Callable[[Tensor], Tensor], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES[method], "decide", decide)


# one that reads the class token, every token, every token by iterating with rotary places, with biases of places
@pytest.mark.parametrize("name", ["registers", "mean_pool", "map_pool_prefix", "eva02", "beit", "relpos"])
@every_method
@torch.no_grad()
def test_masked_training_with_the_choices_of_inference_gives_the_answers_of_inference(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_predictor, "_EPS", 1e-30)  # where most attention was on dropped patches, it is not small
    model = taught_model(name, method, R)
    images = make_images(model, 2)
    with mctf.trace(model) as trace:
        expected = run(model, images)
    first, kept = family_of(model).prefix(model), sorted(set(trace.token_counts), reverse=True)[1:]
    packages = range(1, 3) if method == "spvit" else (0, 0)
    train_by(
        BestOnes(model, [count - first - more for count, more in zip(kept, packages, strict=True)]),
        method,
        monkeypatch,
    )
    with mctf.trace(model.train()) as trace:
        found = run(model, images)
    assert trace.token_counts == [tokens_of(model)] * 4  # nothing leaves in training
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)  # shares of places are float32


@every_method
@torch.no_grad()
def test_keeping_everything_in_training_is_the_plain_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("registers").double()
    images = make_images(model, 2)
    plain = model(images)
    teach(model, method, R)
    mctf.fuse(model, method, r=R).train()
    train_by(lambda scores: torch.ones_like(scores[..., 0]), method, monkeypatch)
    torch.testing.assert_close(model(images), plain, atol=1e-4, rtol=1e-4)


@every_method
def test_dropping_everything_in_training_has_a_finite_gradient(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = taught_model("registers", method, R).train()
    train_by(lambda scores: 0 * scores[..., 0], method, monkeypatch)
    model(make_images(model, 2)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_the_masked_map_is_the_softmax_over_what_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, 5, generator=generator, dtype=torch.float64)
    seen = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 0, 1.0]], dtype=torch.float64)
    found = masked_map(logits.softmax(dim=-1), seen)
    for image in range(2):
        for row in range(5):
            columns = [j for j in range(5) if seen[image, j] or j == row]
            expected = torch.zeros(3, 5, dtype=torch.float64)
            expected[:, columns] = logits[image, :, row, columns].softmax(dim=-1)
            torch.testing.assert_close(found[image, :, row], expected, atol=1e-5, rtol=1e-5)


@every_method
def test_a_patch_once_dropped_stays_dropped_and_targets_are_those_of_the_plan(method: str) -> None:
    model = taught_model("registers", method, [0, 0.4, 20, 0.4]).train()
    torch.manual_seed(0)
    decisions = run_branch(model, make_images(model, 3)).method_states[-1]
    plan = mctf.plan(model, method=method, r=[0, 0.4, 20, 0.4])
    packages = range(1, 4) if method == "spvit" else (0, 0, 0)
    kept = [count - 5 - more for count, more in zip(plan.token_counts[1:], packages, strict=True)]
    assert decisions.targets == pytest.approx([count / 64 for count in kept])
    one, two, three = (each.detach() for each in decisions.kept)
    assert set(one.unique().tolist()) == {0, 1}
    assert (two <= one).all()
    assert (three <= two).all()
    assert (one != two).any()
    assert (two[0] != two[1]).any()  # images decide for themselves


def test_decisions_are_drawn_by_their_probability() -> None:
    torch.manual_seed(0)
    probabilities = torch.tensor([0.2, 0.9]).expand(4000, 2)
    logits = torch.stack([probabilities, 1 - probabilities], dim=-1).log().requires_grad_()
    drawn = _predictor.decide(logits)
    torch.testing.assert_close(drawn.mean(dim=0), torch.tensor([0.2, 0.9]), atol=0.03, rtol=0)
    drawn.sum().backward()
    assert logits.grad.any()


@pytest.mark.parametrize("name", ["registers", "eva02"])
@every_method
def test_answers_and_ratio_alike_reach_every_layer(name: str, method: str) -> None:
    model = taught_model(name, method, R).train()
    torch.manual_seed(0)
    for loss_of in (
        lambda branch: branch.logits.square().sum(),
        lambda branch: fused_stack(model).method.extra_loss(model, None, None, [branch]),
    ):
        model.zero_grad()
        loss_of(run_branch(model, make_images(model, 2))).backward()
        for key, parameter in model.token_reduction.named_parameters():
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.any(), key


def slopes(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Gradients of the answers and the method's own loss, under decisions drawn by one seed."""
    model.zero_grad()
    torch.manual_seed(3)
    branch = run_branch(model, images)
    loss = fused_stack(model).method.extra_loss(model, None, None, [branch])
    (branch.logits.square().sum() + loss).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.slow
@every_method
def test_training_compiled_block_by_block_equals_eager(method: str) -> None:
    torch.compiler.reset()
    model = taught_model("plain", method, [0, 0.4, 0.4], depth=3).train()
    images = make_images(model, 2)
    eager = slopes(model, images)
    compile_blocks(model, backend="aot_eager")
    torch.testing.assert_close(slopes(model, images), eager, atol=1e-8, rtol=1e-6)


@every_method
def test_gradient_checkpointing_changes_nothing(method: str) -> None:
    model = taught_model("plain", method, R).train()
    images = make_images(model, 2)
    expected = slopes(model, images)
    model.set_grad_checkpointing(True)
    torch.testing.assert_close(slopes(model, images), expected, atol=1e-8, rtol=1e-6)


class TestLoss:
    def decisions(self) -> Decisions:
        one = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]])
        two = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0]])
        return Decisions(two, 1, 1, kept=(one, two), targets=(0.5, 0.25))

    def test_ratio_by_image(self) -> None:
        expected = ((0.25**2 + 0.25**2) / 2 + (0.25**2 + 0.25**2) / 2) / 2
        assert float(ratio_loss(self.decisions(), per_image=True)) == pytest.approx(expected)

    def test_ratio_by_batch(self) -> None:
        assert float(ratio_loss(self.decisions(), per_image=False)) == pytest.approx(0)
        off = replace(self.decisions(), targets=(0.4, 0.25))
        assert float(ratio_loss(off, per_image=False)) == pytest.approx(0.1**2 / 2)

    def test_tokens_count_where_they_are_kept(self) -> None:
        generator = torch.Generator().manual_seed(0)
        ours, theirs = torch.randn(2, 2, 5, 3, generator=generator)
        kept = self.decisions().now  # patches 0 and 2 of image 0, after one class token
        expected = ((ours[0, 1] - theirs[0, 1]).square().mean() + (ours[0, 3] - theirs[0, 3]).square().mean()) / 2
        torch.testing.assert_close(token_distance(ours, theirs, kept), expected)
        assert token_distance(ours, theirs, torch.zeros_like(kept)) == 0

    @every_method
    def test_is_the_sum_of_its_terms(self, method: str) -> None:
        generator = torch.Generator().manual_seed(0)
        logits, taught = torch.randn(2, 2, 7, generator=generator)
        ours, theirs = torch.randn(2, 2, 5, 3, generator=generator)
        made = mctf.methods.make_method(method, {"ratio_weight": 3.0})
        decisions = self.decisions()

        def loss(teacher: TeacherOutput | None) -> Tensor:
            branch = Branch(logits, logits, ours, (None, decisions), teacher)
            return made.extra_loss(nn.Identity(), logits, logits, [branch])

        ratio = 3 * ratio_loss(decisions, per_image=method == "dynamic_vit")
        token = 0.5 * token_distance(ours, theirs, decisions.now)
        known = taught.softmax(dim=1)
        kl = 0.5 * (known * (known.log() - F.log_softmax(logits, dim=1))).sum(dim=1).mean()
        torch.testing.assert_close(loss(None), ratio)
        torch.testing.assert_close(loss(TeacherOutput(theirs, None)), ratio + token)
        torch.testing.assert_close(loss(TeacherOutput(theirs, taught)), ratio + token + kl)

    @every_method
    def test_is_nothing_where_nothing_is_selected(self, method: str) -> None:
        model = mctf.fuse(make("plain").train(), method, r=0)
        branch = run_branch(model, make_images(model, 2))
        assert fused_stack(model).method.extra_loss(model, None, None, [branch]) == 0
