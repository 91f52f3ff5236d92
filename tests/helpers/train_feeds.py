"""A feed of synthetic images and a small run around it; ways to run it, to kill it and to read its log."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.models import make
from mctf.data.sampler import generator_for
from mctf.distributed import DistributedContext
from mctf.train.build import build_around
from mctf.train.config import Recipe
from mctf.train.engine import OnStep, Trainer
from mctf.train.logging import Logs, Record
from mctf.train.signals import StopRequest

CLASSES = 4
ALONE = DistributedContext(0, 1, torch.device("cpu"))


class Stripes:
    """A feed of noisy stripes in four directions, a function of seed, epoch, step and rank."""

    num_classes = CLASSES
    class_to_idx = {f"direction {index}": index for index in range(CLASSES)}  # noqa: RUF012
    note = "stripes"
    digest = "stripes"
    skipped = 0

    def __init__(self, *, batch: int = 4, steps: int = 3, seed: int = 0, size: int = 64, rank: int = 0) -> None:
        self.batch, self.length, self.seed, self.size, self.rank = batch, steps, seed, size, rank
        self.num_images = batch * steps
        self.calls: list[tuple[int, int]] = []
        self.broken: tuple[int, int] | None = None  # epoch and step of a batch that holds a NaN

    def steps(self) -> int:
        return self.length

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        self.calls.append((epoch, start))
        return (self.make(epoch, step) for step in range(start, self.length))

    def make(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        generator = generator_for(self.seed, epoch, step, self.rank)
        labels = torch.randint(CLASSES, (self.batch,), generator=generator)
        angle = labels[:, None, None] * torch.pi / CLASSES
        y, x = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        phase = 6 * torch.rand(self.batch, 1, 1, generator=generator)
        waves = torch.sin(0.6 * (x * angle.cos() + y * angle.sin()) + phase)  # B H W
        noise = torch.randn(self.batch, 3, self.size, self.size, generator=generator)
        images = waves[:, None] + 0.3 * noise
        if (epoch, step) == self.broken:
            images[0, 0, 0, 0] = float("nan")
        return images, labels


def make_recipe(output: Path, **options: Any) -> Recipe:
    """Three epochs at a high learning rate; by default it saves only at the end."""
    values = {"epochs": 3, "lr": 1e-3, "min_lr": 1e-5, "r": 8, "save_epochs": 99, "log_steps": 1, "smoothing": 0.0}
    return Recipe(model="test_vit", data="stripes", output=output, **(values | options))


def make_trainer(
    output: Path, *, feed: Stripes | None = None, features: dict[str, Any] | None = None, **options: Any
) -> Trainer:
    """A run of the tiny model on stripes."""
    model = make("plain", num_classes=CLASSES, **(features or {}))
    return build_around(model, feed or Stripes(), make_recipe(output, **options), ALONE)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class KilledError(Exception):
    """Ends a run without saving, as a power failure does."""


def killing_at(step: int) -> OnStep:
    def on_step(done: int, record: Record | None) -> None:
        if done == step:
            raise KilledError

    return on_step


def finish(trainer: Trainer, **how: Any) -> dict[str, Tensor]:
    """The weights after all steps."""
    trainer.run(StopRequest(), **how)
    return weights_of(trainer)


def finish_logged(trainer: Trainer, **how: Any) -> dict[str, Tensor]:
    """The same, with a log in the run's folder."""
    logs = Logs(trainer.recipe.output, done=trainer.step)
    try:
        return finish(trainer, logs=logs, **how)
    finally:
        logs.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of the `log.csv` in a folder: numbers, None for empty cells."""
    with (folder / "log.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) if value else None for name, value in row.items()} for row in rows]
