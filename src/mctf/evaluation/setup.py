"""What the verbs that measure a model on images have in common: their options, the model, the images, the facts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from ..cli.options import (
    batch_size_option,
    classes_option,
    crop_option,
    device_option,
    dtype_option,
    image_size_option,
    json_option,
    limit_option,
    output_option,
    parse_image_size,
    progress_option,
    threads_option,
    weights_option,
)
from ..errors import MctfError

if TYPE_CHECKING:
    from torch import Tensor

    from ..data import EvalLoader, ImageDataset, Preprocessing
    from ..distributed import DistributedContext

_OPTIONS = (
    click.option("--data", required=True, help="Folder or zip files of class/name images, or hf:NAME[:SPLIT]."),
    weights_option,
    classes_option,
    image_size_option,
    crop_option,
    batch_size_option,
    limit_option,
    click.option("--workers", type=click.IntRange(0), help="Processes that read images; none on the CPU by default."),
    device_option,
    dtype_option,
    threads_option,
    progress_option,
    output_option,
    json_option,
)


def measuring_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `Measuring`, --output and --json."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Subject:
    """A model on its device, and the images: all of them, and in batches those of this process."""

    model: Any
    dataset: "ImageDataset"
    preprocessing: "Preprocessing"
    batches: "EvalLoader"
    processes: "DistributedContext"

    def sample(self, count: int) -> "Tensor":
        """So many images, evenly spaced over those of all processes, as the model takes them: B 3 H W."""
        import torch

        chosen, transform = self.dataset.spaced(count), self.preprocessing.transform()
        weight = next(self.model.parameters())
        pixels = torch.stack([transform(chosen.read(index)) for index in range(len(chosen))])
        return pixels.to(weight.device, weight.dtype)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What the user asked for; the fields are options of the command."""

    model: str
    data: str
    weights: Path | None
    classes: Path | None
    image_size: str | None
    crop_pct: float | None
    batch_size: int
    limit: int | None
    workers: int | None
    device_name: str | None
    dtype: str
    threads: int | None
    progress: bool | None

    @contextmanager
    def open(self) -> Iterator[Subject]:
        """Everything found and loaded; in one of the processes of torchrun, where there are several."""
        import torch

        from ..data import EvalLoader, Preprocessing, open_dataset
        from ..distributed import init_distributed
        from ..models.loading import load_model
        from .environment import pick_device

        size = parse_image_size(self.image_size)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        torch.manual_seed(0)  # layers that nobody has trained are the same in every run and process
        dataset = open_dataset(self.data)
        with init_distributed(pick_device(self.device_name)) as processes:
            device = processes.device
            model: Any = load_model(self.model, weights=self.weights, image_size=size)
            model = model.to(device, getattr(torch, self.dtype))
            dataset = dataset.for_model(model.num_classes, classes=self.classes).spaced(self.limit or len(dataset))
            preprocessing = Preprocessing.of(model, crop_pct=self.crop_pct)
            batches = EvalLoader(
                dataset.shard(processes.rank, processes.world_size),
                preprocessing.transform(),
                batch_size=self.batch_size,
                workers=self.workers,
                device=device,
            )
            try:
                yield Subject(model, dataset, preprocessing, batches, processes)
            except torch.OutOfMemoryError:
                raise MctfError(
                    f"{device} has too little memory for batches of {self.batch_size}: lower --batch-size"
                ) from None

    def facts(self, subject: Subject, *, images: int) -> dict[str, Any]:
        """What was measured and on what, for the JSON object."""
        from .environment import command_line, describe_device, versions

        return {
            "model": self.model,
            "weights": None if self.weights is None else str(self.weights),
            "data": self.data,
            "images": images,
            "preprocessing": asdict(subject.preprocessing),
            "device": describe_device(subject.processes.device),
            "processes": subject.processes.world_size,
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "versions": versions(),
            "command": command_line(),
        }


def title_of(facts: dict[str, Any]) -> str:
    """The line above a table of these facts."""
    images = plural(facts["images"], "image")
    return f"{facts['model']} on {images} of {facts['data']}, {facts['device']}, {facts['dtype']}"
