"""Tiny models to export: a file takes a second or more per block."""

from typing import Any

import mctf
from helpers.models import make
from mctf.data import Preprocessing

HALF = (0.5, 0.5, 0.5)
PREPROCESSING = Preprocessing((64, 64), 0.9, "center", "bicubic", HALF, HALF)  # tiny models say nothing about theirs


def tiny(name: str = "plain", *, depth: int = 2) -> Any:
    """A model of few blocks."""
    return make(name, depth=depth)


def fused(name: str = "plain", method: str = "ward", **options: Any) -> Any:
    """A tiny model that fuses in the first of its blocks."""
    return mctf.fuse(tiny(name), method, r=3, blocks=[0], **options)
