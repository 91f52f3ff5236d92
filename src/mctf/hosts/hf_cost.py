"""What a transformers model costs: the layers by their shapes, all around them counted on the meta device.

Heads and decoders of transformers are many, so nothing is assumed of them: the model runs once on a copy without
memory whose layers pass tokens on as they are.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.cost import NORM, BlockShape
from ..errors import MctfError
from .base import Architecture
from .common import macs_per_token, run_on_shapes
from .hf_calls import parameter_names
from .hf_layers import parts_of

if TYPE_CHECKING:
    from .hf import HFVision


def architecture(host: "HFVision", image_size: tuple[int, int]) -> Architecture:
    """The cost of the whole model where it takes images alone, else of its vision tower."""
    tokens, around = _run_around(host, image_size)
    return Architecture(
        name=type(host.model).__name__,
        tokens=tokens,
        protected=host.protected,
        blocks=tuple(_block_shape(layer) for layer in host.container.children()),
        stem=around,
        head=0,  # what follows the layers reads every token and does not depend on the fusion
        head_per_token=0,
        reads_every_token=True,
    )


def _block_shape(layer: nn.Module) -> BlockShape:
    parts = parts_of(layer)
    modules = [step for step in parts.mlp if isinstance(step, nn.Module)]
    return BlockShape(
        channels=parts.config.hidden_size,
        attention=parts.heads * parts.head_size,
        heads=parts.heads,
        mlp=macs_per_token(*modules),
        norms=macs_per_token(parts.norm1) // NORM,
    )


def _run_around(host: "HFVision", image_size: tuple[int, int]) -> tuple[int, int]:
    """Tokens entering the first layer, and the multiply-adds before and after the layers."""
    model: Any = host.model if getattr(host.model, "main_input_name", None) == "pixel_values" else host.tower
    seen: list[int] = []
    given = _inputs(model, host, image_size)
    try:
        _, around = run_on_shapes(_without_memory(model, host, seen), lambda empty: empty(**given))
    except (ValueError, RuntimeError) as refusal:
        height, width = image_size
        raise MctfError(f"the model does not take {height}x{width} images: {refusal}") from None
    return seen[0], around


def _inputs(model: Any, host: "HFVision", image_size: tuple[int, int]) -> dict[str, Any]:
    config, known = host.tower.config, parameter_names(type(model).forward)
    height, width = image_size
    pixels = torch.empty(1, getattr(config, "num_channels", 3), height, width, device="meta")
    if "spatial_shapes" in known:  # SigLIP 2 takes the pixels of patches, and the grid they are from
        rows, columns = height // config.patch_size, width // config.patch_size
        patches = pixels.new_empty(1, rows * columns, pixels.shape[1] * config.patch_size**2)
        grid = torch.tensor([[rows, columns]])
        return {"pixel_values": patches, "pixel_attention_mask": None, "spatial_shapes": grid}
    interpolates = image_size != host.image_size and "interpolate_pos_encoding" in known
    return {"pixel_values": pixels} | ({"interpolate_pos_encoding": True} if interpolates else {})


def _without_memory(model: nn.Module, host: "HFVision", seen: list[int]) -> nn.Module:
    """A copy on the meta device whose layers only note how many tokens come."""
    tensors = [*model.parameters(), *model.buffers()]
    known: dict[int, Any] = {id(tensor): _empty(tensor) for tensor in tensors}
    probes = [_probe(host, seen) for _ in range(host.depth)]
    known[id(host.container)] = nn.ModuleList(probes)
    if hasattr(host.tower, "rope_embeddings"):
        known[id(host.tower.rope_embeddings)] = _NoPositions()  # they cost nothing, and autocast knows no meta device
    empty = copy.deepcopy(model, known)
    for module in empty.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)  # the probes have none yet
    return empty


def _empty(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _probe(host: "HFVision", seen: list[int]) -> nn.Module:
    """Looks like a layer to those who ask for its class."""
    probe = host.layer.__new__(host.layer)
    nn.Module.__init__(probe)
    probe.forward = _noting(seen, in_tuple=host.in_tuple)
    return probe


class _NoPositions(nn.Module):
    def forward(self, pixels: Tensor) -> None:
        return None


def _noting(seen: list[int], *, in_tuple: bool) -> Callable[..., Any]:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(x.shape[1])
        return (x,) if in_tuple else x

    return forward
