"""One file a library. `find_host` gives the one that knows a model, or says why none does."""

from torch import nn

from ..errors import MctfError
from .base import Architecture, Host

__all__ = ["Architecture", "Host", "find_host"]


def find_host(model: nn.Module) -> Host:
    """The host of a model, every check done; raises MctfError with the module's name and the cure."""
    if any(cls.__module__.startswith("timm.") for cls in type(model).__mro__):
        from .timm_vit import TimmViT

        return TimmViT.of(model)
    raise MctfError(f"{type(model).__name__} is no supported Vision Transformer{_hint(model)}")


def _hint(model: nn.Module) -> str:
    """Where inside a wrapper a timm model sits."""
    for name, module in model.named_modules():
        if name and type(module).__module__ == "timm.models.vision_transformer" and hasattr(module, "blocks"):
            return f": fuse the one inside it, mctf.fuse(model.{name})"
    return ": pass a timm VisionTransformer (DeiT, DINOv2, CLIP, SigLIP, …)"
