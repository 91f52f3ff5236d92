"""A tiny model with images made up on the spot, as an experiment is given them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from helpers.images import write_folder
from helpers.models import make
from mctf.data import EvalLoader, Preprocessing, open_dataset
from mctf.reproduce.runner import Subject, Task


def make_subject(place: Path, model: Any = None, *, images: int = 5) -> Subject:
    """So many images, each of another class, in batches of three."""
    model = make("plain") if model is None else model
    dataset = open_dataset(write_folder(place / "images", *(f"{index}.png" for index in range(images))))
    preprocessing = Preprocessing.of(model)
    batches = EvalLoader(replace(dataset, targets=torch.arange(images)), preprocessing.transform(), batch_size=3)
    return Subject("plain", model, batches, preprocessing)


def make_task(place: Path, subject: Subject | None, *, quick: bool = True) -> tuple[Task, list[int]]:
    """A task, and a list that its steps are written to."""
    steps: list[int] = []
    return Task(subject, quick, place / "pictures", steps.append), steps
