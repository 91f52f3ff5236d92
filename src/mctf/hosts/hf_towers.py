"""Where the vision tower of a transformers model is, told by class names: nothing here imports transformers."""

from typing import Any

from torch import nn

from ..errors import MctfError

# The classes that embed images and run the layers; around them are heads, or a text tower beside.
TOWERS = frozenset(
    [
        *("ViTModel", "DeiTModel", "ViTMAEModel", "BeitModel", "BeitBackbone"),
        *("Dinov2Model", "Dinov2Backbone", "Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
        *("DINOv3ViTModel", "DINOv3ViTBackbone"),
        *("CLIPVisionModel", "SiglipVisionModel", "Siglip2VisionModel"),
        *("CLIPVisionTransformer", "SiglipVisionTransformer", "Siglip2VisionTransformer"),  # before version 5.8
    ]
)
LAYERS = frozenset(
    [
        *("ViTLayer", "DeiTLayer", "ViTMAELayer", "BeitLayer", "Dinov2Layer", "Dinov2WithRegistersLayer"),
        *("DINOv3ViTLayer", "CLIPEncoderLayer", "SiglipEncoderLayer", "Siglip2EncoderLayer"),
    ]
)
_CONTAINERS = ("layers", "encoder.layer", "encoder.layers", "model.layer", "layer")
FAMILIES = "ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, ViTMAE"


def holds_tower(module: nn.Module) -> bool:
    """Whether this is a model of transformers that sees by a tower we know, or such a tower itself."""
    ours = _is_a(module, "transformers.modeling_utils", {"PreTrainedModel"}) or is_tower(module)
    return ours and any(map(is_tower, module.modules()))


def is_tower(module: nn.Module) -> bool:
    return _is_a(module, "transformers.models.", TOWERS) and container_name(module) != ""


def is_layer(module: nn.Module) -> bool:
    """A layer of exactly a known class: a subclass may compute something else."""
    return type(module).__module__.startswith("transformers.models.") and type(module).__name__ in LAYERS


def _is_a(module: nn.Module, home: str, names: "set[str] | frozenset[str]") -> bool:
    return any(cls.__module__.startswith(home) and cls.__name__ in names for cls in type(module).__mro__)


def container_name(tower: nn.Module) -> str:
    """Where a tower keeps its layers; "" for a class that only wraps the real tower."""
    return next((name for name in _CONTAINERS if _has_module(tower, name)), "")


def _has_module(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def find_tower(model: nn.Module) -> tuple[str, Any]:
    """The one vision tower in a model that has any, and its name there ("" for the model itself)."""
    towers = [(name, module) for name, module in model.named_modules() if is_tower(module)]
    if len(towers) > 1:
        names = [name for name, _ in towers]
        raise MctfError(
            f"{type(model).__name__} has several vision towers ({', '.join(names)}): "
            f"fuse one of them, as in mctf.fuse(model.{names[0]})"
        )
    return towers[0]
