"""Token reduction consistency against a naive reference, one sample at a time; the gate, the detach, the draw of r'."""

from collections import Counter
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import mctf
from helpers.models import CLASSES, make, make_images
from mctf import MctfError
from mctf.train.consistency import Consistency, draw_lighter, gated_distance
from mctf.train.two_branch import Branch, run_branches

R, LIGHTER = 8, 3


def fused(name: str, method: str = "mctf", **features: Any) -> VisionTransformer:
    return mctf.fuse(make(name, **features).double(), method, r=R)


def outputs_of(model: VisionTransformer, image: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Logits and input of the classifier, for one image and one pass."""
    mctf.set_r(model, r)
    tokens = model.forward_features(image[None])
    return model.forward_head(tokens)[0], model.forward_head(tokens, pre_logits=True)[0]


def naive_loss(
    model: VisionTransformer, images: Tensor, labels: Tensor, *, weight: float, confidence: float, smoothing: float
) -> tuple[Tensor, int]:
    """The formula written out, sample by sample and class by class; and the number of confident samples."""
    entropies: list[Tensor] = []
    distances: list[Tensor] = []
    for image, label in zip(images, labels.tolist(), strict=True):
        heavy, light = outputs_of(model, image, R), outputs_of(model, image, LIGHTER)
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
    """The likeliest class for every other image, the least likely one for the rest."""
    with torch.no_grad():
        logits = model(images)
    odd = torch.arange(len(images)) % 2 == 1
    return torch.where(odd, logits.argmin(dim=1), logits.argmax(dim=1))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# each has another classifier input; the last one has another method
MODELS = [("plain", "mctf"), ("distilled", "mctf"), ("mean_pool", "mctf"), ("map_pool", "mctf"), ("registers", "tome")]


@pytest.mark.parametrize(("name", "method"), MODELS)
def test_equals_the_naive_reference_in_value_and_gradient(name: str, method: str) -> None:
    model = fused(name, method)
    images = make_images(model, 4)
    labels = half_right(model, images)
    settings = {"weight": 3.0, "confidence": 0.15, "smoothing": 0.1}
    expected, confident = naive_loss(model, images, labels, **settings)
    assert 0 < confident < len(images)
    expected_gradients = gradients(model, expected)

    objective = Consistency(**settings)
    losses = objective.losses(*run_branches(model, images, LIGHTER), labels)
    torch.testing.assert_close(losses.total, expected, rtol=1e-10, atol=1e-10)
    assert losses.confident == confident / len(images)
    torch.testing.assert_close(gradients(model, losses.total), expected_gradients, rtol=1e-7, atol=1e-9)


def branches(*probabilities: float) -> tuple[Branch, Branch, Tensor]:
    """Two branches with two channels at distance 1; the first has these probabilities of class 0."""
    truth = torch.tensor(probabilities)
    logits = torch.stack([truth, 1 - truth], dim=1).log()
    heavy = Branch(logits, torch.ones(len(truth), 2, requires_grad=True))
    return heavy, Branch(logits.flip(1), torch.zeros(len(truth), 2, requires_grad=True)), torch.zeros(len(truth)).long()


class TestGate:
    def test_passes_samples_whose_true_class_is_probable_in_the_branch_of_r(self) -> None:
        heavy, light, labels = branches(0.41, 0.39, 0.9, 0.1)
        with torch.no_grad():
            heavy.features[1] = 100.0  # excluded at any distance
        distance, confident = gated_distance(heavy, light, labels, confidence=0.4)
        assert (distance.item(), confident.item()) == (1.0, 0.5)

    def test_reads_the_true_class_not_the_likeliest(self) -> None:
        heavy, light, labels = branches(0.1, 0.2)
        assert gated_distance(heavy, light, labels, confidence=0.4)[0] == 0
        assert gated_distance(heavy, light, 1 - labels, confidence=0.4)[0] == 1

    def test_without_confident_samples_distance_and_gradient_are_zero(self) -> None:
        heavy, light, labels = branches(0.3, 0.2)
        distance, confident = gated_distance(heavy, light, labels, confidence=0.4)
        distance.backward()
        assert (distance.item(), confident.item()) == (0, 0)
        assert not heavy.features.grad.any()

    def test_non_finite_features_of_excluded_samples_do_not_leak(self) -> None:
        heavy, light, labels = branches(0.9, 0.1)
        with torch.no_grad():
            heavy.features[1] = float("inf")
        assert gated_distance(heavy, light, labels, confidence=0.4)[0] == 1


def test_the_distance_has_a_gradient_in_the_branch_of_r_alone() -> None:
    heavy, light, labels = branches(0.9, 0.8)
    gated_distance(heavy, light, labels, confidence=0.4)[0].backward()
    assert heavy.features.grad.abs().min() > 0
    assert light.features.grad is None


class TestDraw:
    def test_is_uniform_on_zero_to_r(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = Counter(draw_lighter([0, 16, 16], generator=generator) for _ in range(17 * 200))
        assert set(drawn) == {(0, r, r) for r in range(17)}
        assert all(140 < count < 260 for count in drawn.values())  # 200 each, within four standard deviations

    def test_up_to_limits_the_range(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = {draw_lighter([0, 16], up_to=7, generator=generator)[1] for _ in range(200)}
        assert drawn == set(range(8))

    def test_depends_on_the_generator_alone(self) -> None:
        def draws(seed: int) -> list[Any]:
            generator = torch.Generator().manual_seed(seed)
            return [draw_lighter([16], generator=generator) for _ in range(20)]

        assert draws(1) == draws(1) != draws(2)

    def test_unequal_counts_keep_their_proportion_and_ratios_are_scaled(self) -> None:
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

    def test_the_loss_draws_in_each_call(self) -> None:
        model = fused("plain")
        images, labels = make_images(model, 1), torch.tensor([0])
        generator = torch.Generator().manual_seed(0)
        losses = {
            Consistency()(model, images, labels, generator=generator).lighter_cross_entropy.item() for _ in range(12)
        }
        assert len(losses) > 3


def test_in_a_plain_training_loop() -> None:
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
