"""Families of tiny models, one module each. A family that is not listed here is not tested."""

from importlib.util import find_spec

from helpers.families.backbones import Backbones
from helpers.families.base import CLASSES, DEPTH, Family
from helpers.families.hf import Hf
from helpers.families.open_clip import OpenClip
from helpers.families.own import Own
from helpers.families.timm_beit import TimmBeit
from helpers.families.timm_cait import TimmCait
from helpers.families.timm_eva import TimmEva
from helpers.families.timm_naflex import TimmNaFlex
from helpers.families.timm_relpos import TimmRelPos
from helpers.families.timm_vit import TimmViT

__all__ = ["CLASSES", "DEPTH", "FAMILIES", "Family"]

# The first family that includes a model counts, so a family of subclasses comes first.
FAMILIES: tuple[Family, ...] = (Backbones(), TimmViT(), TimmEva(), TimmBeit(), TimmCait(), TimmNaFlex(), TimmRelPos())
if find_spec("open_clip") is not None:
    FAMILIES = (OpenClip(), *FAMILIES)  # its class has the name of timm's
if find_spec("transformers") is not None:
    FAMILIES += (Hf(),)
FAMILIES += (Own(),)
