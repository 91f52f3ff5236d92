"""From a model's name, and perhaps a file, to a model in evaluation mode.

Names are timm's, those of this package, or `hf:` and a model of transformers. Pretrained weights come from the local
cache of the model hub or are downloaded. Where neither is possible, the error comes within seconds.
"""

import copy
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from .._utils import first_line
from ..errors import MctfError, did_you_mean, is_out_of_memory, shown
from ..methods._layers import split_state_dict, stash_layers
from .state_dict import check_finite, check_values, convert, fit_state_dict, read_state_dict

RANDOM = "random"
HUB_TIMEOUT = 5.0  # seconds for the first answer of the model hub; `hf_hub_download` retries for 23 s


class WeightsUnavailableError(MctfError):
    """Pretrained weights are neither in the cache nor can they be downloaded. A file or random weights still work."""


def load_described(
    name: str, *, weights: Path | None, random: bool, image_size: tuple[int, int] | None = None
) -> tuple[nn.Module, str]:
    """A model and the description of its weights: "pretrained", "random" or the name of the file."""
    if random and weights is not None:
        raise MctfError("--weights and --random-weights exclude each other: give one of them")
    if random:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same random weights every time
            return create(name, image_size=image_size), RANDOM
    try:
        model = load_model(name, weights=weights, image_size=image_size)
    except WeightsUnavailableError as failure:
        raise WeightsUnavailableError(f"{failure}, or run with --random-weights") from None
    return model, "pretrained" if weights is None else weights.name


def load_or_random(name: str, *, weights: Path | None) -> tuple[nn.Module, str]:
    """`load_described` that falls back to random weights where pretrained ones are unavailable."""
    try:
        return load_described(name, weights=weights, random=False)
    except WeightsUnavailableError:
        return load_described(name, weights=None, random=True)


def load_model(
    name: str, *, weights: Path | str | None = None, image_size: tuple[int, int] | None = None, **options: Any
) -> nn.Module:
    """A model with the weights of a file or, without one, with pretrained weights. options: of the model's library."""
    if name.startswith("hf:"):
        if weights is not None:
            raise MctfError(f"{name} includes its weights: omit --weights, or name another directory")
        return create(name, image_size=image_size, pretrained=True, **options)
    if weights is not None:
        return _load_file(name, Path(weights), image_size, options)
    try:
        model = create(name, image_size=image_size, **pretrained_options(name), **options)
    except MctfError:
        raise
    except Exception as failure:  # network, hub and cache errors share no base class
        create_empty(name, image_size=image_size)  # raises MctfError where it is the image size that does not fit
        raise WeightsUnavailableError(
            f"the pretrained weights of {name} cannot be fetched ({first_line(failure)}): pass a file with --weights"
        ) from None
    check_values(model, f"the pretrained file of {name}")
    return model


