"""Preprocessing of single images against torchvision, and the augmentation by timm."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision.transforms.functional import center_crop, normalize, resize, to_tensor

from helpers.data_feeds import options
from helpers.images import make_picture
from mctf.data import Preprocessing
from mctf.data.transforms import training_transform


class TestPreprocessing:
    def test_is_the_one_of_the_model_config(self) -> None:
        preprocessing = Preprocessing.of(timm.create_model("test_vit"))
        assert preprocessing == Preprocessing(
            image_size=(160, 160),
            crop_pct=0.95,
            crop_mode="center",
            interpolation="bicubic",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        )

    def test_takes_the_image_size_of_the_model_and_another_crop(self) -> None:
        preprocessing = Preprocessing.of(timm.create_model("test_vit", img_size=(96, 128)), crop_pct=0.875)
        assert (preprocessing.image_size, preprocessing.crop_pct) == ((96, 128), 0.875)
        assert preprocessing.transform()(make_picture(0)).shape == (3, 96, 128)

    def test_resizes_crops_and_normalizes(self) -> None:
        picture = make_picture(0, width=300, height=200)
        output = Preprocessing.of(timm.create_model("test_vit")).transform()(picture)
        resized = picture.resize((252, 168), Image.Resampling.BICUBIC)  # 160 / 0.95 = 168 for the shorter side
        expected = normalize(to_tensor(center_crop(resized, [160, 160])), [0.5] * 3, [0.5] * 3)
        assert torch.equal(output, expected)

    @pytest.mark.parametrize(("width", "height"), [(256, 256), (341, 256), (256, 999), (257, 256)])
    def test_does_not_resample_an_image_that_has_the_size(self, width: int, height: int) -> None:
        picture = make_picture(0, width=width, height=height)
        model = timm.create_model("deit_tiny_patch16_224", depth=1)
        output = Preprocessing.of(model, crop_pct=0.875).transform()(picture)  # 224 / 0.875 = 256
        mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        assert torch.equal(output, normalize(to_tensor(center_crop(picture, [224, 224])), mean, std))

    def test_non_square_crops_use_the_interpolation_of_the_model(self) -> None:
        picture = make_picture(0, width=300, height=300)
        preprocessing = Preprocessing.of(timm.create_model("test_vit", img_size=(96, 128)), crop_pct=1.0)
        expected = center_crop(resize(picture, [128, 128], Image.Resampling.BICUBIC), [96, 128])
        assert torch.equal(preprocessing.transform()(picture), normalize(to_tensor(expected), [0.5] * 3, [0.5] * 3))


def test_posterize_keeps_one_bit_at_the_highest_magnitude() -> None:
    transform = training_transform(options(augmentation="strong"))
    (operations,) = (step.ops for step in transform.transforms if hasattr(step, "ops"))  # type: ignore[attr-defined]
    (posterize,) = (each for each in operations if each.name == "PosterizeIncreasing")
    posterize.prob, posterize.magnitude, posterize.magnitude_std = 1.0, 10, 0.0
    assert set(np.unique(posterize(make_picture(0)))) == {0, 128}
