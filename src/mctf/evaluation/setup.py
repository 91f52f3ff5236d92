"""Everything an evaluation runs on, opened from its options: model, images, labels, device and ranks.

Axes: B images, 3 H W.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._utils import plural
from ..data import EvalLoader, ImageDataset, OnCorrupt, Preprocessing, ReadLimits, open_dataset
from ..distributed import DistributedContext, init_distributed
from ..errors import MctfError, is_out_of_memory
from ..models.loading import load_model
from .environment import command_line, describe_device, pick_device, set_threads, versions

CALIBRATION_IMAGES = 128  # ranges of activations settle with far fewer; their KL is known to a tenth


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to evaluate and on which device; the fields are options of the command line."""

    model: str
    data: str | Path
    weights: Path | None = None
    classes: Path | None = None
    image_size: tuple[int, int] | None = None
    crop_pct: float | None = None
    batch_size: int = 32
    limit: int | None = None
    workers: int | None = None
    on_corrupt: OnCorrupt = "stop"
    max_bytes: int | None = None
    max_pixels: int | None = None
    max_aspect: float | None = None
    device_name: str | None = None
    dtype: str = "float32"
    threads: int | None = None
    progress: bool | None = None

    @property
    def limits(self) -> ReadLimits:
        return ReadLimits.of(max_bytes=self.max_bytes, max_pixels=self.max_pixels, max_aspect=self.max_aspect)


@dataclass(frozen=True)
class EvalRun:
    """A model on its device, all images with their labels, and the batches of this rank."""

    options: RunOptions
    model: Any
    dataset: ImageDataset
    preprocessing: Preprocessing
    batches: EvalLoader
    distributed: DistributedContext

    def sample(self, count: int) -> Tensor:
        """`count` images, evenly spaced over those of all ranks, as input of the model: B 3 H W; fewer where unreadable
        ones are skipped.
        """
        chosen, transform = self.dataset.spaced(count), self.preprocessing.transform()
        weight = next(self.model.parameters())
        pixels = torch.stack([transform(image) for _, image in chosen.readable(skip=self.batches.skips)])
        return pixels.to(weight.device, weight.dtype)

    def calibration(self, source: str, count: int = CALIBRATION_IMAGES) -> Tensor:
        """At most `count` images of another source, evenly spaced, as input of the model: B 3 H W."""
        images = read_images(source, self.preprocessing, limits=self.options.limits, count=count)
        weight = next(self.model.parameters())
        return images.to(weight.device, weight.dtype)

    def notes(self, *, images: int) -> list[str]:
        """Remarks on the images, for the user."""
        skipped = len(self.dataset) - images
        return [*self.dataset.notes, *([f"{plural(skipped, 'unreadable image')} skipped"] if skipped else [])]

    def facts(self, *, images: int) -> dict[str, Any]:
        """The conditions of the run, for the JSON object. images: the number evaluated; the others were unreadable."""
        options = self.options
        return {
            "model": options.model,
            "weights": None if options.weights is None else str(options.weights),
            "data": str(options.data),
            "images": images,
            "skipped": len(self.dataset) - images,
            "preprocessing": asdict(self.preprocessing),
            "device": describe_device(self.distributed.device),
            "processes": self.distributed.world_size,
            "dtype": options.dtype,
            "batch_size": options.batch_size,
            "versions": versions(),
            "command": command_line(),
        }


def read_images(source: str, preprocessing: Preprocessing, *, limits: ReadLimits, count: int) -> Tensor:
    """At most `count` images of a source, evenly spaced, preprocessed: B 3 H W."""
    transform, chosen = preprocessing.transform(), open_dataset(source, limits=limits).spaced(count)
    return torch.stack([transform(image) for _, image in chosen.readable(skip=False)])


@contextmanager
def open_run(options: RunOptions) -> Iterator[EvalRun]:
    """Find the images, join the ranks of torchrun if there are any, and load the model."""
    set_threads(options.threads)
    torch.manual_seed(0)  # untrained layers are the same in every run and on every rank
    dataset = open_dataset(options.data, limits=options.limits)
    with init_distributed(pick_device(options.device_name)) as distributed:
        device = distributed.device
        model: Any = load_model(options.model, weights=options.weights, image_size=options.image_size)
        model = model.to(device, getattr(torch, options.dtype))
        dataset = dataset.for_model(model.num_classes, classes=options.classes).spaced(options.limit or len(dataset))
        preprocessing = Preprocessing.of(model, crop_pct=options.crop_pct)
        batches = EvalLoader(
            dataset.shard(distributed.rank, distributed.world_size),
            preprocessing.transform(),
            batch_size=options.batch_size,
            workers=options.workers,
            device=device,
            on_corrupt=options.on_corrupt,
        )
        try:
            yield EvalRun(options, model, dataset, preprocessing, batches, distributed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MctfError(
                f"{device} has too little memory for batches of {options.batch_size}: lower --batch-size"
            ) from None
