"""Vision towers of transformers: ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP and ViTMAE encoders.

A model of transformers iterates over its layers and reads every token afterwards, so tokens are spread back for it.
The tower is fused inside whatever model holds it; text towers, heads and decoders stay as they are.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.flops import NORM, BlockShape
from ..core.positions import TokenPositions
from ..errors import MctfError
from ..stack import FusedStack
from ._inspect import macs_per_token, run_on_shapes
from .base import Architecture, Host
from .hf_layers import check_layer, container_name, find_tower, parts_of
from .hf_ops import BiasedLayerOps, LayerOps, PlacedLayerOps, RotaryLayerOps
from .hf_patch import BoundLayer, CallCheck, LayerForward, RefusedSaving, parameter_names, refuse_saving_around
from .patch_embed import MatmulPatchEmbed, is_patch_convolution

if TYPE_CHECKING:
    pass


_OPS: dict[str, type[LayerOps]] = {"DINOv3ViTLayer": RotaryLayerOps, "BeitLayer": BiasedLayerOps}
_HARMLESS = frozenset(["output_hidden_states", "return_dict", "use_cache"])  # say nothing about tokens
_NOT_AROUND = ("output_attentions",)  # a model around the tower may take the mask of a text
_NOT_IN_TOWER = ("output_attentions", "attention_mask", "head_mask")


@dataclass(eq=False)
class HFVision(Host):
    """One vision tower, alone or inside a larger model.

    model: what was fused. tower: the part of it that embeds images and runs the layers; name: its name in there.
    layer: the class of its layers; layer_arguments: names of what they take beside the tokens.
    """

    model: nn.Module
    tower: Any
    name: str
    layer: type[nn.Module]
    layer_arguments: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "HFVision":
        """The host of this model; refuses what it would get wrong."""
        name, tower = find_tower(model)
        layers = tower.get_submodule(container_name(tower))
        for index, layer in layers.named_children():
            check_layer(".".join(filter(None, (name, container_name(tower), index))), layer)
        kind = type(next(layers.children()))
        return cls(model, tower, name, kind, parameter_names(kind.forward)[2:])

    @property
    def container(self) -> nn.Module:
        return self.tower.get_submodule(container_name(self.tower))

    def install(self, stack: FusedStack) -> None:
        """Put the fused stack in the position of the layers and have the layers hand their calls to it."""
        self._replace_container(stack)
        stack.bound_block = BoundLayer
        stack.register_state_dict_pre_hook(refuse_saving_around)
        for layer in stack.children():
            layer.forward = LayerForward(layer, in_tuple=self.in_tuple)
        for part in self._models():
            CallCheck.hang_on(part, refused=_NOT_IN_TOWER if part is self.tower else _NOT_AROUND)
            for name in filter(partial(hasattr, part), RefusedSaving.names):
                setattr(part, name, RefusedSaving())
        for owner, name, projection in self._projections():
            if is_patch_convolution(projection):
                setattr(owner, name, MatmulPatchEmbed.of(projection, stack.fuses))

    def uninstall(self, stack: FusedStack) -> None:
        """Undo `install`."""
        self._replace_container(stack.restored())
        for layer in stack.children():
            vars(layer).pop("forward", None)
        for part in self._models():
            CallCheck.take_off(part)
            for name in RefusedSaving.names:
                vars(part).pop(name, None)
        for owner, name, projection in self._projections():
            if isinstance(projection, MatmulPatchEmbed):
                setattr(owner, name, projection.restored())

    def _replace_container(self, container: nn.Module) -> None:
        owner, _, name = container_name(self.tower).rpartition(".")
        setattr(self.tower.get_submodule(owner), name, container)

    def _models(self) -> list[Any]:
        """The tower and the models that hold it, up to the one that was fused: transformers gives each a config."""
        names = self.name.split(".") if self.name else []
        line = [self.model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
        return [part for part in line if hasattr(part, "config")]

    def _projections(self) -> list[tuple[nn.Module, str, nn.Conv2d]]:
        """The convolutions that embed patches, each with its owner and its name there."""
        return [
            (owner, name, part)
            for owner in self.tower.embeddings.modules()
            for name, part in owner.named_children()
            if isinstance(part, nn.Conv2d)
        ]

    @property
    def in_tuple(self) -> bool:
        """Whether this version's layers return a tuple: those that can return their attention do."""
        return "output_attentions" in self.layer_arguments

    @property
    def image_size(self) -> tuple[int, int]:
        prepared = getattr(self.model, "pretrained_cfg", {}).get("input_size")
        if prepared is not None:  # DINOv2 was made for larger images than its users prepare
            return prepared[1], prepared[2]
        config = self.tower.config
        size = getattr(config, "image_size", None)
        if size is None:  # SigLIP 2 takes patches of any grid; its positions are those of a square one
            size = int(config.num_patches**0.5) * config.patch_size
        height, width = (size, size) if isinstance(size, int) else size
        return height, width

    @property
    def class_token(self) -> bool:
        return any(hasattr(self.tower.embeddings, name) for name in ("cls_token", "class_embedding"))

    @property
    def protected(self) -> int:
        embeddings = self.tower.embeddings
        registers = getattr(embeddings, "register_tokens", None)
        more = int(hasattr(embeddings, "distillation_token")) + (0 if registers is None else registers.shape[1])
        return int(self.class_token) + more

    @property
    def uses_positions(self) -> bool:
        return issubclass(self._ops, PlacedLayerOps)

    @property
    def _ops(self) -> type[LayerOps]:
        return _OPS.get(self.layer.__name__, LayerOps)

    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """What transformers calls a layer with, by name."""
        given = dict(zip(self.layer_arguments, args, strict=False)) | kwargs
        for name, value in given.items():
            if value is not None and value is not False and name not in _HARMLESS | self._ops.follows:
                raise MctfError(
                    f"a fused model takes no {name}, as it speaks of tokens that may have been fused: "
                    "leave it out, or run mctf.unfuse(model)"
                )
        return given

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> LayerOps:
        return self._ops(block, arguments, positions, prefix=self.protected)

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        return architecture(self, image_size or self.image_size)


# MERGED from mctf.hosts.hf:
# What a transformers model costs: the layers by their shapes, all around them counted on the meta device.
#
# Heads and decoders of transformers are many, so nothing is assumed of them: the model runs once on a copy without
# memory whose layers pass tokens on as they are.


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
