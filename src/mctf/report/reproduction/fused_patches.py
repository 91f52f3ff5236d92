"""Pictures of fused patches, over blocks and r, and by criteria (paper, Figures 2 and 8).

Axes: B images, 3 H W.
"""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn

from ...analysis.reproduction.criteria import ALL, options_of
from ...analysis.reproduction.experiment import Experiment, Result, Subject, Task
from ...analysis.reproduction.studies import R
from ...api import fuse, fused_stack
from ...models.sharing import copy_sharing_weights
from ...tracing import trace
from ..inputs import seen_image
from ..pictures import fused_picture
from .drawing import grid_of, no_grid, save, scale_of

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
