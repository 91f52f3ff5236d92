"""Models of transformers by name: `hf:` and a directory that save_pretrained wrote, or a name on the model hub."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import MctfError
from ..hosts import find_host
from .hf_images import ImageModel, read_preprocessing
from .loading import hub_answers

_WANTED = "a directory written by save_pretrained, or a name on the model hub"
_FILES = ("preprocessor_config.json", "processor_config.json")


def create_hf(
    name: str, *, pretrained: bool = False, image_size: tuple[int, int] | None = None, **options: Any
) -> nn.Module:
    """The model of a name that starts with `hf:`, in evaluation mode; it takes images and gives one tensor.

    Classifiers are kept. Of any other model the vision tower is, and gives what it pools. options: of its config.
    """
    transformers = _transformers(name)
    place = name.removeprefix("hf:")
    try:
        with _quiet(transformers.utils.logging):
            _check_there(place)
            config = _config(transformers, place, options)
            kind = _kind(transformers, config)
            model = _loaded(kind, place, config) if pretrained else kind.from_config(config)
            preprocessing = _preprocessing(transformers, place)
    except MctfError:
        raise
    except Exception as failure:  # network, hub and config errors share no base class
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        raise MctfError(f"{name} cannot be loaded ({reason}): give hf: and {_WANTED}") from None
    find_host(model)  # says what is wrong with a model that cannot be fused
    return ImageModel.of(model, preprocessing, image_size=image_size).eval()


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without transformers' progress bars and reports of what it loads."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MctfError(f"{name} needs transformers: install it with pip install 'mctf[hf]'") from None
    return transformers


def _check_there(place: str) -> None:
    """Raise MctfError at once where the hub's own client would try for most of a minute."""
    from huggingface_hub import try_to_load_from_cache

    if Path(place).is_dir():
        return
    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        raise MctfError(f"there is no directory {place}: give hf: and {_WANTED}")
    if not isinstance(try_to_load_from_cache(place, "config.json"), str) and not hub_answers():
        raise MctfError(f"{place} is not in the cache and the model hub does not answer: give hf: and a directory")


def _config(transformers: Any, place: str, options: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.from_pretrained(place)
    for option, value in options.items():
        if not hasattr(config, option):
            raise MctfError(f"hf:{place} cannot be created with {option}: its config has no such entry")
        setattr(config, option, value)
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0  # ViTMAE would hide most of an image, another part each time
    return config


class _Whole:
    """Makes models of the one class that a config names, like transformers' Auto classes."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def from_pretrained(self, place: str, **options: Any) -> nn.Module:
        return self.kind.from_pretrained(place, **options)

    def from_config(self, config: Any) -> nn.Module:
        return self.kind(config)


def _kind(transformers: Any, config: Any) -> Any:
    """The class of a classifier as it was saved; else the plain model of the config."""
    named = (getattr(config, "architectures", None) or [""])[0]
    if "ForImageClassification" in named and hasattr(transformers, named):
        return _Whole(getattr(transformers, named))
    return transformers.AutoModel


def _loaded(kind: Any, place: str, config: Any) -> nn.Module:
    """The model with all of its weights; a pooler that was saved without any is left out."""
    model, found = kind.from_pretrained(place, config=config, output_loading_info=True)
    missing = sorted(key for key in found["missing_keys"] if not key.endswith("mask_token"))  # nothing is masked here
    needed = [key for key in missing if not key.startswith("pooler.")]
    if needed:
        raise MctfError(f"{place} lacks weights of a {type(model).__name__}, as {needed[0]}: save the model anew")
    if missing:
        model.pooler = None
    return model


def _preprocessing(transformers: Any, place: str) -> dict[str, Any]:
    for file in _FILES:
        found = transformers.utils.cached_file(place, file, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            given = json.loads(Path(found).read_text(encoding="utf-8"))
            return read_preprocessing(given.get("image_processor", given))
    return {}
