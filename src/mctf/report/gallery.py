"""From a fused model and some images to a sheet: each image, and what its patches became in chosen blocks."""

from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import nn

from ..api import fused_stack
from ..core.schedule import fast_blocks
from ..errors import MctfError
from ..tracing import Trace, trace
from .inputs import Preparation
from .pictures import fused_picture, patch_grid
from .sheet import Panel, make_sheet


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
    images: Sequence[Image.Image],
    *,
    blocks: Sequence[int],
    scale: int = 3,
    after_image: Callable[[], object] = lambda: None,
) -> Image.Image:
    """A sheet with one row an image: the crop the model sees, then its fused patches after each of the blocks."""
    preparation = Preparation.of(model)
    device = next(model.parameters()).device
    rows = []
    for image in images:
        tensor = preparation.tensor(image)
        with torch.inference_mode(), trace(model) as traced:
            model(tensor[None].to(device))
        prefix = fused_stack(model).host.protected
        rows.append(_row(preparation.picture(tensor), traced, blocks=blocks, prefix=prefix, scale=scale))
        after_image()
    return make_sheet(rows)


def _row(image: Image.Image, traced: Trace, *, blocks: Sequence[int], prefix: int, scale: int) -> list[Panel]:
    tokens = traced.source_map().shape[1]
    grid = patch_grid(tokens - prefix, height=image.height, width=image.width)
    large = image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS)
    panels = [Panel(large, f"input: {tokens} tokens")]
    for block in blocks:
        slots = traced.source_map(block)[0, prefix:].cpu().numpy()
        caption = f"block {block}: {traced.token_counts[block]} tokens"
        panels.append(Panel(fused_picture(image, slots, grid=grid, scale=scale), caption))
    return panels
