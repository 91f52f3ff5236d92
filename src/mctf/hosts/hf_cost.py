"""The cost of towers of transformers: of their layers by their shapes, of the rest by a run on the meta device."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..core.flops import NORM, BlockShape
from ..errors import MctfError
from ._inspect import count_on_meta, macs_per_token
from .hf_layers import parts_of
from .hf_patch import parameter_names

_INPUTS = ("pixel_values", "input_values")  # of images and videos; of spectrograms
_BESIDE = {"input_ids", "decoder_input_ids", "patch_attention_mask"}  # words; the mask of Idefics3
_OPTIONAL = {"pixel_attention_mask", "spatial_shapes", "dataset_index"}  # required by name, and provided here
_ROTARY = ("rope_embeddings", "patch_positional_embedding")
_QWEN_PATCHES = 32  # per side: its towers name no size


def default_size(config: Any) -> tuple[int, int]:
    """Height and width of the images that a tower with this config expects; of a spectrogram, time and frequency."""
    size = getattr(config, "image_size", None)
    if hasattr(config, "num_mel_bins"):
        size = (config.max_length, config.num_mel_bins)
    elif hasattr(config, "num_position_embeddings"):
        size = int(config.num_position_embeddings**0.5) * config.patch_size
    elif size is None and hasattr(config, "num_patches"):  # SigLIP 2 takes any grid; its positions are of a square one
        size = int(config.num_patches**0.5) * config.patch_size
    size = size or _QWEN_PATCHES * config.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def layer_shape(layer: nn.Module) -> BlockShape:
    """The shapes that determine the cost of a layer."""
    parts = parts_of(layer)
    modules = [step for step in parts.mlp if isinstance(step, nn.Module)]
    return BlockShape(
        channels=parts.norm1.weight.numel(),
        attention=parts.heads * parts.head_size,
        heads=parts.heads,
        mlp=macs_per_token(*modules),
        norms=macs_per_token(parts.norm1) // NORM,
    )


def cost_around_layers(
    model: Any, tower: Any, container: nn.Module, size: tuple[int, int], *, in_tuple: bool
) -> tuple[int, int]:
    """Tokens of one image, and the multiply-adds outside of the layers.

    Of the whole model where it takes images alone, else of its tower. Heads and decoders are many, so the model runs
    once on the meta device, with layers that return their tokens unchanged.
    """
    if not _takes_images_alone(model) or _BESIDE & set(parameter_names(type(tower).forward)):
        model = tower
    if not _takes_images_alone(model):
        return _counted_by_parts(tower, size)
    token_counts: list[int] = []
    empty = _copy_on_meta(model, tower, container, token_counts, in_tuple=in_tuple)
    inputs = _meta_inputs(model, tower.config, size)
    try:
        _, around = count_on_meta(empty, lambda empty: empty(**inputs))
    except (ValueError, RuntimeError) as refusal:
        raise MctfError(f"the model does not take {size[0]}x{size[1]} images: {refusal}") from None
    return token_counts[0], around


def _takes_images_alone(model: Any) -> bool:
    parameters = inspect.signature(type(model).forward).parameters
    if getattr(model, "main_input_name", None) not in _INPUTS or _BESIDE & set(parameters):
        return False
    required = {each.name for each in list(parameters.values())[1:] if each.default is each.empty}
    required -= {each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD}
    return required <= {*_INPUTS, *_OPTIONAL}


def _counted_by_parts(tower: Any, size: tuple[int, int]) -> tuple[int, int]:
    """For towers that read their masks and grids as numbers (Idefics3, Qwen), which the meta device lacks."""
    config = tower.config
    tokens = (size[0] // config.patch_size) * (size[1] // config.patch_size)
    embed = next(part for part in tower.modules() if hasattr(part, "kernel_size"))
    around = tokens * (embed.weight.numel() + macs_per_token(getattr(tower, "post_layernorm", None)))
    merge = getattr(config, "spatial_merge_size", 1) ** 2
    for merger in (getattr(tower, "merger", None), *getattr(tower, "deepstack_merger_list", ())):
        for part in () if merger is None else merger.modules():
            norm = isinstance(part, nn.LayerNorm)  # over the channels of a token, or of all that are merged
            per_token = norm and part.normalized_shape[0] == _width(tower)
            own = macs_per_token(part) if isinstance(part, (nn.Linear, nn.LayerNorm)) else 0
            around += own * (tokens if per_token else tokens // merge)
    return tokens, around


def _width(tower: Any) -> int:
    """Channels of a token."""
    return getattr(tower.config, "embed_dim", tower.config.hidden_size)


def _meta_inputs(model: Any, config: Any, size: tuple[int, int]) -> dict[str, Any]:
    height, width = size
    parameters = parameter_names(type(model).forward)
    if "input_values" in parameters:
        return {"input_values": torch.empty(1, height, width, dtype=torch.float32, device="meta")}
    pixels = torch.empty(1, getattr(config, "num_channels", 3), height, width, dtype=torch.float32, device="meta")
    if "spatial_shapes" in parameters:  # SigLIP 2 takes the pixels of patches and their grid
        rows, columns = height // config.patch_size, width // config.patch_size
        patches = pixels.new_empty(1, rows * columns, pixels.shape[1] * config.patch_size**2)
        grid = torch.tensor([[rows, columns]])
        return {"pixel_values": patches, "pixel_attention_mask": None, "spatial_shapes": grid}
    if hasattr(config, "num_frames"):
        pixels = pixels[:, None].expand(-1, config.num_frames, -1, -1, -1)
    interpolates = size != default_size(config) and "interpolate_pos_encoding" in parameters
    return {"pixel_values": pixels} | ({"interpolate_pos_encoding": True} if interpolates else {})


def _copy_on_meta(
    model: nn.Module, tower: Any, container: nn.Module, token_counts: list[int], *, in_tuple: bool
) -> nn.Module:
    """A copy on the meta device whose layers append the number of their tokens and return them unchanged."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        token_counts.append(x.shape[1])
        return (x,) if in_tuple else x

    layers = []
    for own in container.children():  # transformers checks the class
        layer = own.__class__.__new__(own.__class__)
        nn.Module.__init__(layer)
        layer.forward = forward
        layers.append(layer)
    memo: dict[int, Any] = {id(tensor): _empty(tensor) for tensor in (*model.parameters(), *model.buffers())}
    memo[id(container)] = nn.ModuleList(layers)
    for name in _ROTARY:  # free of multiply-adds; autocast rejects the meta device
        if hasattr(tower, name):
            memo[id(getattr(tower, name))] = _NoPositions()
    empty = copy.deepcopy(model, memo)
    for module in empty.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)  # the new layers have no hooks yet
    return empty


def _empty(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class _NoPositions(nn.Module):
    def forward(self, *_: Tensor) -> None:
        return None
