"""A matrix of tiny models, one for each feature of the supported libraries that fusing could get wrong.

Each family in tests/helpers/families builds and runs its models. Tests use this module, by the name of a model or by
the model.
"""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import CLASSES, DEPTH, FAMILIES, Family

__all__ = [
    "CHOSEN",
    "CLASSES",
    "DEPTH",
    "METHODS",
    "NAMES",
    "ONE_PER_OPS",
    "PAIRS",
    "PAIRS_BY_OPS",
    "PRODUCT",
    "REFERENCED",
    "by_pickle",
    "drawn",
    "equal_tokens",
    "family_of",
    "make",
    "make_images",
    "names_of",
    "run",
    "tokens_of",
]

REFERENCED = ("mctf", "mctf_exact", "tome")  # `reference` has them; between them they use every piece of BlockOps
METHODS = (*REFERENCED, "ward", "pitome", "atc")  # they take every model, and their sizes count the input tokens
_FAMILY_OF_NAME = {name: family for family in FAMILIES for name in family.builders}
NAMES = tuple(_FAMILY_OF_NAME)
CHOSEN = tuple(name for family in FAMILIES for name in family.chosen)
PAIRS = tuple((name, REFERENCED[index % 3]) for index, name in enumerate(NAMES))  # each model, the methods in turn
# One model per class of BlockOps: what a method does is the same on all models of one class.
_PER_OPS = ("registers", "mean_pool_prefix", "eva02", "beit", "cait", "hf_dinov3")
ONE_PER_OPS = tuple(name for name in _PER_OPS if name in NAMES)
PAIRS_BY_OPS = tuple(  # the pairs of these models, and all others as slow tests
    pytest.param(*pair, id="-".join(pair), marks=() if pair[0] in ONE_PER_OPS else pytest.mark.slow) for pair in PAIRS
)
# Methods on every model: one per model, then ward as a slow test; all of them on one model per class of BlockOps.
PRODUCT = tuple(
    pytest.param(name, method, id=f"{name}-{method}", marks=() if (name, method) in PAIRS else pytest.mark.slow)
    for name in NAMES
    for method in (METHODS if name in ONE_PER_OPS else dict.fromkeys((PAIRS[NAMES.index(name)][1], "ward")))
)


def names_of(wanted: Callable[[Family], bool]) -> tuple[str, ...]:
    """Names of the models whose family is wanted."""
    return tuple(name for name, family in _FAMILY_OF_NAME.items() if wanted(family))


def family_of(model: nn.Module) -> Family:
    """The family of this model, compiled or not."""
    plain = getattr(model, "_orig_mod", model)
    return next(family for family in FAMILIES if family.includes(plain))


def run(model: nn.Module, images: Tensor) -> Tensor:
    """What the model gives for images, as one tensor."""
    return family_of(model).run(model, images)


def make(name: str, *, seed: int = 0, **features: Any) -> Any:
    """The model of this name in evaluation mode, its parameters drawn by `seed`; `features` add to its own."""
    family = _FAMILY_OF_NAME[name]
    return drawn(family.builders[name](**features), family, seed=seed)


def drawn(model: nn.Module, family: Family, *, seed: int = 0) -> nn.Module:
    """The model in evaluation mode, its parameters drawn by `seed` as its family wants them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, module in model.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                family.randomize(f"{path}.{parameter_name}", module, parameter, generator)
    return model.eval()


def make_images(model: nn.Module, batch: int, *, seed: int = 0, size: tuple[int, int] | None = None) -> Tensor:
    """Random images of the size and dtype that the model takes."""
    height, width = size or family_of(model).image_size(model)
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(batch, 3, height, width, generator=generator).to(next(model.parameters()).dtype)


def by_pickle(model: nn.Module) -> nn.Module:
    """The model saved whole and loaded again."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def tokens_of(model: nn.Module) -> int:
    """Tokens entering the first block."""
    return family_of(model).tokens(model)


def equal_tokens(model: nn.Module, equal: int) -> Tensor:
    """Prefix tokens and runs of `equal` identical neighbours, in float64: 2 N C."""
    family = family_of(model)
    prefix, patches = family.prefix(model), 48
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(2, prefix + patches // equal, family.width(model), generator=generator, dtype=torch.float64)
    repeats = torch.tensor([1] * prefix + [equal] * (patches // equal))
    return tokens.repeat_interleave(repeats, dim=1)
