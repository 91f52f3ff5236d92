"""The registry of token-reduction methods: a name, and the class that runs it."""

import sys
from dataclasses import fields
from types import ModuleType

from ..errors import MctfError, did_you_mean
from .a_vit import AViT
from .ats import ATS
from .base import Method
from .bat import BAT
from .controls import FreeDrop, RandomDrop
from .dynamic_vit import DynamicViT
from .evit import EViT
from .evo_vit import EvoViT
from .ia_red2 import IARED2
from .mctf import MCTF, MCTFExact
from .spvit import SPViT
from .tome import ToMe

_REGISTRY: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (MCTF, MCTFExact, ToMe, EViT, BAT, ATS, AViT, IARED2, DynamicViT, SPViT, EvoViT, RandomDrop, FreeDrop)
}


def methods() -> dict[str, str]:
    """Every registered method: its name and one line about it."""
    return {name: cls.summary for name, cls in _REGISTRY.items()}


def make_method(name: str, options: dict[str, object]) -> Method:
    """The method of this name with these options; raises MctfError with a suggestion for unknown words."""
    if not isinstance(name, str):
        amount = isinstance(name, (int, float, list, tuple))
        cure = f"write r={name!r} if you mean how much to fuse" if amount else f"choose from {', '.join(_REGISTRY)}"
        raise MctfError(f"method={name!r} is not a method's name: {cure}")
    if name not in _REGISTRY:
        raise MctfError(f"unknown method {name!r}: {did_you_mean(name, _REGISTRY)}")
    cls = _REGISTRY[name]
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise MctfError(f"method {name!r} has no option {option!r}: {did_you_mean(option, known)}")
    return cls(**options)


class _CallableRegistry(ModuleType):
    """Python binds a subpackage to its name in the parent, so `mctf.methods` is this package: let it be called."""

    def __call__(self) -> dict[str, str]:
        return methods()


sys.modules[__name__].__class__ = _CallableRegistry
