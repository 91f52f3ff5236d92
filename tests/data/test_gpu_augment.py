"""Host work beside a device: by one thread, and only while it lasts."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor

from helpers.data_feeds import MEAN, STD, options
from helpers.images import make_picture
from mctf.data.gpu_augment import (
    BatchAugmentation,
    covering_size,
    crop_and_resize,
    draw_boxes,
    draw_crops,
    drawing_alone,
    inside,
)
from mctf.data.gpu_randaugment import OPERATIONS, Round, draw_rounds, motions, move, recolour
from mctf.data.transforms import make_transform


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_beside_a_device_one_thread_draws() -> None:
    with drawing_alone(torch.device("cuda")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_failure_gives_the_threads_back() -> None:
    with pytest.raises(KeyError), drawing_alone(torch.device("cuda")):
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_cpu_that_computes_keeps_its_threads() -> None:
    with drawing_alone(torch.device("cpu")):
        assert torch.get_num_threads() == 3


# MERGED from data.test_training_batchwise:
# Augmentation of whole batches, against what Pillow and timm do image by image.

LEVELS = 10.0  # timm counts magnitudes up to this
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
COLOURS = [operation for operation in OPERATIONS if operation.colour is not None]
MOTIONS = [operation for operation in OPERATIONS if operation.motion is not None]
SIGNED = {"saturation", "contrast", "brightness", "sharpness"} | {operation.name for operation in MOTIONS}
WHOLE = {"equalize", "invert", "posterize", "solarize", "solarize_add"}
PICTURES = [make_picture(seed, width=30, height=22) for seed in range(4)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(pictures: list[Image.Image]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]).float()


def timm_amount(name: str, level: float, sign: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, ...]:
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: sign * value)
    to_amount = auto_augment.LEVEL_TO_ARG[TIMM_NAMES[name]]
    return () if to_amount is None else to_amount(level * LEVELS, {})


def cases(operations: list) -> Callable:
    triples = [(op, level, sign) for op in operations for level in (0.25, 0.9, 1.0) for sign in (1, -1)]
    chosen = [(op, level, sign) for op, level, sign in triples if sign == 1 or op.name in SIGNED]
    return pytest.mark.parametrize(
        ("operation", "level", "sign"), chosen, ids=[f"{op.name} {sign * level}" for op, level, sign in chosen]
    )


class TestOperations:
    def test_are_those_of_timm(self) -> None:
        assert [TIMM_NAMES[operation.name] for operation in OPERATIONS] == auto_augment._RAND_INCREASING_TRANSFORMS

    @cases(COLOURS)
    def test_give_the_colours_that_timm_gives(self, operation, level, sign, monkeypatch) -> None:
        given = timm_amount(operation.name, level, sign, monkeypatch)
        if operation.name == "posterize":
            given = (max(1, *given),)
        amounts = operation.amount(torch.full((4,), level), torch.full((4,), float(sign)))
        function = auto_augment.NAME_TO_OP[TIMM_NAMES[operation.name]]
        expected = tensor([function(picture, *given) for picture in PICTURES])
        # where there is arithmetic, Pillow cuts off what lies between two levels, and greys have whole levels, too
        most = 0 if operation.name in WHOLE else 1.5
        assert (operation.colour(tensor(PICTURES), amounts) - expected).abs().max() <= most

    @cases(MOTIONS)
    def test_move_pictures_as_timm_does(self, operation, level, sign, monkeypatch) -> None:
        given = timm_amount(operation.name, level, sign, monkeypatch)
        amounts = operation.amount(torch.full((4,), level), torch.full((4,), float(sign)))
        function = auto_augment.NAME_TO_OP[TIMM_NAMES[operation.name]]
        moved = [function(picture, *given, resample=Image.Resampling.BILINEAR) for picture in PICTURES]
        seen = move(tensor(PICTURES), operation.motion(amounts, (22, 30)))
        difference = (seen - tensor(moved)).abs()
        assert difference.median() < 1
        assert (difference > 3).float().mean() < 0.2  # along the edge Pillow ends sharply
        assert (tensor(PICTURES) - tensor(moved)).abs().mean() > 5 * difference.mean()

    def test_posterizing_leaves_one_bit_even_at_the_highest_level(self) -> None:
        transform = make_transform(options(augmentation="strong"))
        (operations,) = (step.ops for step in transform.transforms if hasattr(step, "ops"))
        (posterizing,) = (each for each in operations if each.name == "PosterizeIncreasing")
        posterizing.prob, posterizing.magnitude, posterizing.magnitude_std = 1.0, 10, 0.0
        assert set(np.unique(posterizing(PICTURES[0]))) == {0, 128}
        (ours,) = (each for each in COLOURS if each.name == "posterize")
        assert ours.amount(torch.ones(1), torch.ones(1)).tolist() == [128]

    def test_leave_flat_pictures_in_one_piece(self) -> None:
        flat = torch.full((2, 3, 5, 5), 77.0)
        for operation in COLOURS:
            amounts = operation.amount(torch.full((2,), 0.9), torch.ones(2))
            changed = operation.colour(flat, amounts)
            assert changed.isfinite().all()
            if operation.name in ("auto_contrast", "equalize", "contrast", "saturation", "sharpness"):
                assert (changed - flat).abs().max() < 0.01


class TestRandAugment:
    def test_applies_each_operation_equally_often(self) -> None:
        counts = torch.tensor([each.counts for each in draw_rounds(60000, generator())]).float() / 60000
        assert (counts[:, -1] - 0.5).abs().max() < 0.01
        assert (counts[:, :-1] - 0.5 / 15).abs().max() < 0.004

    def test_amounts_belong_to_their_operations(self) -> None:
        (drawn, _) = draw_rounds(3000, generator())
        found = {operation.name: amounts for operation, _, amounts in drawn.groups()}
        assert found["rotate"].abs().mean().item() == pytest.approx(27, rel=0.05)
        assert set(found["posterize"].tolist()) <= {64.0, 128.0}
        assert 0.1 <= found["contrast"].min() < 0.3 < 1.7 < found["contrast"].max() <= 1.9
        assert sorted(drawn.rows.tolist()) == list(range(3000))

    def test_touches_the_drawn_images_alone(self) -> None:
        rounds = (Round(torch.tensor([2, 0, 1, 3]), torch.tensor([0.0, 27.0, 0, 0]), (0, 0, 1, 1, *[0] * 11, 2)),)
        images = tensor(PICTURES)
        changed = recolour(images.clone(), rounds)
        assert torch.equal(changed[2], 255 - images[2])
        assert torch.equal(changed[[0, 1, 3]], images[[0, 1, 3]])
        rows, matrices = motions(rounds, (22, 30))
        assert rows.tolist() == [0]
        assert not torch.equal(move(images[rows], matrices), images[rows])

    def test_composes_two_motions_in_order(self) -> None:
        turn = Round(torch.tensor([0]), torch.tensor([20.0]), (0, 0, 0, 1, *[0] * 12))
        shift = Round(torch.tensor([0]), torch.tensor([0.2]), (*[0] * 13, 1, 0, 0))
        images = tensor([make_picture(0, width=60, height=60)])
        one_by_one = images
        for each in (turn, shift):
            one_by_one = move(one_by_one, motions((each,), (60, 60))[1])
        at_once, otherwise = (move(images, motions(order, (60, 60))[1]) for order in ((turn, shift), (shift, turn)))
        middle = (..., slice(20, 40), slice(20, 40))
        assert (at_once[middle] - one_by_one[middle]).abs().mean() < 2
        assert (otherwise[middle] - one_by_one[middle]).abs().mean() > 10


class TestCrops:
    @pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
    @pytest.mark.parametrize("size", [(40, 50), (9, 7), (22, 30)])
    def test_are_those_of_pillow(self, interpolation: str, size: tuple[int, int]) -> None:
        boxes = [(0, 0, 22, 30), (3, 5, 10, 12), (11, 0, 11, 3), (21, 29, 1, 1)]
        flips = torch.tensor([False, True, False, True])
        expected = []
        for picture, (top, left, height, width), flip in zip(PICTURES, boxes, flips, strict=True):
            crop = picture.crop((left, top, left + width, top + height))
            crop = crop.resize(size[::-1], Image.Resampling[interpolation.upper()])
            expected.append(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else crop)
        given = torch.tensor(boxes, dtype=torch.float32)
        seen = crop_and_resize(tensor(PICTURES), given, flips, size=size, interpolation=interpolation)
        assert (seen.clamp(0, 255) - tensor(expected)).abs().max() < 1.6  # Pillow rounds after each direction

    @pytest.mark.parametrize("size", [(64, 64), (40, 90), (300, 10), (1, 1)])
    def test_lie_inside_the_picture(self, size: tuple[int, int]) -> None:
        boxes = draw_crops(500, size, scale=(0.08, 1.0), generator=generator())
        top, left, height, width = boxes.unbind(1)
        assert min(top.min(), left.min()) >= 0
        assert min(height.min(), width.min()) >= 1
        assert (top + height).max() <= size[0]
        assert (left + width).max() <= size[1]
        assert torch.equal(boxes, boxes.round())

    def test_have_the_areas_and_ratios_asked_for(self) -> None:
        boxes, fits = draw_boxes(4000, (200, 200), scale=(0.2, 0.5), ratio=(0.5, 2.0), generator=generator())
        _, _, height, width = boxes.unbind(1)
        area, ratio = height * width / 200**2, width / height
        assert fits.all()
        assert 0.19 < area.min() < 0.21 < 0.34 < area.mean() < 0.36 < 0.49 < area.max() < 0.51
        assert 0.48 < ratio.min() < 0.55 < 1.9 < ratio.max() < 2.05
        assert ratio.log().mean().abs() < 0.03

    @pytest.mark.parametrize("wanted", [(12, 12), (10, 20), (64, 64), (50, 30)])
    @pytest.mark.parametrize("size", [(22, 30), (31, 20), (40, 40)])
    def test_of_the_middle_are_those_of_evaluation(self, size: tuple[int, int], wanted: tuple[int, int]) -> None:
        picture = make_picture(0, width=size[1], height=size[0])
        given = options(augmentation="none", image_size=wanted)
        seen = BatchAugmentation(given, torch.device("cpu"))(tensor([picture]).byte(), generator())
        expected = make_transform(given)(picture)
        difference = ((seen - expected) * torch.tensor(STD)[:, None, None] * 255).abs()
        assert difference.mean() < 0.5
        assert difference.max() < 2.5  # Pillow rounds and clips after each direction

    def test_resized_pictures_cover_what_is_wanted(self) -> None:
        assert covering_size((40, 48), (12, 12)) == (12, 14)
        assert covering_size((40, 40), (10, 20)) == (20, 20)

    def test_rectangles_hold_their_pixels(self) -> None:
        mask = inside(torch.tensor([[1.0, 2.0, 3.0, 1.0], [0.0, 0.0, 4.0, 5.0]]), (4, 5))
        assert mask[0].nonzero().tolist() == [[1, 2], [2, 2], [3, 2]]
        assert mask[1].all()


class TestBatchAugmentation:
    def test_erases_a_quarter_of_the_images_with_noise(self) -> None:
        count, size = 400, (24, 24)
        flat = torch.full((count, 3, 8, 8), 128, dtype=torch.uint8)
        made = BatchAugmentation(options(augmentation="strong", image_size=size), torch.device("cpu"))
        seen = made(flat, generator())
        levels = seen * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        erased = ((levels < -0.01) | (levels > 1.01)).any(1).flatten(1).any(1)
        assert 0.18 < erased.float().mean() < 0.32

    def test_flips_half_of_the_images(self) -> None:
        ramp = torch.arange(0, 240, 30, dtype=torch.uint8).expand(400, 3, 8, 8)
        seen = BatchAugmentation(options(), torch.device("cpu"))(ramp, generator())
        flipped = seen[..., :6].mean((1, 2, 3)) > seen[..., 6:].mean((1, 2, 3))
        assert 0.42 < flipped.float().mean() < 0.58

    @pytest.mark.parametrize("in_batches", [True, False])
    def test_crops_no_more_than_asked(self, in_batches: bool) -> None:
        """The whole image, flipped or not, where a crop keeps all of it; less of it by default."""
        picture = PICTURES[0].resize((24, 24))
        stored = tensor([picture] * 20).byte()

        def distances(**given: object) -> Tensor:
            asked = options(image_size=(24, 24), **given)
            if in_batches:
                seen = BatchAugmentation(asked, torch.device("cpu"))(stored, generator())
            else:
                seen = torch.stack([make_transform(asked)(picture) for _ in range(20)])
            levels = (seen * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
            both = torch.stack([levels - stored, levels - stored.flip(3)])
            return both.abs().amax((2, 3, 4)).amin(0)

        assert distances(smallest_crop=1.0).max() < 1
        assert distances().max() > 10

    def test_leaves_the_stored_images_alone(self) -> None:
        stored = tensor(PICTURES).byte()
        before = stored.clone()
        BatchAugmentation(options(augmentation="strong", colour_jitter=0.4), torch.device("cpu"))(stored, generator())
        assert torch.equal(stored, before)

    def test_is_made_of_the_numbers_of_its_generator(self) -> None:
        made = BatchAugmentation(options(augmentation="strong", colour_jitter=0.4), torch.device("cpu"))
        first, again, other = (made(tensor(PICTURES).byte(), generator(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("augmentation", ["none", "weak", "strong"])
    def test_is_the_same_on_a_gpu(self, augmentation: str) -> None:
        stored = tensor(PICTURES * 8).byte()
        given = options(augmentation=augmentation, colour_jitter=0.4)
        cpu, gpu = (
            BatchAugmentation(given, torch.device(name))(stored.to(name), generator()).cpu() for name in ("cpu", "cuda")
        )
        # a rounding more or less can put a pixel on the other side of a level where it is inverted
        assert ((cpu - gpu).abs() < 1e-3).float().mean() > 0.99
