"""One file a family of models. `find_host` gives the one that knows a model, or says why none does."""

from importlib import import_module

from torch import nn

from ..errors import MctfError
from .base import Architecture, Host
from .hf_towers import holds_tower
from .refused import reason_against

__all__ = ["Architecture", "Host", "find_host"]

# Class of a model, by module and name so that nothing is imported -> file and class of its host.
# A model of a subclass is found too; the nearest class in its line of ancestors decides.
_HOSTS = {
    ("timm.models.vision_transformer", "VisionTransformer"): ("timm_vit", "TimmViT"),
    ("timm.models.eva", "Eva"): ("timm_eva", "TimmEva"),
    ("timm.models.beit", "Beit"): ("timm_beit", "TimmBeit"),
    ("timm.models.cait", "Cait"): ("timm_cait", "TimmCait"),
    ("timm.models.vision_transformer_relpos", "VisionTransformerRelPos"): ("timm_relpos", "TimmRelPos"),
    ("timm.models.naflexvit", "NaFlexVit"): ("timm_naflex", "TimmNaFlex"),
    ("mctf.models.hf_images", "ImageModel"): ("hf", "HFVision"),
}


def find_host(model: nn.Module) -> Host:
    """The host of a model, every check done; raises MctfError with the module's name and the cure."""
    if not isinstance(model, nn.Module):
        raise MctfError(f"expected a torch.nn.Module, got {type(model).__name__}")
    place = _host_of(model)
    if place is None:
        raise MctfError(f"{type(model).__name__} {_refusal(model)}")
    file, name = place
    return getattr(import_module(f".{file}", __name__), name).of(model)


def _host_of(module: nn.Module) -> tuple[str, str] | None:
    ancestors = [(cls.__module__, cls.__name__) for cls in type(module).__mro__]
    known = next((_HOSTS[cls] for cls in ancestors if cls in _HOSTS), None)
    return ("hf", "HFVision") if known is None and holds_tower(module) else known


def _refusal(model: nn.Module) -> str:
    """Why the model is refused, or where inside it a supported one sits."""
    for name, module in model.named_modules():
        if _host_of(module) is not None:
            plain = all(part.isidentifier() for part in name.split("."))
            inside = f"model.{name}" if plain else f"model.get_submodule({name!r})"
            return f"is no model that mctf knows: fuse the one inside it, mctf.fuse({inside})"
    reason = next(filter(None, map(reason_against, model.modules())), None)
    known = "pass a Vision Transformer with global attention (DeiT, DINOv2, CLIP, SigLIP, EVA-02, BEiT, …)"
    if reason is not None:
        return f"cannot be fused, {reason}: {known}"
    return f"is no model that mctf knows: {known}"
