"""Paired differences between settings evaluated on the same images, and their standard errors."""

import math
from statistics import mean
from typing import Any

import pytest
import torch

from helpers.models import CLASSES, make, make_images
from mctf.data import Batch
from mctf.evaluation import evaluate as evaluating
from mctf.evaluation.evaluate import Setting, evaluate
from mctf.evaluation.significance import Difference, standard_error


def naive_error(values: list[float]) -> float:
    """From the definition, number by number."""
    middle = sum(values) / len(values)
    variance = sum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def draws(count: int, *, seed: int) -> list[float]:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


@pytest.mark.parametrize("images", [2, 3, 50])
def test_the_error_is_that_of_the_differences_image_by_image(images: int) -> None:
    one, other = draws(images, seed=1), draws(images, seed=2)
    apart = [a - b for a, b in zip(one, other, strict=True)]
    for found in (Difference.of(one, other), Difference.of(torch.tensor(one), torch.tensor(other))):
        assert found.mean == pytest.approx(mean(apart), rel=1e-5)
        assert found.error == pytest.approx(naive_error(apart), rel=1e-5)
    assert standard_error(one) == pytest.approx(naive_error(one))


def test_difficulty_common_to_both_cancels() -> None:
    """Every image is 0.1 harder for one of them: clear, though their own errors are ten times the difference."""
    hard = [10 * value for value in draws(100, seed=3)]
    harder = [value + 0.1 + 0.01 * noise for value, noise in zip(hard, draws(100, seed=4), strict=True)]
    found = Difference.of(harder, hard)
    error = standard_error(hard)
    assert error is not None
    assert found.mean == pytest.approx(0.1, abs=0.01)
    assert (found.clear, found.mean < error / 5) == (True, True)
    shuffled = Difference.of(harder[1:] + harder[:1], hard)  # not the same images side by side
    assert not shuffled.clear


@pytest.mark.parametrize(
    ("mean_", "error", "errors", "clear"),
    [
        (0.2, 0.1, 2.0, True),
        (-0.2, 0.1, -2.0, True),
        (0.199, 0.1, 1.99, False),
        (-0.1, 0.1, -1.0, False),
        (0.1, 0.0, math.inf, True),
        (-0.1, 0.0, -math.inf, True),
        (0.0, 0.0, 0.0, False),
        (5.0, None, 0.0, False),
    ],
)
def test_two_standard_errors_are_clear(mean_: float, error: float | None, errors: float, clear: bool) -> None:
    found = Difference(mean_, error)
    assert found.errors == pytest.approx(errors)
    assert found.clear is clear


def test_one_image_has_no_error() -> None:
    assert standard_error([3.0]) is None
    assert Difference.of([3.0], [1.0]) == Difference(2.0, None)


@pytest.mark.parametrize(
    ("difference", "decimals", "words"),
    [
        (Difference(-0.00062, 0.00088), 4, "0.0006 ± 0.0009"),
        (Difference(0.0000123, 0.0000041), 4, "0.000012 ± 0.000004"),
        (Difference(2.44, 0.92), 1, "2.4 ± 0.9"),
        (Difference(0.25, 0.0), 4, "0.2500 ± 0.0000"),
        (Difference(0.25, None), 4, "0.2500 ± ?"),
    ],
)
def test_differences_as_text(difference: Difference, decimals: int, words: str) -> None:
    assert difference.size(decimals) == words


def test_an_evaluation_keeps_scores_per_image() -> None:
    """Scores are those of batches of one, and every row has the standard error of its mean."""
    model = make("plain").double()  # batches of one round differently, and float32 may then match other tokens
    images, labels = make_images(model, 5), torch.arange(5) % CLASSES
    settings = [Setting("mctf", 8), Setting("tome", 8)]
    found = evaluate(model, [Batch(images[:3], labels[:3]), Batch(images[3:], labels[3:])], settings)
    single = [evaluate(model, [Batch(images[i : i + 1], labels[i : i + 1])], settings).rows for i in range(5)]
    assert [row.method for row in found.rows] == ["baseline", "mctf", "tome"]
    for place, (row, scores) in enumerate(zip(found.rows, found.scores, strict=True)):
        alone = [rows[place] for rows in single]
        assert scores.kl is not None
        assert scores.top1 is not None
        assert scores.kl.tolist() == pytest.approx([each.kl for each in alone], rel=1e-6, abs=1e-12)
        assert scores.top1.tolist() == [each.top1 for each in alone]
        assert row.kl_error == pytest.approx(naive_error(scores.kl.tolist()))
        assert [each.kl_error for each in alone] == [None] * 5
    assert found.rows[0].kl_error == 0
    assert found.rows[1].kl_error != found.rows[2].kl_error


def test_r_zero_has_the_scores_of_the_baseline() -> None:
    model = make("plain")
    found = evaluate(model, [Batch(make_images(model, 2))], [Setting("mctf", 8), Setting("mctf", 0)])
    fused, baseline = found.scores
    assert (fused.top1, baseline.kl is not None and baseline.kl.tolist()) == (None, [0, 0])
    assert fused.kl is not None
    assert fused.kl.min() > 0


def test_without_a_classifier_there_is_no_kl_and_no_error() -> None:
    model = make("plain")
    batch = Batch(make_images(model, 2))
    model.reset_classifier(0)
    found = evaluate(model, [batch], [Setting("mctf", 8)])
    assert (found.rows[1].kl_error, found.scores[1].kl) == (None, None)
    assert len(found.scores[1].class_cosine) == 2


def test_scores_of_several_ranks_have_one_order_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is replaced by what it gathered in a run before."""
    model, settings = make("plain"), [Setting("mctf", 8), Setting("tome", 8)]
    ours, theirs = Batch(make_images(model, 3, seed=1)), Batch(make_images(model, 2, seed=2))
    given: list[Any] = []
    monkeypatch.setattr(evaluating, "all_gather_object", lambda value: given.append(value) or [value])
    evaluate(model, [theirs], settings)
    monkeypatch.setattr(evaluating, "all_gather_object", lambda value: [value])
    expected = evaluate(model, [ours, theirs], settings)
    remaining = iter(given)
    monkeypatch.setattr(evaluating, "all_gather_object", lambda value: [value, next(remaining)])
    found = evaluate(model, [ours], settings)
    assert found.images == 5
    for one, other in zip(found.scores, expected.scores, strict=True):
        assert one.kl is not None
        assert other.kl is not None
        assert torch.equal(one.kl, other.kl)
    assert [row.kl_error for row in found.rows] == [row.kl_error for row in expected.rows]
