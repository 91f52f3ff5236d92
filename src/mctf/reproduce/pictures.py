"""What the experiments that draw have in common: which images, on what grid, and files that a browser shows."""

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
from ..viz.fused_patches import fused_picture, patch_grid, seen_image
from .analyses import compared
from .runner import Experiment, Result, Subject, Task
from .studies import ALL, R, options_of

_SIDE = 448  # pixels of a picture, about
_QUALITY = 80


def grid_of(subject: Subject) -> tuple[int, int]:
    """Rows and columns of patches; raises MctfError where patches form no grid of squares."""
    architecture = find_host(subject.model).architecture(subject.preprocessing.image_size)
    height, width = subject.preprocessing.image_size
    return patch_grid(architecture.tokens - architecture.protected, height=height, width=width)


def no_grid(subject: Subject) -> str | None:
    """Why nothing can be drawn; None where it can."""
    try:
        grid_of(subject)
    except MctfError as failure:
        return str(failure)
    return None


def scale_of(subject: Subject) -> int:
    """Pixels of a picture a pixel of the image."""
    return max(1, round(_SIDE / max(subject.preprocessing.image_size)))


def save(picture: Image.Image, folder: Path, name: str) -> str:
    """Write a picture as a small file that every browser shows, and give its name."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=_QUALITY)
    atomic_write(folder / f"{name}.webp", buffer.getvalue())
    return f"{name}.webp"


# MERGED from mctf.reproduce.pictures:
# Approximated beside precise attention, as heat over the image, at four blocks (paper, appendix, Figure A).
#
# The heat of a patch is the attention it receives, in the mean over heads and queries; a fused token's is divided
# evenly among its patches. Both maps of a block share one scale of colours.
#
# Axes: B images, 3 H W; M tokens after a block; rows and columns of patches.

KINDS = ("approximated", "precise")
_IMAGES, _QUICK_IMAGES = 16, 8  # for the distances; the first few are drawn
_DRAWN, _QUICK_DRAWN = 3, 2
# From dark to light in even steps of lightness, so that it reads in grey as well.
_COLOURS = np.array([(22, 11, 57), (101, 21, 110), (188, 55, 84), (243, 120, 25), (252, 222, 90)], dtype=float)
_HEAT = 0.6  # how much of the heat covers the image


class AttentionPictures(Experiment):
    """Distances of both maps for several images, and pictures of the first few."""

    name = "attention_maps"
    title = "Approximated attention"
    measures = f"The attention of fused tokens as MCTF approximates it, beside the precise one, r = {R}."
    sources = ("Figure A",)

    def steps(self, task: Task) -> int:
        return self._count(task)

    def unsuited(self, subject: Subject) -> str | None:
        return no_grid(subject) or (None if any(_fusing(subject)) else "the model has too few tokens to fuse any")

    @torch.inference_mode()
    def run(self, task: Task) -> Result:
        subject = task.seen
        model = fuse(copy_sharing_weights(subject.model), r=R).eval()
        shown = four_blocks(_fusing(subject))
        distances: dict[int, list[float]] = {}
        drawn = []
        for number, (name, tensor) in enumerate(subject.some(self._count(task))):
            heats, distance = look(model, subject.to_model(tensor[None]))
            for block, value in distance.items():
                distances.setdefault(block, []).append(value)
            if number < (_QUICK_DRAWN if task.quick else _DRAWN):
                files = {kind: [self._draw(task, tensor, heats, b, kind, number) for b in shown] for kind in KINDS}
                drawn.append({"name": name, "pictures": files})
            task.advance(1)
        return {
            "images": self._count(task),
            "r": R,
            "blocks": [block + 1 for block in shown],
            "distance": {str(block + 1): mean(values) for block, values in sorted(distances.items())},
            "drawn": drawn,
        }

    def _count(self, task: Task) -> int:
        return min(len(task.seen), _QUICK_IMAGES if task.quick else _IMAGES)

    def _draw(
        self, task: Task, tensor: Tensor, heats: dict[int, dict[str, Tensor]], block: int, kind: str, number: int
    ) -> str:
        subject = task.seen
        highest = max(heats[block][each].max().item() for each in KINDS)
        heat = (heats[block][kind] / highest).reshape(grid_of(subject)).numpy()
        picture = heated(seen_image(tensor, subject.preprocessing), heat, scale=scale_of(subject))
        return save(picture, task.pictures, f"attention_{number}_block{block + 1}_{kind}")


def four_blocks(fusing: Sequence[bool]) -> list[int]:
    """Blocks 3, 6, 9 and 12 of twelve, counted from 1, and the like places of other depths: indices from 0.

    fusing: whether each block fuses. One that does not has nothing to compare: the last before it that does is shown,
    or the first of all.
    """
    able = [block for block, fuses in enumerate(fusing) if fuses]
    places = [round(len(fusing) * part / 4) - 1 for part in (1, 2, 3, 4)]
    return sorted({max((block for block in able if block <= place), default=able[0]) for place in places})


def _fusing(subject: Subject) -> list[bool]:
    made = plan(subject.model, r=R, image_size=subject.preprocessing.image_size)
    return [step.num_reduced > 0 for step in made.reductions]


def look(model: nn.Module, pixels: Tensor) -> tuple[dict[int, dict[str, Tensor]], dict[int, float]]:
    """Of one image (1 3 H W): by block the heat of every patch under both maps, and the distance of the maps."""
    prefix = fused_stack(model).host.protected
    with trace(model) as watched, compared(model) as maps:
        model(pixels)
    heats, distances = {}, {}
    for block, both in maps.items():
        slots = watched.source_map(block)[0]
        sizes = torch.bincount(slots)
        heats[block] = {
            kind: (getattr(both, kind).mean(dim=(1, 2))[0] / sizes)[slots][prefix:].float().cpu() for kind in KINDS
        }
        distances[block] = both.distance().mean().item()
    return heats, distances


def heated(image: Image.Image, heat: NDArray[Any], *, scale: int) -> Image.Image:
    """The image in grey under colours of heat: from 0 to 1, rows x columns of patches."""
    size = (image.width * scale, image.height * scale)
    grey = np.asarray(image.convert("L").resize(size, Image.Resampling.LANCZOS).convert("RGB"), dtype=float)
    row = np.arange(size[1]) * heat.shape[0] // size[1]
    column = np.arange(size[0]) * heat.shape[1] // size[0]
    colours = _colour(heat)[row[:, None], column]
    return Image.fromarray((grey * (1 - _HEAT) + colours * _HEAT).round().clip(0, 255).astype(np.uint8))


def _colour(heat: NDArray[Any]) -> NDArray[Any]:
    """Rows x columns x 3, from 0 to 255."""
    places = np.linspace(0, 1, len(_COLOURS))
    return np.stack([np.interp(heat, places, channel) for channel in _COLOURS.T], axis=-1)


# MERGED from mctf.reproduce.pictures:
# Pictures of fused patches, over blocks and r, and by criteria (paper, Figures 2 and 8).
#
# Axes: B images, 3 H W.

REDUCTIONS = (4, 8, 12, R, 20)
CRITERIA = ("sim", "sim+info", ALL)
_IMAGES, _QUICK_IMAGES = 4, 2
_QUICK_REDUCTIONS = (8, R, 20)


class FusedPatches(Experiment):
    """Every block at several r, so that a reader can move through them."""

    name = "fused_patches"
    title = "Fused tokens"
    measures = "Which patches became one token, after every block and for several r."
    sources = ("Figure 2", "Figure 8")

    def steps(self, task: Task) -> int:
        return self._images(task) * (len(self._reductions(task)) + len(CRITERIA))

    def unsuited(self, subject: Subject) -> str | None:
        return no_grid(subject)

    def run(self, task: Task) -> Result:
        subject, reductions = task.seen, self._reductions(task)
        artist = _Artist(task, grid_of(subject), scale_of(subject))
        images = list(subject.some(self._images(task)))
        originals = [artist.original(tensor, number) for number, (_, tensor) in enumerate(images)]
        tokens, pictures = [], []
        for r in reductions:
            model = fuse(copy_sharing_weights(subject.model), r=r).eval()
            drawn = [artist.every_block(model, tensor, f"fused_{n}_r{r}") for n, (_, tensor) in enumerate(images)]
            tokens.append(drawn[0][0])
            pictures.append([files for _, files in drawn])
        by_criteria = []
        for criteria in CRITERIA:
            model = fuse(copy_sharing_weights(subject.model), r=R, **options_of(criteria)).eval()
            by_criteria.append(
                [
                    artist.last_block(model, tensor, f"criteria_{n}_{criteria.replace('+', '-')}")
                    for n, (_, tensor) in enumerate(images)
                ]
            )
        return {
            "images": [name for name, _ in images],
            "originals": originals,
            "reductions": list(reductions),
            "tokens": tokens,  # by r and block
            "pictures": pictures,  # by r, image and block
            "criteria": {"names": list(CRITERIA), "r": R, "pictures": by_criteria},  # by criteria and image
        }

    def _images(self, task: Task) -> int:
        return min(len(task.seen), _QUICK_IMAGES if task.quick else _IMAGES)

    def _reductions(self, task: Task) -> tuple[int, ...]:
        return _QUICK_REDUCTIONS if task.quick else REDUCTIONS


@dataclass(frozen=True)
class _Artist:
    """Draws and saves; gives names of files."""

    task: Task
    grid: tuple[int, int]
    scale: int

    def original(self, tensor: Tensor, number: int) -> str:
        image = self._seen(tensor)
        large = image.resize((image.width * self.scale, image.height * self.scale), Image.Resampling.LANCZOS)
        return save(large, self.task.pictures, f"original_{number}")

    def every_block(self, model: nn.Module, tensor: Tensor, name: str) -> tuple[list[int], list[str]]:
        """Tokens left after each block, and a picture of each."""
        slots, counts = self._follow(model, tensor)
        files = [self._draw(tensor, each, f"{name}_block{block}") for block, each in enumerate(slots, start=1)]
        self.task.advance(1)
        return counts, files

    def last_block(self, model: nn.Module, tensor: Tensor, name: str) -> str:
        slots, _ = self._follow(model, tensor)
        self.task.advance(1)
        return self._draw(tensor, slots[-1], name)

    @torch.inference_mode()
    def _follow(self, model: nn.Module, tensor: Tensor) -> tuple[list[Tensor], list[int]]:
        """The slot of every patch after each block, and how many tokens there are."""
        with trace(model) as watched:
            model(self.task.seen.to_model(tensor[None]))
        prefix = fused_stack(model).host.protected
        counts = watched.token_counts
        return [watched.source_map(block)[0, prefix:].cpu() for block in range(len(counts))], counts

    def _draw(self, tensor: Tensor, slots: Tensor, name: str) -> str:
        picture = fused_picture(self._seen(tensor), slots.numpy(), grid=self.grid, scale=self.scale)
        return save(picture, self.task.pictures, name)

    def _seen(self, tensor: Tensor) -> Image.Image:
        return seen_image(tensor, self.task.seen.preprocessing)
