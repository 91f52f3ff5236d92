"""Where a verb's model gets its weights from, and how that is said."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MctfError

if TYPE_CHECKING:
    from torch import nn

RANDOM = "random"


def load_described(
    name: str, *, weights: Path | None, random: bool, image_size: tuple[int, int] | None = None
) -> tuple["nn.Module", str]:
    """A model, and the words for its weights: "pretrained", "random" or the file's name."""
    from ..models.loading import load_model
    from ..models.pretrained import WeightsUnavailableError

    if random and weights is not None:
        raise MctfError("--weights and --random-weights exclude each other: give one of them")
    if random:
        return _random_model(name, image_size), RANDOM
    try:
        model = load_model(name, weights=weights, image_size=image_size)
    except WeightsUnavailableError as failure:
        raise WeightsUnavailableError(f"{failure}, or do without with --random-weights") from None
    return model, "pretrained" if weights is None else weights.name


def load_or_random(name: str, *, weights: Path | None) -> tuple["nn.Module", str]:
    """The same without insisting: random weights where no file is given and pretrained ones cannot be had."""
    from ..models.pretrained import WeightsUnavailableError

    try:
        return load_described(name, weights=weights, random=False)
    except WeightsUnavailableError:
        return load_described(name, weights=None, random=True)


def _random_model(name: str, image_size: tuple[int, int] | None) -> "nn.Module":
    """The same random weights every time."""
    import torch

    from ..models.loading import create

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create(name, image_size=image_size)
