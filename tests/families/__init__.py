"""Families of tiny models, one module each. A family that is not listed here is not tested."""

from importlib.util import find_spec

from .backbones import Backbones
from .base import CLASSES, DEPTH, Family
from .hf import Hf
from .own import Own
from .timm_beit import TimmBeit
from .timm_cait import TimmCait
from .timm_eva import TimmEva
from .timm_naflex import TimmNaFlex
from .timm_relpos import TimmRelPos
from .timm_vit import TimmViT

__all__ = ["CLASSES", "DEPTH", "FAMILIES", "Family"]

# The first that knows a model counts, so a family of subclasses comes first.
FAMILIES: tuple[Family, ...] = (Backbones(), TimmViT(), TimmEva(), TimmBeit(), TimmCait(), TimmNaFlex(), TimmRelPos())
if find_spec("transformers") is not None:
    FAMILIES += (Hf(),)
FAMILIES += (Own(),)
