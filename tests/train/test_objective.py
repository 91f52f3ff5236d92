"""The training loss: cross-entropy, consistency, distillation, and the term of a learned method."""

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
from mctf.train.objective import Infer, Objective
from mctf.train.teachers import Distillation, Teacher
from mctf.train.two_branch import Branch, run_branches

LIGHTER = (0, 3, 3, 3)


@pytest.fixture
def model() -> nn.Module:
    return mctf.fuse(make("plain"), r=8)


@pytest.fixture
def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_images(model, 4), torch.arange(4) % CLASSES


def test_cross_entropy_of_the_fused_model(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    images, labels = batch
    objective = Objective(model, smoothing=0.1)
    losses = objective(images, labels, None, None)
    torch.testing.assert_close(losses.total, F.cross_entropy(model(images), labels, label_smoothing=0.1))
    assert objective.draw_lighter(torch.Generator()) is None
    assert (losses.lighter_cross_entropy, losses.distance, losses.distillation, losses.extra) == (
        None,
        None,
        None,
        None,
    )


def test_cross_entropy_of_an_unfused_model(batch: tuple[Tensor, Tensor]) -> None:
    plain = make("plain")
    losses = Objective(plain)(*batch, None, None)
    torch.testing.assert_close(losses.total, F.cross_entropy(plain(batch[0]), batch[1]))


def test_consistency_equals_the_loss_for_any_loop(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    consistency = Consistency(weight=2.0, confidence=0.1, smoothing=0.1)
    losses = Objective(model, consistency=consistency)(*batch, LIGHTER, None)
    torch.testing.assert_close(
        losses.total, consistency.losses(*run_branches(model, batch[0], LIGHTER), batch[1]).total
    )


class TestDistillation:
    def test_is_the_divergence_at_a_temperature(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits, teacher = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
        p, q = (teacher / 3).softmax(1), (logits / 3).softmax(1)
        expected = 9 * (p * (p / q).log()).sum(1).mean()
        torch.testing.assert_close(Distillation(temperature=3.0)(logits, teacher), expected)
        assert Distillation()(teacher, teacher) == 0

    @pytest.mark.parametrize("both", [False, True])
    def test_replaces_its_share_of_the_cross_entropy_in_every_branch(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], both: bool
    ) -> None:
        consistency = Consistency(weight=2.0, confidence=0.1) if both else None
        distillation = Distillation(weight=0.3)
        teacher = torch.randn(4, CLASSES)
        lighter = LIGHTER if both else None
        without = Objective(model, consistency=consistency)(*batch, lighter, None)
        losses = Objective(model, consistency=consistency, distillation=distillation)(*batch, lighter, teacher)
        cross_entropy = without.cross_entropy + (without.lighter_cross_entropy if both else 0)
        expected = 0.7 * cross_entropy + 0.3 * losses.distillation + (without.total - cross_entropy)
        torch.testing.assert_close(losses.total, expected)
        logits = [branch.logits for branch in run_branches(model, batch[0], LIGHTER)][: 2 if both else 1]
        torch.testing.assert_close(losses.distillation, sum(distillation(each, teacher) for each in logits))


class TestTeacher:
    def test_gets_the_images_in_its_own_size_and_normalization(self) -> None:
        teacher = timm.create_model("test_vit", num_classes=5).eval()
        own = Preprocessing.of(teacher)
        student = replace(own, image_size=(64, 64), mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1))
        pixels = torch.rand(2, 3, 64, 64)

        def normalized(preprocessing: Preprocessing) -> Tensor:
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
            return (pixels - mean) / std

        enlarged = F.interpolate(normalized(own), own.image_size, mode="bicubic", antialias=True)
        logits = Teacher(teacher, student=student, classes=5)(normalized(student))
        torch.testing.assert_close(logits, teacher(enlarged), rtol=1e-4, atol=1e-4)
        assert not logits.requires_grad

    def test_of_other_classes_is_refused(self) -> None:
        teacher = timm.create_model("test_vit", num_classes=5)
        with pytest.raises(MctfError, match="the teacher has 5 classes, but the data has 4"):
            Teacher(teacher, student=Preprocessing.of(teacher), classes=4)


def test_a_learned_method_adds_a_term(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    model.train()
    inferred: list[Branch] = []

    def extra(model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Branch], *, infer: Infer) -> Tensor:
        inferred.append(infer())
        assert len(branches) == 2
        return branches[0].features.square().sum()

    consistency = Consistency()
    without = Objective(model, consistency=consistency)(*batch, LIGHTER, None)
    losses = Objective(model, consistency=consistency, extra=extra)(*batch, LIGHTER, None)
    torch.testing.assert_close(losses.total, without.total + losses.extra)
    assert losses.extra > 0
    torch.testing.assert_close(inferred[0].logits, model.eval()(batch[0]).detach())
