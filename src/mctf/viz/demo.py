"""The content of `mctf demo`: one model with and without fusion, on photographs of scikit-image and gradio.

The photographs are files of the installed packages, located without importing them: nothing is downloaded or copied.

Axes: B images, 3 H W.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..data import Preprocessing, ReadLimits
from ..data.decode import DEFAULT_LIMITS
from ..errors import MctfError
from ..evaluation.environment import describe_device
from ..evaluation.fidelity import Fidelity, Output, average, run_model, score
from ..evaluation.timing import time_interleaved
from ..models.class_names import class_labels
from ..models.loading import copy_sharing_weights
from ..planning import Plan, ScheduleSource, plan
from .contact_sheet import Panel, choose_blocks, contact_sheet, panels
from .fused_patches import open_image

WARMUP = 1
_SIDE = 448  # pixels of a picture's shorter side: larger ones take longer to draw and to write


@dataclass(frozen=True)
class Photograph:
    """A name and an image file.

    box: the part to show, as (left, top, right, bottom) in pixels. label: the class that it shows, where one is known.
    """

    name: str
    path: Path
    box: tuple[int, int, int, int] | None = None
    label: str | None = None

    def open(self, limits: ReadLimits = DEFAULT_LIMITS) -> Image.Image:
        """As `open_image`, cropped to the box."""
        image = open_image(self.path, limits)
        return image if self.box is None else image.crop(self.box)


_FILES = (  # labels are classes of ImageNet and of Tiny-ImageNet; gradio is part of another extra than scikit-image
    ("skimage", Photograph("cat", Path("data/chelsea.png"), box=(240, 90, 450, 300), label="Egyptian cat")),
    ("skimage", Photograph("coffee", Path("data/coffee.png"), label="espresso")),
    ("gradio", Photograph("lion", Path("media_assets/images/lion.jpg"), label="lion")),
)


def photographs() -> list[Photograph]:
    """A cat and a cup of scikit-image, and a lion where gradio is installed."""
    found = []
    for module, photograph in _FILES:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            path = Path(spec.submodule_search_locations[0]) / photograph.path
            if path.is_file():
                found.append(replace(photograph, path=path))
    if not found:
        raise MctfError("the demo's photographs are files of scikit-image: run pip install 'mctf[demo]'")
    return found


@dataclass(frozen=True)
class Speed:
    """Median images/s of both models, their quotient, and the conditions.

    upper_bound: the same quotient for the free-drop upper bound. spread: the largest, see `Timing`.
    """

    baseline_images_per_second: float
    fused_images_per_second: float
    speedup: float
    upper_bound: float
    spread: float
    rounds: int
    batch: int
    dtype: str
    device: str


@dataclass(frozen=True)
class Prediction:
    """The top-1 class of both models for one photograph, each with its probability."""

    photograph: str
    baseline: str
    baseline_probability: float
    fused: str
    fused_probability: float


@dataclass(frozen=True)
class Demonstration:
    """The baseline, the fused model and the free-drop upper bound with shared weights; their inputs: B 3 H W."""

    baseline: nn.Module
    fused: nn.Module
    free_drop: nn.Module
    plan: Plan
    preprocessing: Preprocessing
    names: tuple[str, ...]
    pixels: Tensor

    @classmethod
    def of(
        cls,
        model: nn.Module,
        shown: Sequence[Photograph],
        *,
        method: str | None,
        r: ReductionSpec | None,
        device: torch.device,
        flops: float | None = None,
        schedule: ScheduleSource | None = None,
    ) -> "Demonstration":
        planned = plan(model, method=method, r=r, flops=flops, schedule=schedule)
        model = model.to(device)
        preprocessing = Preprocessing.of(model)
        transform = preprocessing.transform()
        return cls(
            baseline=model,
            fused=fuse(copy_sharing_weights(model), method, r=r, flops=flops, schedule=schedule),
            free_drop=fuse(copy_sharing_weights(model), "free_drop", r=planned.removed, trim_last=planned.trimmed),
            plan=planned,
            preprocessing=preprocessing,
            names=tuple(each.name for each in shown),
            pixels=torch.stack([transform(each.open()) for each in shown]).to(device),
        )

    @property
    def classes(self) -> int:
        """Number of classes; 0 without a classifier."""
        model: Any = self.baseline
        return getattr(model, "num_classes", 0)

    def speed(self, *, batch: int, rounds: int, after_round: Callable[[], object] = lambda: None) -> Speed:
        """All models on the same batch of photographs, interleaved."""
        pixels = self.pixels[torch.arange(batch) % len(self.pixels)]
        models = {"baseline": self.baseline, "fused": self.fused, "free_drop": self.free_drop}
        forwards = {name: partial(model, pixels) for name, model in models.items()}
        timings = time_interleaved(
            forwards, device=pixels.device, rounds=rounds, warmup=WARMUP, after_round=after_round
        )
        return Speed(
            baseline_images_per_second=batch / timings["baseline"].median,
            fused_images_per_second=batch / timings["fused"].median,
            speedup=timings["baseline"].median / timings["fused"].median,
            upper_bound=timings["baseline"].median / timings["free_drop"].median,
            spread=max(timing.spread for timing in timings.values()),
            rounds=rounds,
            batch=batch,
            dtype=str(pixels.dtype).removeprefix("torch."),
            device=describe_device(pixels.device),
        )

    @torch.inference_mode()
    def predictions(self) -> tuple[Fidelity, list[Prediction]]:
        """The fidelity of the fused model to the baseline, and the predictions of both; none without a classifier."""
        baseline, fused = run_model(self.baseline, self.pixels), run_model(self.fused, self.pixels)
        fidelity = average(score(fused, baseline, None, classifies=self.classes > 0))
        if not self.classes:
            return fidelity, []
        words = class_labels(self.baseline)
        rows = zip(self.names, _top1(baseline, words), _top1(fused, words), strict=True)
        return fidelity, [Prediction(name, *before, *after) for name, before, after in rows]

    def picture(self, after_image: Callable[[], object] = lambda: None) -> Image.Image:
        """A contact sheet of all photographs."""
        blocks = choose_blocks(None, len(self.plan.reductions))
        scale = -(-_SIDE // min(self.preprocessing.image_size))
        options: dict[str, Any] = {"blocks": blocks, "scale": scale, "after_image": after_image}
        return contact_sheet(self.fused, list(self.pixels), self.preprocessing, **options)

    def strip(self, *, side: int | None = None) -> list[Panel]:
        """The first photograph, its patches half-way and after the last block.

        side: of the square pictures in pixels, which then have no borders; None for pictures with borders.
        """
        depth = len(self.plan.reductions)
        scale = 2 if side is None else 1
        blocks = (depth // 2, depth - 1)
        row = panels(self.fused, self.pixels[0], self.preprocessing, blocks=blocks, scale=scale, borders=side is None)
        if side is None:
            return row
        return [replace(panel, picture=panel.picture.resize((side, side), Image.Resampling.BOX)) for panel in row]


def _top1(output: Output, words: Sequence[str]) -> list[tuple[str, float]]:
    """The most probable class of each image and its probability."""
    top = output.logits.double().softmax(dim=1).max(dim=1)
    return list(zip([words[index] for index in top.indices.tolist()], top.values.tolist(), strict=True))
