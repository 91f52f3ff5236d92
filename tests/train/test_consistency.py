"""Token reduction consistency against a naive reference, one sample at a time, and what the gate and detach are for."""

from collections import Counter
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import mctf
from helpers.models import CLASSES, METHODS, make, make_images
from mctf import MctfError
from mctf.api import fused_stack
from mctf.train.consistency import Consistency, draw_lighter, gated_distance
from mctf.train.two_branch import Branch, run_branch, run_branches

R, LIGHTER = 8, 3


def fused(name: str, method: str = "mctf", **features: Any) -> VisionTransformer:
    return mctf.fuse(make(name, **features).double(), method, r=R)


def answers_of(model: VisionTransformer, image: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Logits and what the classifier reads, of one image and one pass."""
    mctf.set_r(model, r)
    tokens = model.forward_features(image[None])
    return model.forward_head(tokens)[0], model.forward_head(tokens, pre_logits=True)[0]


def naive_loss(
    model: VisionTransformer, images: Tensor, labels: Tensor, *, weight: float, confidence: float, smoothing: float
) -> tuple[Tensor, int]:
    """The formula written out, sample by sample and class by class; and how many samples the MSE counts."""
    entropies: list[Tensor] = []
    distances: list[Tensor] = []
    for image, label in zip(images, labels.tolist(), strict=True):
        heavy, light = answers_of(model, image, R), answers_of(model, image, LIGHTER)
        for logits, _ in (heavy, light):
            log_probabilities = logits - logits.exp().sum().log()
            target = torch.full_like(logits, smoothing / len(logits))
            target[label] += 1 - smoothing
            entropies.append(-(target * log_probabilities).sum())
        probability = heavy[0].exp()[label] / heavy[0].exp().sum()
        if probability.item() > confidence:
            constant = torch.tensor(light[1].tolist(), dtype=torch.float64)
            distances.append(sum((a - b) ** 2 for a, b in zip(heavy[1], constant, strict=True)) / len(constant))
    mctf.set_r(model, R)
    total = sum(entropies) / len(images)
    return (total + weight * sum(distances) / len(distances) if distances else total), len(distances)


def half_right(model: VisionTransformer, images: Tensor) -> Tensor:
    """Labels of which the model is sure for every other image, and sure to be wrong for the rest."""
    with torch.no_grad():
        logits = model(images)
    odd = torch.arange(len(images)) % 2 == 1
    return torch.where(odd, logits.argmin(dim=1), logits.argmax(dim=1))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# each reads its features in another way; the last two loop over their blocks or fuse otherwise
MODELS = [("plain", "mctf"), ("distilled", "mctf"), ("mean_pool", "mctf"), ("map_pool", "mctf"), ("registers", "tome")]


@pytest.mark.parametrize(("name", "method"), MODELS)
def test_equals_the_naive_reference_in_value_and_gradient(name: str, method: str) -> None:
    model = fused(name, method)
    images = make_images(model, 4)
    labels = half_right(model, images)
    settings = {"weight": 3.0, "confidence": 0.15, "smoothing": 0.1}
    expected, counted = naive_loss(model, images, labels, **settings)
    assert 0 < counted < len(images)
    wanted = gradients(model, expected)

    objective = Consistency(**settings)
    losses = objective.losses(*run_branches(model, images, LIGHTER), labels)
    torch.testing.assert_close(losses.total, expected, rtol=1e-10, atol=1e-10)
    assert losses.confident == counted / len(images)
    torch.testing.assert_close(gradients(model, losses.total), wanted, rtol=1e-7, atol=1e-9)


def branches(*probabilities: float) -> tuple[Branch, Branch, Tensor]:
    """Two branches of two channels that are 1 apart; of class 0, the first has these probabilities."""
    truth = torch.tensor(probabilities)
    logits = torch.stack([truth, 1 - truth], dim=1).log()
    heavy = Branch(logits, torch.ones(len(truth), 2, requires_grad=True))
    return heavy, Branch(logits.flip(1), torch.zeros(len(truth), 2, requires_grad=True)), torch.zeros(len(truth)).long()


class TestGate:
    def test_counts_only_samples_whose_true_class_is_probable_in_the_branch_of_r(self) -> None:
        heavy, light, labels = branches(0.41, 0.39, 0.9, 0.1)
        with torch.no_grad():
            heavy.features[1] = 100.0  # not counted, however far apart
        distance, confident = gated_distance(heavy, light, labels, confidence=0.4)
        assert (distance.item(), confident.item()) == (1.0, 0.5)

    def test_asks_for_the_true_class_not_the_likeliest(self) -> None:
        heavy, light, labels = branches(0.1, 0.2)
        assert gated_distance(heavy, light, labels, confidence=0.4)[0] == 0
        assert gated_distance(heavy, light, 1 - labels, confidence=0.4)[0] == 1

    def test_nobody_confident_is_no_distance_and_no_gradient(self) -> None:
        heavy, light, labels = branches(0.3, 0.2)
        distance, confident = gated_distance(heavy, light, labels, confidence=0.4)
        distance.backward()
        assert (distance.item(), confident.item()) == (0, 0)
        assert not heavy.features.grad.any()

    def test_numbers_that_are_none_do_not_leak_from_samples_that_do_not_count(self) -> None:
        heavy, light, labels = branches(0.9, 0.1)
        with torch.no_grad():
            heavy.features[1] = float("inf")
        assert gated_distance(heavy, light, labels, confidence=0.4)[0] == 1


def test_the_distance_teaches_the_branch_of_r_alone() -> None:
    heavy, light, labels = branches(0.9, 0.8)
    gated_distance(heavy, light, labels, confidence=0.4)[0].backward()
    assert heavy.features.grad.abs().min() > 0
    assert light.features.grad is None


class TestDraw:
    def test_every_r_below_is_drawn_alike(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = Counter(draw_lighter([0, 16, 16], generator=generator) for _ in range(17 * 200))
        assert set(drawn) == {(0, r, r) for r in range(17)}
        assert all(140 < count < 260 for count in drawn.values())  # 200 each, give or take four deviations

    def test_the_authors_command_draws_up_to_seven(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = {draw_lighter([0, 16], up_to=7, generator=generator)[1] for _ in range(200)}
        assert drawn == set(range(8))

    def test_a_generator_decides(self) -> None:
        def draws(seed: int) -> list[Any]:
            generator = torch.Generator().manual_seed(seed)
            return [draw_lighter([16], generator=generator) for _ in range(20)]

        assert draws(1) == draws(1) != draws(2)

    def test_unequal_blocks_keep_their_proportion_and_ratios_are_scaled(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            first, second = draw_lighter([4, 16], generator=generator)
            assert first == second // 4
            small, none, large = draw_lighter([0.1, 0.0, 0.3], generator=generator)
            assert none == 0
            assert 0 <= large < 0.3
            assert small == pytest.approx(large / 3)

    @pytest.mark.parametrize(("schedule", "message"), [([16], "choose from 0 to 16"), ([0.3], "r is a ratio")])
    def test_refuses_more_than_r(self, schedule: list[float], message: str) -> None:
        with pytest.raises(MctfError, match=message):
            draw_lighter(schedule, up_to=17)

    def test_the_loss_draws_anew_each_time(self) -> None:
        model = fused("plain")
        images, labels = make_images(model, 1), torch.tensor([0])
        generator = torch.Generator().manual_seed(0)
        losses = {Consistency()(model, images, labels, generator=generator).lighter.item() for _ in range(12)}
        assert len(losses) > 3


class TestBranches:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("name", ["plain", "mean_pool", "map_pool_prefix"])
    @pytest.mark.parametrize("lighter", [0, LIGHTER, R])
    def test_are_what_two_passes_give(self, name: str, method: str, lighter: int) -> None:
        model = fused(name, method)
        images = make_images(model, 3)
        found = run_branches(model, images, lighter)
        for branch, r in zip(found, (R, lighter), strict=True):
            mctf.set_r(model, r)
            expected = run_branch(model, images)
            torch.testing.assert_close(branch.logits, expected.logits, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(branch.features, expected.features, rtol=1e-12, atol=1e-12)
            mctf.set_r(model, R)

    def test_embed_patches_once(self) -> None:
        model = fused("plain")
        calls = []
        model.patch_embed.register_forward_hook(lambda *_: calls.append(1))
        run_branches(model, make_images(model, 2), LIGHTER)
        assert len(calls) == 1

    def test_of_a_host_that_loops_over_its_blocks_take_two_passes_and_are_the_same(self) -> None:
        model = fused("plain").train()
        images = make_images(model, 2)
        expected = run_branches(model, images, LIGHTER)
        model.set_grad_checkpointing(True)
        found = run_branches(model, images, LIGHTER)
        torch.testing.assert_close(found[0].logits, expected[0].logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1].logits, expected[1].logits, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(found[0].logits, found[1].logits)

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_leave_the_model_as_it_was(self, checkpointing: bool) -> None:
        model = fused("plain")
        model.set_grad_checkpointing(checkpointing)
        images = make_images(model, 2)
        before = model(images)
        run_branches(model, images, LIGHTER)
        assert fused_stack(model).r == R
        assert not fused_stack(model)._forward_hooks
        assert torch.equal(model(images), before)

    def test_of_lv_vit_whose_second_head_reads_the_other_tokens(self) -> None:
        import timm

        model = timm.create_model("lvvit_t", img_size=64, depth=3, embed_dim=48, num_heads=2, num_classes=5).double()
        mctf.fuse(model.eval(), r=R)
        images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        heavy, light = run_branches(model, images, LIGHTER)
        torch.testing.assert_close(heavy.logits, model(images), rtol=1e-12, atol=1e-12)
        mctf.set_r(model, LIGHTER)
        torch.testing.assert_close(light.logits, model(images), rtol=1e-12, atol=1e-12)

    def test_are_of_fused_models(self) -> None:
        with pytest.raises(MctfError, match="the model is not fused"):
            run_branches(make("plain"), torch.zeros(1, 3, 64, 64), LIGHTER)

    def test_half_precision_is_widened(self) -> None:
        model = mctf.fuse(make("plain").bfloat16(), r=R)
        branch = run_branch(model, make_images(model, 1))
        assert (branch.logits.dtype, branch.features.dtype) == (torch.float32, torch.float32)


def test_five_lines_in_a_loop_of_ones_own() -> None:
    model = make("plain").train()
    images, labels = make_images(model, 4), torch.arange(4) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    totals = []
    mctf.fuse(model, r=R)
    objective = Consistency(weight=1.0)
    for _ in range(12):
        loss = objective(model, images, labels, generator=generator)
        loss.total.backward()
        optimizer.step(), optimizer.zero_grad()
        totals.append(loss.total.item())
    assert totals[-1] < totals[0] / 4
