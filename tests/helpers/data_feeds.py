"""Feeds over small generated images, and the inverse: which image a batch entry shows."""

from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mctf.data import Feed, FeedOptions, make_feed

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
SIZE = 12


def options(**changes: object) -> FeedOptions:
    """Small batches of small images."""
    given: dict[str, object] = {"batch": 4, "image_size": (SIZE, SIZE), "mean": MEAN, "std": STD, "seed": 3}
    return FeedOptions(**(given | changes))  # type: ignore[arg-type]


def feed(data: Path, *, rank: int = 0, world_size: int = 1, **changes: object) -> Feed:
    return make_feed(data, options=options(**changes), device="cpu", rank=rank, world_size=world_size)


def write_uniform_images(folder: Path, count: int, *, classes: int = 3, side: int = 8) -> Path:
    """Images of one color each, which crops and flips preserve. Image k is of class k % classes."""
    for index in range(count):
        class_folder = folder / f"class{index % classes}"
        class_folder.mkdir(parents=True, exist_ok=True)
        color = (index * 5 % 256, index * 11 % 256, 255 - index)
        Image.new("RGB", (side, side), color).save(class_folder / f"{index:03}.png")
    return folder


def number_of(image: Tensor) -> int:
    """The k of a uniform image, from its blue channel."""
    return 255 - round(((image[2].mean() * STD[2] + MEAN[2]) * 255).item())


def collect(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    images, labels = zip(*batches, strict=True)
    return list(images), list(labels)


def assert_same(first: Iterable[tuple[Tensor, Tensor]], second: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Bit-identical batches."""
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)
