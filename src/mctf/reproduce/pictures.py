"""Experiments that draw: attention maps as heat over the image, and fused patches.

Axes: B images, 3 H W; rows and columns of patches.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from .._utils import atomic_write
from ..api import fuse, fused_stack
from ..errors import MctfError
from ..hosts import find_host
from ..models.loading import copy_sharing_weights
from ..planning import plan
from ..tracing import trace
from ..viz.fused_patches import enlarge, fused_picture, patch_grid, to_image
from .analyses import recorded_attention
from .records import Result, make_folder
from .runner import Experiment, Subject, Task
from .studies import ALL, R, criteria_options

_SIDE = 448  # approximate pixels of a picture's longer side
_QUALITY = 80
# Dark to light in even steps of lightness, so that it also reads in gray.
_HEAT_COLORS = np.array([(22, 11, 57), (101, 21, 110), (188, 55, 84), (243, 120, 25), (252, 222, 90)], dtype=float)
_HEAT_OPACITY = 0.6


@dataclass(frozen=True)
class _Canvas:
    """Draws pictures of one task into its folder. grid: rows and columns of patches."""

    task: Task
    grid: tuple[int, int]
    scale: int

    @classmethod
    def of(cls, task: Task) -> "_Canvas":
        side = max(task.subject.preprocessing.image_size)
        return cls(task, grid_of(task.subject), max(1, round(_SIDE / side)))

    def image(self, tensor: Tensor) -> Image.Image:
        return to_image(tensor, self.task.subject.preprocessing)

    def save(self, picture: Image.Image, name: str) -> str:
        """Write a picture as WebP and return its file name."""
        folder: Path = self.task.pictures
        make_folder(folder)
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=_QUALITY)
        atomic_write(folder / f"{name}.webp", buffer.getvalue())
        return f"{name}.webp"


def grid_of(subject: Subject) -> tuple[int, int]:
    """Rows and columns of patches; raises MctfError where the patches form no grid of squares."""
    architecture = find_host(subject.model).architecture(subject.preprocessing.image_size)
    height, width = subject.preprocessing.image_size
    return patch_grid(architecture.tokens - architecture.protected, height=height, width=width)


def _no_grid(subject: Subject) -> str | None:
    """Why patches cannot be drawn; None where they can."""
    try:
        grid_of(subject)
    except MctfError as error:
        return str(error)
    return None


KINDS = ("approximated", "precise")


@dataclass(frozen=True)
class DrawnImage:
    """One image with the files of its maps: per kind, one file per block."""

    name: str
    pictures: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class AttentionMapsResult(Result):
    """distance: mean over images of `AttentionPair.distance`, by block as text. Blocks are counted from 1."""

    images: int
    r: int
    blocks: tuple[int, ...]
    distance: dict[str, float]
    drawn: tuple[DrawnImage, ...]


class AttentionMaps(Experiment):
    """Approximated and precise attention as heat over the image, at four blocks (paper, appendix, Figure A).

    The heat of a patch is the attention it receives, the mean over heads and queries; that of a fused token is divided
    evenly among its patches. Both maps of a block share one color scale.
    """

    name = "attention_maps"
    title = "Approximated attention"
    measures = f"The attention of fused tokens as MCTF approximates it, beside the precise one, r = {R}."
    sources = ("Figure A",)
    result_type = AttentionMapsResult

    def steps(self, task: Task) -> int:
        return min(len(task.subject), 8 if task.quick else 16)

    def unsupported(self, subject: Subject) -> str | None:
        return _no_grid(subject) or (None if any(_fusing(subject)) else "the model has too few tokens to fuse any")

    @torch.inference_mode()
    def run(self, task: Task) -> AttentionMapsResult:
        subject, canvas, images = task.subject, _Canvas.of(task), self.steps(task)
        model = fuse(copy_sharing_weights(subject.model), r=R).eval()
        shown = four_blocks(_fusing(subject))
        distances: dict[int, list[float]] = {}
        drawn = []
        for number, (name, tensor) in enumerate(subject.sample(images)):
            heat, distance = attention_heat(model, subject.to_model(tensor[None]))
            for block, value in distance.items():
                distances.setdefault(block, []).append(value)
            if number < (2 if task.quick else 3):
                files: dict[str, list[str]] = {kind: [] for kind in KINDS}
                for block in shown:
                    highest = max(each.max().item() for each in heat[block].values())
                    for kind in KINDS:
                        values = (heat[block][kind] / highest).reshape(canvas.grid).numpy()
                        picture = overlay_heat(canvas.image(tensor), values, scale=canvas.scale)
                        files[kind].append(canvas.save(picture, f"attention_{number}_block{block + 1}_{kind}"))
                drawn.append(DrawnImage(name, {kind: tuple(each) for kind, each in files.items()}))
            task.advance(1)
        return AttentionMapsResult(
            images=images,
            r=R,
            blocks=tuple(block + 1 for block in shown),
            distance={str(block + 1): mean(values) for block, values in sorted(distances.items())},
            drawn=tuple(drawn),
        )


def four_blocks(fusing: Sequence[bool]) -> list[int]:
    """Blocks 3, 6, 9 and 12 of twelve, counted from 1, and the same fractions of other depths: indices from 0.

    fusing: whether each block fuses. A block that does not is replaced by the last one before it that does, or by the
    first of all.
    """
    able = [block for block, fuses in enumerate(fusing) if fuses]
    targets = [round(len(fusing) * part / 4) - 1 for part in (1, 2, 3, 4)]
    return sorted({max((block for block in able if block <= target), default=able[0]) for target in targets})


def _fusing(subject: Subject) -> list[bool]:
    planned = plan(subject.model, r=R, image_size=subject.preprocessing.image_size)
    return [step.num_reduced > 0 for step in planned.reductions]


def attention_heat(model: nn.Module, pixels: Tensor) -> tuple[dict[int, dict[str, Tensor]], dict[int, float]]:
    """For one image (1 3 H W), by block: the heat of every patch under both maps, and the distance of the maps."""
    prefix = fused_stack(model).host.protected
    with trace(model) as traced, recorded_attention(model) as maps:
        model(pixels)
    heat, distances = {}, {}
    for block, pair in maps.items():
        slots = traced.source_map(block)[0]
        sizes = torch.bincount(slots)
        heat[block] = {
            kind: (getattr(pair, kind).mean(dim=(1, 2))[0] / sizes)[slots][prefix:].float().cpu() for kind in KINDS
        }
        distances[block] = pair.distance().mean().item()
    return heat, distances


def overlay_heat(image: Image.Image, heat: NDArray[Any], *, scale: int) -> Image.Image:
    """The image in gray under the colors of its heat: from 0 to 1, rows x columns of patches."""
    gray = np.asarray(enlarge(image.convert("L"), scale).convert("RGB"), dtype=float)
    row = np.arange(gray.shape[0]) * heat.shape[0] // gray.shape[0]
    column = np.arange(gray.shape[1]) * heat.shape[1] // gray.shape[1]
    stops = np.linspace(0, 1, len(_HEAT_COLORS))
    colors = np.stack([np.interp(heat, stops, channel) for channel in _HEAT_COLORS.T], axis=-1)[row[:, None], column]
    return Image.fromarray((gray * (1 - _HEAT_OPACITY) + colors * _HEAT_OPACITY).round().clip(0, 255).astype(np.uint8))


CRITERIA = ("sim", "sim+info", ALL)


@dataclass(frozen=True)
class CriteriaPictures:
    """Files by criteria and image, after the last block."""

    names: tuple[str, ...]
    r: int
    pictures: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class FusedPatchesResult(Result):
    """tokens: remaining, by r and block. pictures: files by r, image and block."""

    images: tuple[str, ...]
    originals: tuple[str, ...]
    reductions: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    pictures: tuple[tuple[tuple[str, ...], ...], ...]
    criteria: CriteriaPictures


class FusedPatches(Experiment):
    """Pictures of fused patches at every block for several r, and by criteria (paper, Figures 2 and 8)."""

    name = "fused_patches"
    title = "Fused patches"
    measures = "Patches fused into one token, after every block and for several r."
    sources = ("Figure 2", "Figure 8")
    result_type = FusedPatchesResult

    def steps(self, task: Task) -> int:
        return self._images(task) * (len(self._reductions(task)) + len(CRITERIA))

    def unsupported(self, subject: Subject) -> str | None:
        return _no_grid(subject)

    @torch.inference_mode()
    def run(self, task: Task) -> FusedPatchesResult:
        subject, canvas = task.subject, _Canvas.of(task)
        names, inputs = zip(*subject.sample(self._images(task)), strict=True)
        reductions = self._reductions(task)

        def draw(tensor: Tensor, slots: Tensor, name: str) -> str:
            picture = fused_picture(canvas.image(tensor), slots.numpy(), grid=canvas.grid, scale=canvas.scale)
            return canvas.save(picture, name)

        tokens, pictures = [], []
        for r in reductions:
            model = fuse(copy_sharing_weights(subject.model), r=r).eval()
            by_image = []
            for number, tensor in enumerate(inputs):
                slots, counts = _source_maps(model, subject.to_model(tensor[None]))
                files = (draw(tensor, each, f"fused_{number}_r{r}_block{i}") for i, each in enumerate(slots, start=1))
                by_image.append(tuple(files))
                task.advance(1)
            tokens.append(tuple(counts))
            pictures.append(tuple(by_image))
        by_criteria = []
        for criteria in CRITERIA:
            model = fuse(copy_sharing_weights(subject.model), r=R, **criteria_options(criteria)).eval()
            files_of_criteria = []
            for number, tensor in enumerate(inputs):
                slots, _ = _source_maps(model, subject.to_model(tensor[None]))
                files_of_criteria.append(draw(tensor, slots[-1], f"criteria_{number}_{criteria.replace('+', '-')}"))
                task.advance(1)
            by_criteria.append(tuple(files_of_criteria))
        originals = (enlarge(canvas.image(tensor), canvas.scale) for tensor in inputs)
        return FusedPatchesResult(
            images=tuple(names),
            originals=tuple(canvas.save(image, f"original_{number}") for number, image in enumerate(originals)),
            reductions=reductions,
            tokens=tuple(tokens),
            pictures=tuple(pictures),
            criteria=CriteriaPictures(CRITERIA, R, tuple(by_criteria)),
        )

    def _images(self, task: Task) -> int:
        return min(len(task.subject), 2 if task.quick else 4)

    def _reductions(self, task: Task) -> tuple[int, ...]:
        return (8, R, 20) if task.quick else (4, 8, 12, R, 20)


def _source_maps(model: nn.Module, pixels: Tensor) -> tuple[list[Tensor], list[int]]:
    """Of one image (1 3 H W): the slot of every patch after each block, and the number of tokens."""
    with trace(model) as traced:
        model(pixels)
    prefix, counts = fused_stack(model).host.protected, traced.token_counts
    return [traced.source_map(block)[0, prefix:].cpu() for block in range(len(counts))], counts
