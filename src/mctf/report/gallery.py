"""From a fused model and its inputs to a sheet: each image, and what its patches became in chosen blocks.

Axes: B images, 3 H W; N tokens.
"""

from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import Tensor, nn

from ..api import fused_stack
from ..core.schedule import fast_blocks
from ..data import Preprocessing
from ..errors import MctfError
from ..tracing import Trace, trace
from .inputs import seen_image
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
    inputs: Sequence[Tensor],
    preprocessing: Preprocessing,
    *,
    blocks: Sequence[int],
    scale: int = 3,
    after_image: Callable[[], object] = lambda: None,
) -> Image.Image:
    """A sheet with one row an input (3 H W): the crop the model sees, then its patches after each of the blocks."""
    prefix = fused_stack(model).host.protected
    weight = next(model.parameters())
    rows = []
    for tensor in inputs:
        with torch.inference_mode(), trace(model) as traced:
            model(tensor[None].to(weight.device, weight.dtype))
        rows.append(_row(seen_image(tensor, preprocessing), traced, blocks=blocks, prefix=prefix, scale=scale))
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
