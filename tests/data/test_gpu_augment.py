"""Augmentation of batches against Pillow, timm and the preprocessing of evaluation."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.data_feeds import MEAN, STD, options
from helpers.images import make_picture
from mctf.data.gpu_augment import BatchAugmentation, box_mask, covering_size, crop_and_resize, draw_boxes, draw_crops
from mctf.data.sampler import seeded
from mctf.data.transforms import training_transform

PICTURES = [make_picture(seed, width=30, height=22) for seed in range(4)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(pictures: list[Image.Image]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]).float()


class TestCrops:
    @pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
    @pytest.mark.parametrize("size", [(40, 50), (9, 7), (22, 30)])
    def test_equal_those_of_pillow(self, interpolation: str, size: tuple[int, int]) -> None:
        boxes = [(0, 0, 22, 30), (3, 5, 10, 12), (11, 0, 11, 3), (21, 29, 1, 1)]
        flips = torch.tensor([False, True, False, True])
        expected = []
        for picture, (top, left, height, width), flip in zip(PICTURES, boxes, flips, strict=True):
            crop = picture.crop((left, top, left + width, top + height))
            crop = crop.resize(size[::-1], Image.Resampling[interpolation.upper()])
            expected.append(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else crop)
        given = torch.tensor(boxes, dtype=torch.float32)
        output = crop_and_resize(tensor(PICTURES), given, flips, size=size, interpolation=interpolation)
        assert (output.clamp(0, 255) - tensor(expected)).abs().max() < 1.6  # Pillow rounds after each direction

    @pytest.mark.parametrize("size", [(64, 64), (40, 90), (300, 10), (1, 1)])
    def test_are_inside_the_image(self, size: tuple[int, int]) -> None:
        boxes = draw_crops(500, size, scale=(0.08, 1.0), generator=generator())
        top, left, height, width = boxes.unbind(1)
        assert min(top.min(), left.min()) >= 0
        assert min(height.min(), width.min()) >= 1
        assert (top + height).max() <= size[0]
        assert (left + width).max() <= size[1]
        assert torch.equal(boxes, boxes.round())

    def test_have_the_given_areas_and_aspect_ratios(self) -> None:
        boxes, fits = draw_boxes(4000, (200, 200), scale=(0.2, 0.5), ratio=(0.5, 2.0), generator=generator())
        _, _, height, width = boxes.unbind(1)
        area, ratio = height * width / 200**2, width / height
        assert fits.all()
        assert 0.19 < area.min() < 0.21 < 0.34 < area.mean() < 0.36 < 0.49 < area.max() < 0.51
        assert 0.48 < ratio.min() < 0.55 < 1.9 < ratio.max() < 2.05
        assert ratio.log().mean().abs() < 0.03

    @pytest.mark.parametrize("target", [(12, 12), (10, 20), (64, 64), (50, 30)])
    @pytest.mark.parametrize("size", [(22, 30), (31, 20), (40, 40)])
    def test_in_the_center_equal_those_of_evaluation(self, size: tuple[int, int], target: tuple[int, int]) -> None:
        picture = make_picture(0, width=size[1], height=size[0])
        given = options(augmentation="none", image_size=target)
        output = BatchAugmentation(given, torch.device("cpu"))(tensor([picture]).byte(), generator())
        expected = training_transform(given)(picture)
        difference = ((output - expected) * torch.tensor(STD)[:, None, None] * 255).abs()
        assert difference.mean() < 0.5
        assert difference.max() < 2.5  # Pillow rounds and clips after each direction

    def test_resized_images_cover_the_target(self) -> None:
        assert covering_size((40, 48), (12, 12)) == (12, 14)
        assert covering_size((40, 40), (10, 20)) == (20, 20)

    def test_mask_of_boxes(self) -> None:
        mask = box_mask(torch.tensor([[1.0, 2.0, 3.0, 1.0], [0.0, 0.0, 4.0, 5.0]]), (4, 5))
        assert mask[0].nonzero().tolist() == [[1, 2], [2, 2], [3, 2]]
        assert mask[1].all()


class TestBatchAugmentation:
    def test_erases_a_quarter_of_the_images_with_noise(self) -> None:
        count, size = 400, (24, 24)
        uniform = torch.full((count, 3, 8, 8), 128, dtype=torch.uint8)
        augment = BatchAugmentation(options(augmentation="strong", image_size=size), torch.device("cpu"))
        output = augment(uniform, generator())
        levels = output * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        erased = ((levels < -0.01) | (levels > 1.01)).any(1).flatten(1).any(1)
        assert 0.18 < erased.float().mean() < 0.32

    def test_flips_half_of_the_images(self) -> None:
        ramp = torch.arange(0, 240, 30, dtype=torch.uint8).expand(400, 3, 8, 8)
        output = BatchAugmentation(options(), torch.device("cpu"))(ramp, generator())
        flipped = output[..., :6].mean((1, 2, 3)) > output[..., 6:].mean((1, 2, 3))
        assert 0.42 < flipped.float().mean() < 0.58

    @pytest.mark.parametrize("batched", [True, False])
    def test_crops_within_the_given_scale(self, batched: bool) -> None:
        """The whole image, flipped or not, where a crop keeps all of it; less of it by default."""
        picture = PICTURES[0].resize((24, 24))
        stored = tensor([picture] * 20).byte()

        def distances(**given: object) -> Tensor:
            chosen = options(image_size=(24, 24), **given)
            if batched:
                output = BatchAugmentation(chosen, torch.device("cpu"))(stored, generator())
            else:
                with seeded(0):
                    output = torch.stack([training_transform(chosen)(picture) for _ in range(20)])
            levels = (output * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
            both = torch.stack([levels - stored, levels - stored.flip(3)])
            return both.abs().amax((2, 3, 4)).amin(0)

        assert distances(smallest_crop=1.0).max() < 1
        assert distances().max() > 10

    def test_does_not_change_the_stored_images(self) -> None:
        stored = tensor(PICTURES).byte()
        before = stored.clone()
        BatchAugmentation(options(augmentation="strong", color_jitter=0.4), torch.device("cpu"))(stored, generator())
        assert torch.equal(stored, before)

    def test_depends_on_its_generator_alone(self) -> None:
        augment = BatchAugmentation(options(augmentation="strong", color_jitter=0.4), torch.device("cpu"))
        first, again, other = (augment(tensor(PICTURES).byte(), generator(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("augmentation", ["none", "weak", "strong"])
    def test_is_the_same_on_a_gpu(self, augmentation: str) -> None:
        stored = tensor(PICTURES * 8).byte()
        given = options(augmentation=augmentation, color_jitter=0.4)
        cpu, gpu = (
            BatchAugmentation(given, torch.device(name))(stored.to(name), generator()).cpu() for name in ("cpu", "cuda")
        )
        # rounding decides on which side of a threshold a pixel is
        assert ((cpu - gpu).abs() < 1e-3).float().mean() > 0.99
