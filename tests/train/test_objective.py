"""What the engine minimises: cross-entropy, consistency, a teacher's share, and a term of a learned method."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mctf
from helpers.models import CLASSES, make, make_images
from mctf import MctfError
from mctf.data import Preprocessing
from mctf.train.consistency import Consistency
from mctf.train.objective import Objective
from mctf.train.teachers import Distillation, Teacher
from mctf.train.two_branch import Branch, run_branches

LIGHTER = (0, 3, 3, 3)


@pytest.fixture
def model() -> nn.Module:
    return mctf.fuse(make("plain"), r=8)


@pytest.fixture
def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_images(model, 4), torch.arange(4) % CLASSES


def test_cross_entropy_is_that_of_the_model_as_it_is(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    images, labels = batch
    objective = Objective(model, smoothing=0.1)
    losses = objective(images, labels, None, None)
    torch.testing.assert_close(losses.total, F.cross_entropy(model(images), labels, label_smoothing=0.1))
    assert objective.draw(torch.Generator()) is None
    assert (losses.lighter, losses.distance, losses.teaching, losses.extra) == (None, None, None, None)


def test_a_plain_model_has_cross_entropy_too(batch: tuple[Tensor, Tensor]) -> None:
    plain = make("plain")
    losses = Objective(plain)(*batch, None, None)
    torch.testing.assert_close(losses.total, F.cross_entropy(plain(batch[0]), batch[1]))


def test_consistency_is_that_of_the_loss_alone(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    consistency = Consistency(weight=2.0, confidence=0.1, smoothing=0.1)
    losses = Objective(model, consistency=consistency)(*batch, LIGHTER, None)
    torch.testing.assert_close(
        losses.total, consistency.losses(*run_branches(model, batch[0], LIGHTER), batch[1]).total
    )


class TestDistillation:
    def test_is_the_divergence_of_softened_answers(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits, taught = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
        p, q = (taught / 3).softmax(1), (logits / 3).softmax(1)
        expected = 9 * (p * (p / q).log()).sum(1).mean()
        torch.testing.assert_close(Distillation(temperature=3.0)(logits, taught), expected)
        assert Distillation()(taught, taught) == 0

    @pytest.mark.parametrize("both", [False, True])
    def test_takes_its_share_from_the_labels_in_every_branch(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], both: bool
    ) -> None:
        consistency = Consistency(weight=2.0, confidence=0.1) if both else None
        distillation = Distillation(weight=0.3)
        taught = torch.randn(4, CLASSES)
        lighter = LIGHTER if both else None
        plain = Objective(model, consistency=consistency)(*batch, lighter, None)
        losses = Objective(model, consistency=consistency, distillation=distillation)(*batch, lighter, taught)
        answers = plain.answers + (plain.lighter if both else 0)
        expected = 0.7 * answers + 0.3 * losses.teaching + (plain.total - answers)
        torch.testing.assert_close(losses.total, expected)
        logits = [branch.logits for branch in run_branches(model, batch[0], LIGHTER)][: 2 if both else 1]
        torch.testing.assert_close(losses.teaching, sum(distillation(each, taught) for each in logits))


class TestTeacher:
    def test_sees_the_images_in_its_own_size_and_normalisation(self) -> None:
        teacher = timm.create_model("test_vit", num_classes=5).eval()
        own = Preprocessing.of(teacher)
        student = replace(own, image_size=(64, 64), mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1))
        pixels = torch.rand(2, 3, 64, 64)

        def normalised(preprocessing: Preprocessing) -> Tensor:
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
            return (pixels - mean) / std

        enlarged = F.interpolate(normalised(own), own.image_size, mode="bicubic", antialias=True)
        found = Teacher(teacher, seen_by=student, classes=5)(normalised(student))
        torch.testing.assert_close(found, teacher(enlarged), rtol=1e-4, atol=1e-4)
        assert not found.requires_grad

    def test_of_other_classes_is_refused(self) -> None:
        teacher = timm.create_model("test_vit", num_classes=5)
        with pytest.raises(MctfError, match="the teacher knows 5 classes, but the data has 4"):
            Teacher(teacher, seen_by=Preprocessing.of(teacher), classes=4)


def test_a_learned_method_adds_its_own_term(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    seen: list[int] = []

    def extra(model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Branch]) -> Tensor:
        seen.append(len(branches))
        return branches[0].features.square().sum()

    consistency = Consistency()
    without = Objective(model, consistency=consistency)(*batch, LIGHTER, None)
    losses = Objective(model, consistency=consistency, extra=extra)(*batch, LIGHTER, None)
    torch.testing.assert_close(losses.total, without.total + losses.extra)
    assert losses.extra > 0
    assert seen == [2]
