"""From a fused model and its inputs to a sheet: each image, and what its patches became in chosen blocks.

Axes: B images, 3 H W; N tokens.
"""

import math
from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import Tensor, nn

from ..api import fused_stack
from ..core.schedule import fast_blocks
from ..data import Preprocessing
from ..errors import MctfError
from ..tracing import Trace, trace
from ..wording import counted
from .inputs import seen_image
from .pictures import fused_picture, patch_grid
from .sheet import Panel, make_sheet

_SCALE = 3
_SIDE = 448  # pixels of a picture's shorter side below which patches of small images are hard to tell apart
_LEGEND = "striped grey: dropped, seen by no later block"


def choose_blocks(blocks: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    """The blocks to show, checked; by default those at a quarter, half and three quarters, and the last."""
    if blocks is None:
        return tuple(sorted({*fast_blocks(depth), depth - 1}))
    for block in blocks:
        if not 0 <= block < depth:
            raise MctfError(f"there is no block {block} to show: the model has blocks 0 to {depth - 1}")
    return tuple(blocks)


def gallery(
    model: nn.Module,
    inputs: Sequence[Tensor],
    preprocessing: Preprocessing,
    *,
    blocks: Sequence[int],
    scale: int | None = None,
    after_image: Callable[[], object] = lambda: None,
) -> Image.Image:
    """A sheet with one row an input (3 H W): the crop the model sees, then its patches after each of the blocks.

    Where patches were dropped rather than fused, captions count them and a legend says how they are drawn.
    scale: pixels of a picture a pixel of the image; by default 3, and more where that leaves a picture small.
    """
    scale = scale or max(_SCALE, math.ceil(_SIDE / min(preprocessing.image_size)))
    prefix = fused_stack(model).host.protected
    weight = next(model.parameters())
    rows, any_dropped = [], False
    for tensor in inputs:
        with torch.inference_mode(), trace(model) as traced:
            model(tensor[None].to(weight.device, weight.dtype))
        rows.append(_row(seen_image(tensor, preprocessing), traced, blocks=blocks, prefix=prefix, scale=scale))
        any_dropped |= any(bool(traced.dropped(block).any()) for block in blocks)
        after_image()
    return make_sheet(rows, legend=_LEGEND if any_dropped else "")


def _row(image: Image.Image, traced: Trace, *, blocks: Sequence[int], prefix: int, scale: int) -> list[Panel]:
    tokens = traced.source_map().shape[1]
    grid = patch_grid(tokens - prefix, height=image.height, width=image.width)
    large = image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS)
    panels = [Panel(large, f"input: {counted(tokens, 'token')}")]
    for block in blocks:
        slots, dropped = (each[0, prefix:].cpu().numpy() for each in (traced.source_map(block), traced.dropped(block)))
        caption = f"block {block}: {counted(traced.token_counts[block], 'token')}"
        caption += f", {dropped.sum()} dropped" if dropped.any() else ""
        panels.append(Panel(fused_picture(image, slots, grid=grid, dropped=dropped, scale=scale), caption))
    return panels
