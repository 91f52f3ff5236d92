"""Accuracy and fidelity of outputs: KL, agreement, top-1, top-5 and cosine, per image and averaged."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.models import make, make_images
from mctf.evaluation.fidelity import Fidelity, Output, average, concatenate, kl_divergence, run_model, score


def output(*probabilities: list[float]) -> Output:
    return Output(torch.tensor(probabilities).log(), torch.ones(len(probabilities), 2))


def fidelity(fused: Output, baseline: Output, labels: Tensor | None = None, *, classifies: bool = True) -> Fidelity:
    return average(score(fused, baseline, labels, classifies=classifies))


def test_kl_is_weighted_by_the_baseline() -> None:
    found = fidelity(output([0.2, 0.8]), output([0.5, 0.5])).kl
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert found == pytest.approx(expected, abs=1e-6)
    assert fidelity(output([0.5, 0.5]), output([0.2, 0.8])).kl != pytest.approx(expected, abs=1e-2)


def test_kl_is_that_of_torch_per_image() -> None:
    generator = torch.Generator().manual_seed(0)
    reference, logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    expected = F.kl_div(logits.log_softmax(1), reference.log_softmax(1), reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(kl_divergence(reference, logits), expected)


def test_kl_is_a_mean_over_images() -> None:
    one = fidelity(output([0.2, 0.8]), output([0.5, 0.5])).kl
    two = fidelity(output([0.2, 0.8], [0.3, 0.7]), output([0.5, 0.5], [0.3, 0.7])).kl
    assert one is not None
    assert two == pytest.approx(one / 2)


def test_agreement_counts_equal_top_predictions() -> None:
    found = fidelity(output([0.2, 0.8], [0.6, 0.4], [0.9, 0.1]), output([0.4, 0.6], [0.4, 0.6], [0.8, 0.2]))
    assert found.agreement == pytest.approx(200 / 3)


def test_a_model_agrees_with_itself_where_classes_tie() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().round()
    same = Output(logits, torch.ones(64, 2))
    assert fidelity(same, same).agreement == 100


def test_accuracy_is_that_of_the_output_not_of_the_baseline() -> None:
    fused = Output(torch.tensor([[0.0, 6, 5, 4, 3, 2, 1]] * 3), torch.ones(3, 2))
    found = fidelity(fused, output(*[[1.0] * 7] * 3), torch.tensor([1, 5, 6]))
    assert found.top1 == pytest.approx(100 / 3)
    assert found.top5 == pytest.approx(200 / 3)


def test_top5_of_fewer_classes_is_all() -> None:
    assert fidelity(output([0.2, 0.8]), output([0.2, 0.8]), torch.tensor([0])).top5 == 100


def test_cosine_is_a_mean_over_images() -> None:
    fused = Output(torch.zeros(2, 3), torch.tensor([[1.0, 0.0], [3.0, 3.0]]))
    baseline = Output(torch.zeros(2, 3), torch.tensor([[0.0, 2.0], [1.0, 1.0]]))
    assert fidelity(fused, baseline).class_cosine == pytest.approx(0.5)


def test_the_cosine_of_patches_is_a_mean_over_patches() -> None:
    logits, pooled = torch.zeros(1, 3), torch.ones(1, 2)
    fused = Output(logits, pooled, torch.tensor([[[9.0, 1.0], [1.0, 0.0], [3.0, 3.0]]]))
    baseline = Output(logits, pooled, torch.tensor([[[-1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]]))
    found = average(score(fused, baseline, None, protected=1))
    assert found.patch_cosine == pytest.approx(0.5)
    assert average(score(Output(logits, pooled), baseline, None)).patch_cosine is None


def test_unknown_is_none() -> None:
    same = output([0.2, 0.8])
    found = fidelity(same, same)
    assert (found.top1, found.top5, found.agreement) == (None, None, 100)
    found = fidelity(same, same, torch.tensor([1]), classifies=False)
    assert (found.top1, found.top5, found.agreement, found.kl) == (None, None, None, None)
    assert found.class_cosine == pytest.approx(1)


def test_batches_are_weighted_by_their_images() -> None:
    right, wrong = output([0.2, 0.8]), output([0.8, 0.2])
    three = score(output(*[[0.2, 0.8]] * 3), output(*[[0.2, 0.8]] * 3), torch.ones(3, dtype=torch.int64))
    found = average(concatenate([three, score(wrong, right, torch.tensor([1]))]))
    assert (found.top1, found.top5, found.agreement) == (75, 100, 75)
    assert found.kl == pytest.approx((0.2 * math.log(0.25) + 0.8 * math.log(4)) / 4)


@torch.no_grad()
def test_pooled_features_are_the_final_class_token_and_are_not_timed() -> None:
    model = make("plain")
    images, timed = make_images(model, 2), []

    def timer(call):
        timed.append(call())
        return timed[0]

    found = run_model(model, images, timer)
    assert torch.equal(found.pooled, model.forward_features(images)[:, 0])
    assert torch.equal(found.logits, model(images))
    assert len(timed) == 1
    assert timed[0][1] is found.logits
