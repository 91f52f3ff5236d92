"""Token-reduction methods by name. What a method of your own needs is imported from here:

from mctf.methods import BlockContext, BlockOps, BlockOutput, Method, keep_topk, register_method
"""

import inspect
import sys
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType

from ..core.assignment import Assignment
from ..core.selection import keep_topk
from ..errors import MctfError, did_you_mean, shown
from .a_vit import AViT
from .atc import ATC
from .ats import ATS
from .base import BlockContext, BlockOps, BlockOutput, Method
from .bat import BAT
from .controls import FreeDrop, RandomDrop
from .diffrate import DiffRate
from .dynamic_vit import DynamicViT
from .evit import EViT
from .evo_vit import EvoViT
from .ia_red2 import IARED2
from .mctf import MCTF, MCTFExact
from .pitome import PiToMe
from .spvit import SPViT
from .tome import ToMe
from .ward import Ward

__all__ = [
    "Assignment",
    "BlockContext",
    "BlockOps",
    "BlockOutput",
    "Method",
    "keep_topk",
    "make_method",
    "methods",
    "register_method",
]

_REGISTRY: dict[str, type[Method]] = {}


def register_method(cls: type[Method]) -> type[Method]:
    """Add a method to the registry under its `name`; usable as a class decorator. The last registration counts.

    A method is a subclass of `Method` with a `name` and a `run`, by custom a frozen dataclass whose fields are its
    options. `mctf.fuse`, `plan`, `trace`, pictures and every command then take its name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise MctfError(f"expected a subclass of mctf.methods.Method, got {shown(cls)}")
    if not isinstance(getattr(cls, "name", None), str) or not cls.name.isidentifier():
        raise MctfError(
            f"{cls.__name__}.name must be a word such as 'my_method', not {shown(getattr(cls, 'name', None))}"
        )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise MctfError(f"{cls.__name__} lacks {missing}: a method needs at least `run`")
    if not is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
        cls = dataclass(frozen=True)(cls)
    _REGISTRY[cls.name] = cls
    return cls


for _cls in (
    MCTF,
    MCTFExact,
    Ward,
    DiffRate,
    PiToMe,
    ATC,
    ToMe,
    EViT,
    BAT,
    ATS,
    AViT,
    IARED2,
    DynamicViT,
    SPViT,
    EvoViT,
    RandomDrop,
    FreeDrop,
):
    register_method(_cls)


def methods() -> dict[str, str]:
    """Every registered method: its name and one line about it."""
    return {name: cls.summary for name, cls in _REGISTRY.items()}


def make_method(name: str, options: dict[str, object]) -> Method:
    """The method of this name with these options; raises MctfError with a suggestion for unknown words."""
    if not isinstance(name, str):
        amount = isinstance(name, (int, float, list, tuple))
        cure = (
            f"write r={shown(name)} if you mean how much to fuse" if amount else f"choose from {', '.join(_REGISTRY)}"
        )
        raise MctfError(f"method={shown(name)} is not a method's name: {cure}")
    if name not in _REGISTRY:
        raise MctfError(f"unknown method {shown(name)}: {did_you_mean(name, _REGISTRY)}")
    cls = _REGISTRY[name]
    option_names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in option_names:
            raise MctfError(f"method {name!r} has no option {shown(option)}: {did_you_mean(option, option_names)}")
    return cls(**options)


class _CallableRegistry(ModuleType):
    """Python binds a subpackage to its name in the parent, so `mctf.methods` is this package: let it be called."""

    def __call__(self) -> dict[str, str]:
        return methods()


sys.modules[__name__].__class__ = _CallableRegistry
