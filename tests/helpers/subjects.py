"""A tiny model with generated images, as the input of experiments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from helpers.images import write_folder
from helpers.models import make
from mctf.data import EvalLoader, Preprocessing, open_dataset
from mctf.reproduce.runner import Subject, Task


def make_subject(folder: Path, model: Any = None, *, images: int = 5) -> Subject:
    """Images of one class each, in batches of three."""
    model = make("plain") if model is None else model
    dataset = open_dataset(write_folder(folder / "images", *(f"{index}.png" for index in range(images))))
    preprocessing = Preprocessing.of(model)
    batches = EvalLoader(replace(dataset, targets=torch.arange(images)), preprocessing.transform(), batch_size=3)
    return Subject("plain", model, batches, preprocessing)


def make_task(folder: Path, subject: Subject | None, *, quick: bool = True) -> tuple[Task, list[int]]:
    """A task, and the list of the steps it reports."""
    steps: list[int] = []
    return Task(subject, quick, folder / "pictures", steps.append), steps