def create(name: str, *, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """A model by name with random weights, for images of the given height and width. options: of its library."""
    if name.startswith("hf:"):
        from .hf import create_hf  # imports transformers

        return create_hf(name, image_size=image_size, **options)
    check_name(name)
    if image_size is not None:
        options["img_size"] = image_size
    try:
        return timm.create_model(name, **options).eval()
    except TypeError as refusal:
        raise MctfError(f"{name} cannot be created with {options}: {refusal}") from None
    except MctfError:
        raise
    except Exception as failure:  # timm computes with sizes before it checks them
        size = "" if image_size is None else f" for images of {image_size[0]}x{image_size[1]}"
        if is_out_of_memory(failure):
            raise MctfError(f"{name}{size} does not fit into memory: choose a smaller image size or model") from None
        if options.get("pretrained"):
            raise
        raise MctfError(
            f"{name} cannot be created{size} ({first_line(failure)}): choose another image size or name"
        ) from None


def create_empty(name: str, *, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """A model on the meta device: all of its shapes, none of its memory. options: of its library."""
    with torch.device("meta"):
        return create(name, image_size=image_size, **options)


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of all modules around the same parameters and buffers."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check_name(name: str) -> None:
    """Raise MctfError with the closest name unless timm has a model of this name."""
    if not timm.is_model(name):
        raise MctfError(
            f"timm has no model {shown(name)}: {did_you_mean(name, timm.list_models() + timm.list_pretrained())}"
        )


def pretrained_options(name: str) -> dict[str, object]:
    """Options for `timm.create_model` that give this model its pretrained weights."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id or config.custom_load == "hf":
        return {"pretrained": True}
    repository, _, revision = config.hf_hub_id.partition("@")
    files = (config.hf_hub_filename,) if config.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
    try:
        cached = cached_file(repository, files, revision=revision or None)
    except WeightsUnavailableError as failure:
        raise WeightsUnavailableError(
            f"the pretrained weights of {name} are unavailable: {failure}: pass a file with --weights"
        ) from None
    if cached is None:
        return {"pretrained": True}
    # custom_load describes files in their authors' format; those on the hub are in timm's
    return {"pretrained": True, "pretrained_cfg_overlay": {"file": cached, "custom_load": False}}


def cached_file(repository: str, files: Sequence[str], *, revision: str | None = None) -> str | None:
    """Path of the first of these files in the local cache of the model hub; None where they must be downloaded.

    Before it returns None, one request without retries checks that the hub answers.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import EntryNotFoundError

    for file in files:
        path = try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(path, str):
            return path
    try:
        get_hf_file_metadata(hf_hub_url(repository, files[0], revision=revision), timeout=HUB_TIMEOUT)
    except EntryNotFoundError:  # another of the files may exist
        return None
    except Exception as failure:  # connection, offline mode and HTTP errors share no base class
        raise WeightsUnavailableError(
            f"{repository} is not in the cache and the model hub does not deliver it ({first_line(failure)})"
        ) from None
    return None


def _load_file(name: str, path: Path, image_size: tuple[int, int] | None, options: dict[str, Any]) -> nn.Module:
    """A model with the number of classes of the file; positions are resampled for another image size."""
    state = read_state_dict(path)
    model: Any = create(name, **options)
    theirs, own = state.get("pos_embed"), model.state_dict().get("pos_embed")
    if image_size is not None and theirs is not None and own is not None and theirs.shape != own.shape:
        model = create(name, image_size=image_size, **options)  # the file may be for images of this size
    classes = classifier_rows(state, model)
    if classes not in (None, model.num_classes):
        model.reset_classifier(classes)
    load_weights(model, path, state=state)
    if image_size is not None:
        if not hasattr(model, "set_input_size"):
            raise MctfError(f"{name} has no image size to set: omit --image-size")
        model.set_input_size(img_size=image_size)
    return model


def classifier_rows(state: dict[str, Tensor], model: nn.Module) -> int | None:
    """Rows of the classifier in a state_dict; None where it has no classifier."""
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    name = classifier[0] if isinstance(classifier, (tuple, list)) else classifier
    weight = state.get(f"{name}.weight")
    return None if weight is None or weight.dim() == 0 else weight.shape[0] or None


def load_weights(model: nn.Module, path: Path, *, state: dict[str, Tensor] | None = None) -> None:
    """Load a .safetensors, .pt or .pth file into a model; weights of another model are refused.

    state: the contents of the file, where it has been read. Learned layers of a method are stashed for `mctf.fuse`
    unless the model is fused and has them.
    """
    state = read_state_dict(path) if state is None else state
    layers: dict[str, Tensor] = {}
    if not split_state_dict(model.state_dict())[1]:
        state, layers = split_state_dict(state)
    fitted = fit_state_dict(state, model, path.name)
    layers = {key: convert(key, value, torch.float32, path.name) for key, value in layers.items()}
    check_finite(layers, path.name)
    model.load_state_dict(fitted)
    if layers:
        stash_layers(model, layers)
