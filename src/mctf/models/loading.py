"""Several models around one set of weights."""

import copy
import ssl
import threading
import urllib.error
import urllib.request
from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MctfError, did_you_mean
from ..methods._layers import split_state_dict, stash_layers
from .registration import register

if TYPE_CHECKING:
    from torch import nn


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Modules of its own around the same tensors."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


# MERGED from mctf.models.loading:
# From a name and perhaps a file to a model in evaluation mode.

# What checkpoints call the state_dict inside them; averaged weights first, as they are the ones that authors report.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")


def is_hf(name: str) -> bool:
    """Whether a name is one of transformers: `hf:` and a directory, or a name on the model hub."""
    return name.startswith("hf:")


def check_name(name: str) -> None:
    """Raise MctfError with the nearest name unless timm knows this one."""
    import timm

    register()
    if not timm.is_model(name):
        known = timm.list_models() + timm.list_pretrained()
        raise MctfError(f"timm has no model {name!r}: {did_you_mean(name, known)}")


def create(name: str, *, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """A timm model by name, or one of transformers as `hf:NAME`, for the given image size (height, width)."""
    if is_hf(name):
        from .hf import create_hf

        return create_hf(name, image_size=image_size, **options)
    import timm

    check_name(name)
    if image_size is not None:
        options["img_size"] = image_size
    try:
        return timm.create_model(name, **options).eval()
    except TypeError as refusal:
        raise MctfError(f"{name} cannot be created with {options}: {refusal}") from None


def create_empty(name: str, *, image_size: tuple[int, int] | None = None) -> nn.Module:
    """A model on the meta device: all of its shapes, none of its memory."""
    with torch.device("meta"):
        return create(name, image_size=image_size)


def load_model(
    name: str, *, weights: Path | str | None = None, image_size: tuple[int, int] | None = None, **options: Any
) -> nn.Module:
    """A model with the weights of a file or, without one, with its library's pretrained weights; options: timm's."""
    if is_hf(name):
        if weights is not None:
            raise MctfError(f"{name} brings its own weights: leave out --weights, or name another directory")
        return create(name, image_size=image_size, pretrained=True, **options)
    if weights is not None:
        return _load_file(name, Path(weights), image_size, options)
    try:
        return create(name, image_size=image_size, **pretrained_options(name), **options)
    except MctfError:
        raise
    except Exception as failure:  # network, hub and cache errors share no base class
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        raise WeightsUnavailableError(
            f"the pretrained weights of {name} cannot be fetched ({reason}): pass a file with --weights"
        ) from None


def _load_file(name: str, path: Path, image_size: tuple[int, int] | None, options: dict[str, Any]) -> nn.Module:
    """A model with as many classes as the file has, its positions resampled for another image size."""
    state = read_state_dict(path)
    model: Any = create(name, **options)
    if image_size is not None and _positions_differ(state, model):
        model = create(name, image_size=image_size, **options)
    classes = _classes_of(state, model)
    if classes not in (None, model.num_classes):
        model.reset_classifier(classes)
    _load_state(model, state, path)
    if image_size is not None:
        if not hasattr(model, "set_input_size"):
            raise MctfError(f"{name} has no image size to set: leave out --image-size")
        model.set_input_size(img_size=image_size)
    return model


def _positions_differ(state: dict[str, Tensor], model: nn.Module) -> bool:
    """Whether a file was made for another image size than the model."""
    theirs, own = state.get("pos_embed"), model.state_dict().get("pos_embed")
    return theirs is not None and own is not None and theirs.shape != own.shape


def _classes_of(state: dict[str, Tensor], model: nn.Module) -> int | None:
    """Rows of the classifier in a state_dict, None where it has none."""
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    name = classifier[0] if isinstance(classifier, (tuple, list)) else classifier
    weight = state.get(f"{name}.weight")
    return None if weight is None or weight.dim() == 0 else weight.shape[0]


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a .safetensors, .pt or .pth file into a model; refuses weights of another model.

    Layers that a method has learned are kept aside for `mctf.fuse` unless the model is fused and has them.
    """
    _load_state(model, read_state_dict(path), path)


def _load_state(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    own = model.state_dict()
    layers: dict[str, Tensor] = {}
    if not split_state_dict(own)[1]:
        state, layers = split_state_dict(state)
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    wrong = sorted(key for key in own.keys() & state.keys() if own[key].shape != state[key].shape)
    if missing or unexpected or wrong:
        examples = [f"it lacks {key}" for key in missing[:1]] + [f"it has {key} too many" for key in unexpected[:1]]
        examples += [f"{key} is {tuple(state[key].shape)}, not {tuple(own[key].shape)}" for key in wrong[:1]]
        raise MctfError(f"{path.name} holds weights of another model: {'; '.join(examples)}")
    model.load_state_dict(state)
    if layers:
        stash_layers(model, layers)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a file; nothing in it is executed. Common wrappers and prefixes are taken off."""
    if not path.is_file():
        raise MctfError(f"there is no weights file {path}: give a .safetensors, .pt or .pth file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(path)
        else:
            # trainers store their arguments beside the weights; a Namespace is data, reading it runs nothing
            with torch.serialization.safe_globals([Namespace]):
                loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as failure:  # damaged files raise whatever the reader trips over
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        raise MctfError(f"{path} cannot be read as weights ({reason}): fetch it again") from None
    loaded = _unwrapped(loaded)
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise MctfError(f"{path} holds no state_dict: expected tensors by name")
    return {key.removeprefix("module."): value for key, value in loaded.items()}


def _unwrapped(loaded: Any) -> Any:
    """What lies inside the wrappers that trainers put around a state_dict."""
    for _ in _WRAPPERS:  # one inside the other, but no endless nesting
        inner = [loaded[name] for name in _WRAPPERS if isinstance(loaded, dict) and isinstance(loaded.get(name), dict)]
        loaded = inner[0] if inner else loaded
    return loaded


# MERGED from mctf.models.loading:
# Pretrained weights without a long wait: from the local cache, else from a hub that answers at once.

PATIENCE = 2.0  # seconds for the hub's first answer; its own client retries for most of a minute


class WeightsUnavailableError(MctfError):
    """Pretrained weights that can be neither found nor fetched: weights from a file, or random ones, will do."""


def pretrained_options(name: str) -> dict[str, object]:
    """Options that make timm create this model with pretrained weights; raises an error where there are none."""
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id or config.custom_load == "hf":
        return {"pretrained": True}
    cached = _cached_file(config.hf_hub_id, config.hf_hub_filename)
    if cached is not None:
        # custom_load speaks of files in their authors' format; those on the hub have timm's
        return {"pretrained": True, "pretrained_cfg_overlay": {"file": cached, "custom_load": False}}
    if not hub_answers():
        raise WeightsUnavailableError(
            f"the pretrained weights of {name} are not in the cache and the model hub does not answer: "
            "pass a file with --weights"
        )
    return {"pretrained": True}


def hub_answers(*, patience: float = PATIENCE) -> bool:
    """Whether the model hub sends any response within so many seconds. In a thread: name look-up knows no timeout."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []
    probe = threading.Thread(target=lambda: answers.append(_responds(constants.ENDPOINT, patience)), daemon=True)
    probe.start()
    probe.join(patience)
    return bool(answers) and answers[0]


def _responds(address: str, patience: float) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=patience):
            return True
    except urllib.error.HTTPError:
        return True  # it refuses this address, but it is there
    except urllib.error.URLError as failure:
        return isinstance(failure.reason, ssl.SSLError)  # the hub's client may trust other certificates
    except (OSError, ValueError):
        return False


def _cached_file(hub_id: str, file_name: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = hub_id.partition("@")
    for candidate in (file_name,) if file_name else ("model.safetensors", "pytorch_model.bin"):
        found = try_to_load_from_cache(repository, candidate, revision=revision or None)
        if isinstance(found, str):
            return found
    return None


# MERGED from mctf.models.loading:
# Where a verb's model gets its weights from, and how that is said.

RANDOM = "random"


def load_described(
    name: str, *, weights: Path | None, random: bool, image_size: tuple[int, int] | None = None
) -> tuple["nn.Module", str]:
    """A model, and the words for its weights: "pretrained", "random" or the file's name."""
    pass
    pass

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
    pass

    try:
        return load_described(name, weights=weights, random=False)
    except WeightsUnavailableError:
        return load_described(name, weights=None, random=True)


def _random_model(name: str, image_size: tuple[int, int] | None) -> "nn.Module":
    """The same random weights every time."""
    import torch

    pass

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create(name, image_size=image_size)
