"""RandAugment of batches against timm's operations on single images."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor

from helpers.images import make_picture
from mctf.data.gpu_randaugment import OPERATIONS, Round, draw_rounds, recolor, warp, warp_matrices

MAX_MAGNITUDE = 10.0  # of timm
TIMM_NAMES = {
    "auto_contrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize_add": "SolarizeAdd",
    "saturation": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}
COLORS = [operation for operation in OPERATIONS if operation.color is not None]
GEOMETRIC = [operation for operation in OPERATIONS if operation.geometry is not None]
SIGNED = {"saturation", "contrast", "brightness", "sharpness"} | {operation.name for operation in GEOMETRIC}
EXACT = {"equalize", "invert", "posterize", "solarize", "solarize_add"}
PICTURES = [make_picture(seed, width=30, height=22) for seed in range(4)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(pictures: list[Image.Image]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]).float()


def timm_amount(name: str, level: float, sign: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, ...]:
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: sign * value)
    to_amount = auto_augment.LEVEL_TO_ARG[TIMM_NAMES[name]]
    return () if to_amount is None else to_amount(level * MAX_MAGNITUDE, {})


def cases(operations: list) -> Callable:
    triples = [(op, level, sign) for op in operations for level in (0.25, 0.9, 1.0) for sign in (1, -1)]
    chosen = [(op, level, sign) for op, level, sign in triples if sign == 1 or op.name in SIGNED]
    return pytest.mark.parametrize(
        ("operation", "level", "sign"), chosen, ids=[f"{op.name} {sign * level}" for op, level, sign in chosen]
    )


class TestOperations:
    def test_are_those_of_timm(self) -> None:
        assert [TIMM_NAMES[operation.name] for operation in OPERATIONS] == auto_augment._RAND_INCREASING_TRANSFORMS

    @cases(COLORS)
    def test_change_colors_as_in_timm(self, operation, level, sign, monkeypatch) -> None:
        arguments = timm_amount(operation.name, level, sign, monkeypatch)
        if operation.name == "posterize":
            arguments = (max(1, *arguments),)
        amounts = operation.amount(torch.full((4,), level), torch.full((4,), float(sign)))
        function = auto_augment.NAME_TO_OP[TIMM_NAMES[operation.name]]
        expected = tensor([function(picture, *arguments) for picture in PICTURES])
        # Pillow truncates results to integers, gray values included
        tolerance = 0 if operation.name in EXACT else 1.5
        assert (operation.color(tensor(PICTURES), amounts) - expected).abs().max() <= tolerance

    @cases(GEOMETRIC)
    def test_warp_as_in_timm(self, operation, level, sign, monkeypatch) -> None:
        arguments = timm_amount(operation.name, level, sign, monkeypatch)
        amounts = operation.amount(torch.full((4,), level), torch.full((4,), float(sign)))
        function = auto_augment.NAME_TO_OP[TIMM_NAMES[operation.name]]
        expected = [function(picture, *arguments, resample=Image.Resampling.BILINEAR) for picture in PICTURES]
        warped = warp(tensor(PICTURES), operation.geometry(amounts, (22, 30)))
        difference = (warped - tensor(expected)).abs()
        assert difference.median() < 1
        assert (difference > 3).float().mean() < 0.2  # Pillow does not interpolate along the edge
        assert (tensor(PICTURES) - tensor(expected)).abs().mean() > 5 * difference.mean()

    def test_posterize_keeps_one_bit_at_the_highest_level(self) -> None:
        (posterize,) = (operation for operation in COLORS if operation.name == "posterize")
        assert posterize.amount(torch.ones(1), torch.ones(1)).tolist() == [128]

    def test_of_uniform_images_are_finite(self) -> None:
        uniform = torch.full((2, 3, 5, 5), 77.0)
        for operation in COLORS:
            amounts = operation.amount(torch.full((2,), 0.9), torch.ones(2))
            changed = operation.color(uniform, amounts)
            assert changed.isfinite().all()
            if operation.name in ("auto_contrast", "equalize", "contrast", "saturation", "sharpness"):
                assert (changed - uniform).abs().max() < 0.01


class TestRandAugment:
    def test_applies_each_operation_equally_often(self) -> None:
        counts = torch.tensor([each.counts for each in draw_rounds(60000, generator())]).float() / 60000
        assert (counts[:, -1] - 0.5).abs().max() < 0.01
        assert (counts[:, :-1] - 0.5 / 15).abs().max() < 0.004

    def test_amounts_belong_to_their_operations(self) -> None:
        (drawn, _) = draw_rounds(3000, generator())
        amounts_of = {operation.name: amounts for operation, _, amounts in drawn.groups()}
        assert amounts_of["rotate"].abs().mean().item() == pytest.approx(27, rel=0.05)
        assert set(amounts_of["posterize"].tolist()) <= {64.0, 128.0}
        assert 0.1 <= amounts_of["contrast"].min() < 0.3 < 1.7 < amounts_of["contrast"].max() <= 1.9
        assert sorted(drawn.rows.tolist()) == list(range(3000))

    def test_changes_only_the_drawn_images(self) -> None:
        rounds = (Round(torch.tensor([2, 0, 1, 3]), torch.tensor([0.0, 27.0, 0, 0]), (0, 0, 1, 1, *[0] * 11, 2)),)
        images = tensor(PICTURES)
        changed = recolor(images.clone(), rounds)
        assert torch.equal(changed[2], 255 - images[2])
        assert torch.equal(changed[[0, 1, 3]], images[[0, 1, 3]])
        rows, matrices = warp_matrices(rounds, (22, 30))
        assert rows.tolist() == [0]
        assert not torch.equal(warp(images[rows], matrices), images[rows])

    def test_composes_two_geometric_operations_in_order(self) -> None:
        rotation = Round(torch.tensor([0]), torch.tensor([20.0]), (0, 0, 0, 1, *[0] * 12))
        translation = Round(torch.tensor([0]), torch.tensor([0.2]), (*[0] * 13, 1, 0, 0))
        images = tensor([make_picture(0, width=60, height=60)])
        in_sequence = images
        for each in (rotation, translation):
            in_sequence = warp(in_sequence, warp_matrices((each,), (60, 60))[1])
        composed, swapped = (
            warp(images, warp_matrices(order, (60, 60))[1])
            for order in ((rotation, translation), (translation, rotation))
        )
        middle = (..., slice(20, 40), slice(20, 40))
        assert (composed[middle] - in_sequence[middle]).abs().mean() < 2
        assert (swapped[middle] - in_sequence[middle]).abs().mean() > 10
