"""One file a family of models. `find_host` gives the one that knows a model, or says why none does.

All that a host of one's own needs is imported from here; docs/adding_a_host.md is the guide.
"""

from collections.abc import Callable
from importlib import import_module

from torch import nn

from ..core.flops import BlockShape
from ..core.positions import TokenPositions
from ..errors import MctfError
from ..methods.base import BlockOps
from ..stack import FusedStack
from ._inspect import check_model, check_whole, macs_per_token, part_of, run_on_shapes
from .base import Architecture, Host, SoftmaxAttention, refuse_arguments
from .hf_layers import holds_tower
from .unsupported import reason_against

__all__ = [
    "Architecture",
    "BlockOps",
    "BlockShape",
    "FusedStack",
    "Host",
    "SoftmaxAttention",
    "TokenPositions",
    "check_whole",
    "find_host",
    "macs_per_token",
    "part_of",
    "refuse_arguments",
    "register_host",
    "run_on_shapes",
]

HostFactory = Callable[[nn.Module], Host]

# Class of a model, by module and name so that nothing is imported -> file and class of its host.
# A model of a subclass is found too; the nearest class in its line of ancestors decides.
_HOSTS = {
    ("timm.models.vision_transformer", "VisionTransformer"): ("timm_vit", "TimmViT"),
    ("timm.models.eva", "Eva"): ("timm_eva", "TimmEva"),
    ("timm.models.beit", "Beit"): ("timm_relpos", "TimmBeit"),
    ("timm.models.cait", "Cait"): ("timm_cait", "TimmCait"),
    ("timm.models.vision_transformer_relpos", "VisionTransformerRelPos"): ("timm_relpos", "TimmRelPos"),
    ("timm.models.naflexvit", "NaFlexVit"): ("timm_naflex", "TimmNaFlex"),
    ("mctf.models.hf_images", "ImageModel"): ("hf", "HFVision"),
}
_REGISTERED: dict[type[nn.Module], HostFactory] = {}


def register_host(model_class: type[nn.Module], host: HostFactory) -> None:
    """Have models of a class, and of its subclasses, fused by a host of your own.

    host: called with the model whenever mctf needs its host; a class that takes the model does. It comes before mctf's
        own host for the same class, and the last one registered counts.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise MctfError(f"expected a class of models, a subclass of torch.nn.Module, got {model_class!r}")
    if not callable(host):
        raise MctfError(f"expected a function or class that takes a model and gives its host, got {host!r}")
    _REGISTERED[model_class] = host


def find_host(model: nn.Module) -> Host:
    """The host of a model, every check done; raises MctfError with the module's name and the cure."""
    check_model(model)
    factory = _factory_of(model)
    if factory is None:
        raise MctfError(f"{type(model).__name__} {_refusal(model)}")
    return factory(model)


def _factory_of(module: nn.Module) -> HostFactory | None:
    for cls in type(module).__mro__:
        if cls in _REGISTERED:
            return _REGISTERED[cls]
        if (cls.__module__, cls.__name__) in _HOSTS:
            return _own_host(*_HOSTS[cls.__module__, cls.__name__])
    return _own_host("hf", "HFVision") if holds_tower(module) else None


def _own_host(file: str, name: str) -> HostFactory:
    return lambda model: getattr(import_module(f".{file}", __name__), name).of(model)


def _refusal(model: nn.Module) -> str:
    """Why the model is refused, or where inside it a supported one sits."""
    for name, module in model.named_modules():
        if _factory_of(module) is not None:
            plain = all(part.isidentifier() for part in name.split("."))
            inside = f"model.{name}" if plain else f"model.get_submodule({name!r})"
            return f"is no model that mctf knows: fuse the one inside it, mctf.fuse({inside})"
    reason = next(filter(None, map(reason_against, model.modules())), None)
    known = "pass a Vision Transformer with global attention (DeiT, DINOv2, CLIP, SigLIP, EVA-02, BEiT, …)"
    if reason is not None:
        return f"cannot be fused, {reason}: {known}"
    return f"is no model that mctf knows: {known}, or give it a host of your own by mctf.register_host"
