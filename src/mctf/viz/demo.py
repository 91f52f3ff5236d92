"""Photographs that come with scikit-image, for a demo with nothing to download.

They are plain files inside the installed package, so they are found without importing it. All four may be
copied freely (public domain or CC0).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..data import Preprocessing
from ..errors import MctfError
from ..evaluation.environment import describe_device
from ..evaluation.fidelity import Fidelity, Output, average, run_model, score
from ..evaluation.timing import time_interleaved
from ..models.class_names import class_words
from ..models.loading import copy_sharing_weights
from ..planning import Plan, plan
from .contact_sheet import choose_blocks, gallery
from .fused_patches import open_image

_FILES = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png")


def photographs() -> list[Path]:
    """A cat, a cup of coffee, a rocket and an astronaut, as image files."""
    spec = find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise MctfError("the demo's photographs come with scikit-image: run pip install 'mctf[demo]'")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise MctfError(
            f"scikit-image came without {', '.join(missing)}: run pip install --force-reinstall scikit-image"
        )
    return [folder / name for name in _FILES]


# MERGED from mctf.viz.demo:
# What the demo shows: one model with and without fusing, on a few photographs.
#
# Axes: B images, 3 H W.

WARMUP = 2


@dataclass(frozen=True)
class Speed:
    """Images a second (medians), how many times as fast the fused model is, and under what conditions.

    spread: that of the less steady of the two, see `Timing`.
    """

    plain_images_per_second: float
    fused_images_per_second: float
    speedup: float
    spread: float
    rounds: int
    batch: int
    dtype: str
    device: str


@dataclass(frozen=True)
class Answer:
    """The first answer of both models for one photograph, and the probability each gives to its own."""

    photograph: str
    plain: str
    plain_probability: float
    fused: str
    fused_probability: float


@dataclass(frozen=True)
class Demonstration:
    """A model plain and fused, around the same weights, and what both are shown."""

    plain: nn.Module
    fused: nn.Module
    plan: Plan
    preprocessing: Preprocessing
    names: tuple[str, ...]
    pixels: Tensor

    @classmethod
    def of(
        cls, model: nn.Module, files: Sequence[Path], *, method: str, r: ReductionSpec, device: torch.device
    ) -> "Demonstration":
        made = plan(model, method=method, r=r)
        model = model.to(device)
        preprocessing = Preprocessing.of(model)
        transform = preprocessing.transform()
        return cls(
            plain=model,
            fused=fuse(copy_sharing_weights(model), method, r=r),
            plan=made,
            preprocessing=preprocessing,
            names=tuple(path.stem for path in files),
            pixels=torch.stack([transform(open_image(path)) for path in files]).to(device),
        )

    @property
    def classes(self) -> int:
        """How many the model tells apart; 0 for one without classifier."""
        model: Any = self.plain
        return getattr(model, "num_classes", 0)

    def speed(self, *, batch: int, rounds: int, after_round: Callable[[], object] = lambda: None) -> Speed:
        """Both models on the same batch of photographs, in turns."""
        pixels = self.pixels[torch.arange(batch) % len(self.pixels)]
        forwards = {"plain": lambda: self.plain(pixels), "fused": lambda: self.fused(pixels)}
        timings = time_interleaved(
            forwards, device=pixels.device, rounds=rounds, warmup=WARMUP, after_round=after_round
        )
        return Speed(
            plain_images_per_second=batch / timings["plain"].median,
            fused_images_per_second=batch / timings["fused"].median,
            speedup=timings["fused"].speedup_over(timings["plain"]),
            spread=max(timing.spread for timing in timings.values()),
            rounds=rounds,
            batch=batch,
            dtype=str(pixels.dtype).removeprefix("torch."),
            device=describe_device(pixels.device),
        )

    @torch.inference_mode()
    def answers(self) -> tuple[Fidelity, list[Answer]]:
        """How near the fused model's answers are to the plain one's, and what both say of each photograph."""
        plain, fused = run_model(self.plain, self.pixels), run_model(self.fused, self.pixels)
        fidelity = average(score(fused, plain, None, classifies=self.classes > 0))
        if not self.classes:
            return fidelity, []
        words = class_words(self.plain)
        rows = zip(self.names, _firsts(plain, words), _firsts(fused, words), strict=True)
        return fidelity, [Answer(name, *before, *after) for name, before, after in rows]

    def picture(self, after_image: Callable[[], object] = lambda: None) -> Image.Image:
        """Every photograph and what its patches became."""
        blocks = choose_blocks(None, len(self.plan.reductions))
        return gallery(self.fused, list(self.pixels), self.preprocessing, blocks=blocks, after_image=after_image)


def _firsts(output: Output, words: Sequence[str]) -> list[tuple[str, float]]:
    """The first answer for each image and its probability."""
    first = output.logits.double().softmax(dim=1).max(dim=1)
    return list(zip([words[number] for number in first.indices.tolist()], first.values.tolist(), strict=True))
