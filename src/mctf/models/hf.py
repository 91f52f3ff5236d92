"""Models of transformers by name: `hf:` and a directory written by save_pretrained, or a name on the model hub."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from .._utils import first_line, optional_import
from ..errors import MctfError, is_out_of_memory, shown
from ..hosts import find_host
from ..methods._layers import LAYERS, stash_layers, stashed_layers
from .hf_images import ImageModel, read_preprocessing
from .loading import WeightsUnavailableError, cached_file
from .state_dict import check_finite, check_floating, check_values, convert, explain_failure, read_state_dict

_EXPECTED = "a directory written by save_pretrained, or a name on the model hub"
_PREPROCESSING_FILES = ("preprocessor_config.json", "processor_config.json")


def create_hf(
    name: str,
    *,
    pretrained: bool = False,
    image_size: tuple[int, int] | None = None,
    keep_projection: bool = False,
    **options: Any,
) -> nn.Module:
    """The model of a name that starts with `hf:`, in evaluation mode; it takes images and returns one tensor.

    A classifier is loaded whole. Of any other model the vision tower is kept, and its pooled features are returned.
    keep_projection: see `ImageModel.of`. options: set in the model's config.
    """
    transformers = optional_import("transformers", extra="hf", purpose=f"models such as {name}")
    source = name.removeprefix("hf:")
    try:
        with _quiet(transformers.utils.logging):
            _check_exists(source)
            config = _read_config(transformers, source, options)
            if pretrained:
                _check_files(transformers, source, config)
                model = _load(transformers, source, config)
            else:
                kind = _classifier_class(transformers, config) or _unmapped_class(transformers, config)
                model = (
                    transformers.AutoModel.from_config(config, trust_remote_code=False)
                    if kind is None
                    else kind(config)
                )
            preprocessing = _read_preprocessing(transformers, source)
            find_host(model)  # raises MctfError with the reason where the model cannot be fused
            if pretrained:
                check_values(model, name)
            images = ImageModel.of(model, preprocessing, image_size=image_size, keep_projection=keep_projection).eval()
            if stashed_layers(model):  # they belong to the model that is fused
                stash_layers(images, stashed_layers(model))
            return images
    except MctfError:
        raise
    except Exception as failure:  # network, hub, config and weights errors share no base class
        raise MctfError(f"{name} {_explain(failure)}") from None


def _explain(failure: Exception) -> str:
    """The predicate of a sentence about a model that transformers could not create."""
    if "trust_remote_code" in str(failure):
        return "brings code of its own, which is not run: use a model whose code is in transformers"
    if isinstance(failure, UnpicklingError):
        return explain_failure(failure)
    if is_out_of_memory(failure):
        return "does not fit into memory: use a smaller model"
    return f"cannot be loaded ({first_line(failure)[:300]}): give hf: and {_EXPECTED}"


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without transformers' progress bars and loading reports, and without warnings."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_exists(source: str) -> None:
    """Raise MctfError within seconds; transformers retries for most of a minute."""
    if not source.strip():
        raise MctfError(f"hf: names no model: give hf: and {_EXPECTED}")
    with suppress(OSError):  # a name that no file system takes
        if Path(source).is_dir():
            return
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise MctfError(f"there is no directory {source}: give hf: and {_EXPECTED}")
    try:
        cached_file(source, ("config.json",))
    except WeightsUnavailableError as failure:
        raise MctfError(f"{failure}: give hf: and a directory written by save_pretrained") from None


def _read_config(transformers: Any, source: str, options: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    for option, value in options.items():
        if not hasattr(config, option):
            raise MctfError(f"hf:{source} cannot be created with {option}: its config has no such entry")
        setattr(config, option, value)
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0  # ViTMAE would mask most of an image, at random
    return config


def _classifier_class(transformers: Any, config: Any) -> Any:
    """The class that a saved classifier names in its config; None for every other model."""
    name = (getattr(config, "architectures", None) or [""])[0]
    return getattr(transformers, name, None) if "ForImageClassification" in name else None


def _saved_class(config: Any) -> Any:
    """The class that a model had when it was saved; None where transformers has none of this name."""
    name = (getattr(config, "architectures", None) or [None])[0]
    if not isinstance(name, str):
        return None
    package = type(config).__module__.replace(".configuration_", ".modeling_")
    with suppress(ImportError):  # towers that only larger models name are in no list of transformers
        return getattr(import_module(package), name, None)
    return None


def _unmapped_class(transformers: Any, config: Any) -> Any:
    """The saved class of a part of a larger model, which AutoModel does not know; None where it does."""
    if type(config) in transformers.MODEL_MAPPING:
        return None
    return _saved_class(config)


def _check_files(transformers: Any, source: str, config: Any) -> None:
    """Raise MctfError for saved weights of integers, which transformers converts without a word."""
    if getattr(config, "quantization_config", None) is not None:
        return
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = transformers.utils.cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            check_floating(Path(path), f"hf:{source}")
            return


def _load(transformers: Any, source: str, config: Any) -> nn.Module:
    """The model with all of its weights; a pooler that was saved without weights is removed."""
    kind = _classifier_class(transformers, config) or _unmapped_class(transformers, config)
    options: dict[str, Any] = {"config": config, "output_loading_info": True}
    if kind is None:
        model, report = transformers.AutoModel.from_pretrained(source, trust_remote_code=False, **options)
        if any(not key.endswith("mask_token") and not key.startswith("pooler.") for key in report["missing_keys"]):
            kind = _saved_class(config)  # AutoModel has parts that this one has not, as for BLIP without its text tower
    if kind is not None:
        model, report = kind.from_pretrained(source, **options)
    missing = _check_report(model, source, report, optional="pooler.")
    if missing:
        model.pooler = None
    _stash_layers(transformers, model, source, report)
    return model


def load_saved(source: str, **options: Any) -> nn.Module:
    """The model that `save_pretrained` wrote, of the class that it had, in evaluation mode.

    Layers of a learned method are stashed in it. options: of `from_pretrained`.
    """
    transformers = optional_import("transformers", extra="hf", purpose="models of transformers")
    try:
        with _quiet(transformers.utils.logging):
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            named = (getattr(config, "architectures", None) or [None])[0]
            kind: Any = getattr(transformers, named, None) if isinstance(named, str) else None
            if not hasattr(kind, "from_pretrained"):
                raise MctfError(f"{source} names no class of transformers, but {shown(named)}: save the model again")
            _check_files(transformers, source, config)
            given = {"dtype": "auto", **options, "config": config, "output_loading_info": True}
            model, report = kind.from_pretrained(source, **given)
            _check_report(model, source, report)
            _stash_layers(transformers, model, source, report)
            check_values(model, source)
            return model.eval()
    except MctfError:
        raise
    except Exception as failure:  # network, hub, config and weights errors share no base class
        raise MctfError(f"{source} {_explain(failure)}") from None


def _check_report(model: nn.Module, source: str, report: Any, *, optional: str = " ") -> list[str]:
    """Names of missing weights that start with `optional`; raises MctfError where others are missing."""
    missing = sorted(key for key in report["missing_keys"] if not key.endswith("mask_token"))  # nothing is masked here
    needed = [key for key in missing if not key.startswith(optional)]
    if needed:
        raise MctfError(
            f"{source} lacks weights of a {type(model).__name__}, such as {needed[0]}: save the model again"
        )
    return missing


def _stash_layers(transformers: Any, model: nn.Module, source: str, report: Any) -> None:
    """Keep the layers of a learned method, which `from_pretrained` leaves out, for `mctf.fuse`."""
    names = [key for key in report["unexpected_keys"] if key.startswith(f"{LAYERS}.")]
    if not names:
        return
    find = partial(transformers.utils.cached_file, source, _raise_exceptions_for_missing_entries=False)
    index = find("model.safetensors.index.json")
    files = dict.fromkeys(names, "model.safetensors")
    if index is not None:
        files |= json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    states = {file: read_state_dict(Path(find(file))) for file in {files[name] for name in names}}
    layers = {name: convert(name, states[files[name]][name], torch.float32, source) for name in names}
    check_finite(layers, source)
    stash_layers(model, layers)


def _read_preprocessing(transformers: Any, source: str) -> dict[str, Any]:
    for file in _PREPROCESSING_FILES:
        path = transformers.utils.cached_file(source, file, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            return read_preprocessing(given.get("image_processor", given))
    return {}
