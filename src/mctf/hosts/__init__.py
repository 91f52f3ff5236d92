"""Supported models: one host class per family, in one file per family. `find_host` returns the host of a model.

Everything that a host of your own needs is imported from here; docs/adding_a_host.md is the guide.
"""

from collections.abc import Callable
from importlib import import_module

from torch import nn

from .._utils import first_line
from ..core.flops import BlockShape
from ..core.positions import TokenPositions
from ..core.sequences import SequenceGroup, Sequences, packed_sequences, padded_sequences, real_tokens
from ..errors import MctfError, shown
from ..methods.base import BlockOps
from ..stack import FusedStack
from ._inspect import check_model, check_whole, count_on_meta, linear_slice, macs_per_token
from .base import Architecture, Host, SoftmaxAttention, refuse_arguments
from .hf import holds_tower
from .unsupported import explain_refusal

__all__ = [
    "Architecture",
    "BlockOps",
    "BlockShape",
    "FusedStack",
    "Host",
    "SequenceGroup",
    "Sequences",
    "SoftmaxAttention",
    "TokenPositions",
    "check_whole",
    "count_on_meta",
    "find_host",
    "linear_slice",
    "macs_per_token",
    "packed_sequences",
    "padded_sequences",
    "real_tokens",
    "refuse_arguments",
    "register_host",
]

HostFactory = Callable[[nn.Module], Host]

# Class of a model, by module and name so that no library is imported -> file and class of its host.
# Subclasses are included; the nearest class in the method resolution order decides.
_HOSTS = {
    ("timm.models.vision_transformer", "VisionTransformer"): ("timm_vit", "TimmViT"),
    ("timm.models.eva", "Eva"): ("timm_eva", "TimmEva"),
    ("timm.models.beit", "Beit"): ("timm_relpos", "TimmBeit"),
    ("timm.models.cait", "Cait"): ("timm_cait", "TimmCait"),
    ("timm.models.vision_transformer_relpos", "VisionTransformerRelPos"): ("timm_relpos", "TimmRelPos"),
    ("timm.models.naflexvit", "NaFlexVit"): ("timm_naflex", "TimmNaFlex"),
    ("mctf.models.hf_images", "ImageModel"): ("hf", "HFVision"),
    ("mctf.models.open_clip_images", "OpenClipImages"): ("open_clip", "OpenClipViT"),
    ("open_clip.transformer", "VisionTransformer"): ("open_clip", "OpenClipViT"),
}
_OPEN_CLIP = ("open_clip.model", "open_clip.coca_model")  # of the models around a VisionTransformer, their `visual`
_REGISTERED: dict[type[nn.Module], HostFactory] = {}


def register_host(model_class: type[nn.Module], host: HostFactory) -> None:
    """Use a host of your own for models of a class and of its subclasses.

    host: called with the model, usually a class derived from `Host`. It takes precedence over mctf's own host for the
        same class; a later registration replaces an earlier one.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise MctfError(f"expected a class of models, a subclass of torch.nn.Module, got {shown(model_class)}")
    if not callable(host):
        raise MctfError(f"expected a function or class that takes a model and returns its host, got {shown(host)}")
    _REGISTERED[model_class] = host


def find_host(model: nn.Module) -> Host:
    """The host of a model, with every check done; raises MctfError with the module's name and the cure."""
    check_model(model)
    factory = _factory_of(model)
    if factory is None:
        supported = (name for name, module in model.named_modules() if _factory_of(module) is not None)
        raise MctfError(explain_refusal(model, inside=next(supported, None)))
    try:
        return factory(model)
    except (AttributeError, TypeError) as failure:  # a part is gone or was replaced
        raise MctfError(
            f"{type(model).__name__} lacks parts that its class has ({first_line(failure)}): pass the model as its "
            "library creates it"
        ) from None


def _factory_of(module: nn.Module) -> HostFactory | None:
    for cls in type(module).__mro__:
        if cls in _REGISTERED:
            return _registered_host(cls)
        if (cls.__module__, cls.__name__) in _HOSTS:
            return _own_host(*_HOSTS[cls.__module__, cls.__name__])
        if cls.__module__ in _OPEN_CLIP and _is_open_clip_vit(getattr(module, "visual", None)):
            return _own_host("open_clip", "OpenClipViT")
    return _own_host("hf", "HFVision") if holds_tower(module) else None


def _is_open_clip_vit(module: object) -> bool:
    return any(
        (cls.__module__, cls.__name__) == ("open_clip.transformer", "VisionTransformer") for cls in type(module).__mro__
    )


def _registered_host(cls: type[nn.Module]) -> HostFactory:
    """The user's host for a class; raises MctfError that names it where it fails or gives something else."""
    factory = _REGISTERED[cls]

    def make(model: nn.Module) -> Host:
        try:
            host = factory(model)
        except MctfError:
            raise
        except Exception as failure:
            kind = type(failure).__name__
            raise MctfError(
                f"the host registered for {cls.__name__}, {shown(factory)}, fails ({kind}: {first_line(failure)}): "
                "register one that takes the model"
            ) from failure
        if not isinstance(host, Host):
            raise MctfError(
                f"the host registered for {cls.__name__}, {shown(factory)}, gives {shown(host)}: register one that "
                "returns a mctf.hosts.Host"
            )
        return host

    return make


def _own_host(file: str, name: str) -> HostFactory:
    return lambda model: getattr(import_module(f".{file}", __name__), name).of(model)
