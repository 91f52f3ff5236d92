"""One file a library. `find_host` gives the one that knows a model, or says why none does."""

from torch import nn

from ..errors import MctfError
from .base import Architecture, Host

__all__ = ["Architecture", "Host", "find_host"]


def find_host(model: nn.Module) -> Host:
    """The host of a model, every check done; raises MctfError with the module's name and the cure."""
    if not isinstance(model, nn.Module):
        raise MctfError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if _is_timm_vit(model):
        from .timm_vit import TimmViT

        return TimmViT.of(model)
    raise MctfError(f"{type(model).__name__} is not built on timm's VisionTransformer: {_cure(model)}")


def _is_timm_vit(module: nn.Module) -> bool:
    names = [(cls.__module__, cls.__name__) for cls in type(module).__mro__]  # asks without importing timm
    return ("timm.models.vision_transformer", "VisionTransformer") in names


def _cure(model: nn.Module) -> str:
    """Where inside a wrapper a supported model sits, or what to pass instead."""
    for name, module in model.named_modules():
        if _is_timm_vit(module):
            plain = all(part.isidentifier() for part in name.split("."))
            inside = f"model.{name}" if plain else f"model.get_submodule({name!r})"
            return f"fuse the one inside it, mctf.fuse({inside})"
    return "pass a model that is (DeiT, DINOv2, CLIP, SigLIP, …)"
