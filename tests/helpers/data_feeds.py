"""Feeds over small made-up images, and a way to tell which image a pixel came from."""

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


def feed(data: Path, *, rank: int = 0, world: int = 1, **changes: object) -> Feed:
    return make_feed(data, options=options(**changes), device="cpu", rank=rank, world=world)


def write_plain_images(folder: Path, count: int, *, classes: int = 3, side: int = 8) -> Path:
    """Images of one colour each, which stays what it is under crops and flips. Image k is of class k % classes."""
    for index in range(count):
        place = folder / f"class{index % classes}"
        place.mkdir(parents=True, exist_ok=True)
        colour = (index * 5 % 256, index * 11 % 256, 255 - index)
        Image.new("RGB", (side, side), colour).save(place / f"{index:03}.png")
    return folder


def number_of(image: Tensor) -> int:
    """Which of the plain images this is, after the blue channel."""
    return 255 - round(((image[2].mean() * STD[2] + MEAN[2]) * 255).item())


def collect(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    images, labels = zip(*batches, strict=True)
    return list(images), list(labels)


def assert_same(first: Iterable[tuple[Tensor, Tensor]], second: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The same batches, bit by bit."""
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)
