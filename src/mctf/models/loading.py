"""From a name and perhaps a file to a model in evaluation mode."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MctfError, did_you_mean
from .pretrained import pretrained_options


def check_name(name: str) -> None:
    """Raise MctfError with the nearest name unless timm knows this one."""
    import timm

    if not timm.is_model(name):
        known = timm.list_models() + timm.list_pretrained()
        raise MctfError(f"timm has no model {name!r}: {did_you_mean(name, known)}")


def create(name: str, *, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """A timm model by name, for the given image size (height, width)."""
    import timm

    check_name(name)
    if image_size is not None:
        options["img_size"] = image_size
    try:
        return timm.create_model(name, **options).eval()
    except TypeError as refusal:
        raise MctfError(f"{name} cannot be created with {options}: {refusal}") from None


def create_empty(name: str, *, image_size: tuple[int, int] | None = None) -> nn.Module:
    """A timm model on the meta device: all of its shapes, none of its memory."""
    with torch.device("meta"):
        return create(name, image_size=image_size)


def load_model(name: str, *, weights: Path | None = None, image_size: tuple[int, int] | None = None) -> nn.Module:
    """A timm model with the weights of a file or, without one, with timm's pretrained weights."""
    if weights is not None:
        model = create(name, image_size=image_size)
        load_weights(model, weights)
        return model
    try:
        return create(name, image_size=image_size, **pretrained_options(name))
    except MctfError:
        raise
    except Exception as failure:  # network, hub and cache errors share no base class
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        raise MctfError(
            f"the pretrained weights of {name} cannot be fetched ({reason}): pass a file with --weights"
        ) from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a .safetensors, .pt or .pth file into a model; refuses weights of another model."""
    state = read_state_dict(path)
    own = model.state_dict()
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    wrong = sorted(key for key in own.keys() & state.keys() if own[key].shape != state[key].shape)
    if missing or unexpected or wrong:
        examples = [f"lacks {key}" for key in missing[:1]] + [f"has {key} too many" for key in unexpected[:1]]
        examples += [f"{key} is {tuple(state[key].shape)}, not {tuple(own[key].shape)}" for key in wrong[:1]]
        raise MctfError(f"{path.name} holds weights of another model: it {'; it '.join(examples)}")
    model.load_state_dict(state)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a file; nothing in it is executed. Common wrappers and prefixes are taken off."""
    if not path.is_file():
        raise MctfError(f"there is no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as failure:  # damaged files raise whatever the reader trips over
        raise MctfError(f"{path} cannot be read as weights: {str(failure).splitlines()[0]}") from None
    for wrapper in ("model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise MctfError(f"{path} holds no state_dict: expected tensors by name")
    return {key.removeprefix("module."): value for key, value in loaded.items()}
