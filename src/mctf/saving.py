"""save and load: a fused model in files, with its fusion beside the weights. Nothing is pickled.

    mctf.save(model, "deit.safetensors")   # and deit.json: the model's name, its preprocessing, the fusion
    mctf.save(model, "folder")             # model.safetensors and config.json, as timm and transformers lay them out
    model = mctf.load("deit.safetensors")  # fused as it was saved, with the same outputs

The weights are those of the unfused model under their own names, so that `--weights` and other programs read them.
Layers of a learned method follow under `token_reduction.`. The second file is in timm's format for model hubs, with one
more key (`fusion_record.py`). Models of transformers are written by their own `save_pretrained`.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._utils import atomic_write, check_folder, check_target, file_digest, first_line, read_json
from .api import fuse, fused_stack, set_r, unfuse
from .errors import MctfError, shown
from .fusion_record import KEY, FusionRecord, read_record
from .hosts import find_host
from .hosts.hf_patch import FusedSaving
from .methods._layers import UntrainedWarning, split_state_dict
from .models.hf import load_saved
from .models.hf_images import ImageModel
from .models.loading import cached_file, classifier_rows, copy_sharing_weights, create, create_empty, load_weights
from .quantization import Quantization

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_SOURCES = "a file or folder that mctf.save or save_pretrained wrote, or a name on the model hub"
_MAX_CONFIG = 50_000_000  # bytes; a config may name twenty thousand classes
_DTYPES = {
    str(each).removeprefix("torch."): each for each in (torch.float32, torch.float64, torch.bfloat16, torch.half)
}
# where timm's pretrained weights came from, and what must not come from a file: it would load other weights
_SOURCE_KEYS = ("architecture", "url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load")
_REFUSED_ARGS = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "features_only",
)
# attributes of modules that a run changes, or a machine; a classifier is compared by its shape
_FREE = ("training", "fused_attn", "grad_checkpointing", "num_classes")


def save(model: nn.Module, path: str | os.PathLike[str], *, model_args: Mapping[str, Any] | None = None) -> None:
    """Write a fused model: `mctf.load(path)` brings it back with the same outputs.

    path: a .safetensors file, beside which a .json file is written, or a folder. Models of transformers need a folder.
    model_args: what timm.create_model was given beside the name. Number of classes, input channels, image size and
        pooling are found out; the error says where more is needed.
    """
    stack = fused_stack(model)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if Quantization.of(model) is not None:
        raise MctfError(
            "the model is quantized, and the files would not say so: run mctf.unquantize(model) first, and quantize "
            "what mctf.load brings back"
        )
    target = _path(path)
    inner = model.model if isinstance(model, ImageModel) else model
    if hasattr(inner, FusedSaving.name) and hasattr(inner, "config"):
        _save_pretrained(inner, target)
        return
    record, tensors = FusionRecord.of(stack), _tensors(model)
    config = _timm_config(model, _check_args({} if model_args is None else model_args, "model_args"))
    content = to_safetensors(tensors, {"made_by": f"mctf.save, {config['architecture']}"})
    config["weights"] = hashlib.blake2b(content, digest_size=16).hexdigest()
    _write_pair(target, content, {**config, KEY: record.as_dict()})


def _save_pretrained(model: Any, folder: Path) -> None:
    """Save a fused model of transformers by its own method."""
    if not isinstance(getattr(model, FusedSaving.name), FusedSaving):
        name = next(
            name for name, part in model.named_modules() if isinstance(vars(part).get(FusedSaving.name), FusedSaving)
        )
        raise MctfError(
            f"only {name} is fused, and the files of a {type(model).__name__} would lose that: "
            f"unfuse it and run mctf.fuse(model), or save model.{name}"
        )
    if folder.suffix == ".safetensors" or folder.is_file():
        raise MctfError(f"{folder} is no folder, and a {type(model).__name__} is saved into one: give another path")
    check_folder(folder, "choose another folder")
    try:
        model.save_pretrained(folder)
    except OSError as failure:
        raise MctfError(f"{folder} cannot be written ({failure.strerror or failure}): choose another folder") from None


def _timm_config(model: Any, model_args: dict[str, Any]) -> dict[str, Any]:
    """How to create this model again, in timm's format; raises MctfError where name and arguments do not give it."""
    facts = getattr(model, "pretrained_cfg", None) or {}
    name = facts.get("architecture") if isinstance(facts, dict) else None
    if not isinstance(name, str):
        raise MctfError(
            f"{type(model).__name__} has no name by which it could be created again: save the timm or transformers "
            "model inside it, or model.state_dict()"
        )
    unfused = unfuse(copy_sharing_weights(model))
    own, _ = split_state_dict(unfused.state_dict())
    rows = classifier_rows(own, unfused)
    found: dict[str, Any] = {"num_classes": getattr(model, "num_classes", None) if rows is None else rows}
    if getattr(model, "in_chans", 3) != 3:
        found["in_chans"] = model.in_chans
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    pool = getattr(model, "global_pool", None)
    difference: str | None = None
    for more in ({}, {"img_size": size}, {"global_pool": pool}, {"img_size": size, "global_pool": pool}):
        args = {**found, **more, **model_args}
        try:
            again = create_empty(name, **{key: value for key, value in args.items() if value is not None})
        except MctfError as refusal:
            difference = difference or str(refusal)
            continue
        here = _difference(unfused, again)
        if here is None:
            break
        difference = difference or here
    else:
        raise MctfError(
            f"{name} by timm is not this model ({difference}): pass model_args={{…}} with what timm.create_model was "
            "given, or save model.state_dict()"
        )
    kinds = {value.dtype for value in own.values() if value.is_floating_point()}
    dtype = str(next(iter(kinds))).removeprefix("torch.")
    if len(kinds) > 1 or dtype not in _DTYPES:
        raise MctfError(
            f"the weights are {', '.join(sorted(map(str, kinds)))}: convert the model to one of {', '.join(_DTYPES)}"
        )
    return {
        "architecture": name,
        "num_classes": found["num_classes"],
        "num_features": getattr(model, "num_features", None),
        "model_args": _json({key: value for key, value in args.items() if key != "num_classes" and value is not None}),
        "pretrained_cfg": _json({key: value for key, value in facts.items() if key not in _SOURCE_KEYS}),
        "dtype": dtype,
    }


def _difference(model: nn.Module, other: nn.Module) -> str | None:
    """The first difference of two models in modules, shapes of weights or settings; None where they agree.

    Settings are attributes that both have: users may add their own.
    """
    for facts, shared in ((_structure, False), (_settings, True)):
        ours, theirs = dict(facts(model)), dict(facts(other))
        for key in [key for key in ours if key in theirs] if shared else {**ours, **theirs}:
            here, there = ours.get(key, "absent"), theirs.get(key, "absent")
            if here != there:
                return f"{key} is {here:.80} here, {there:.80} there"
    return None


def _structure(model: nn.Module) -> Iterator[tuple[str, str]]:
    for key, value in model.state_dict().items():
        yield key, str(tuple(value.shape))
    for path, module in model.named_modules():
        yield path or "the model", type(module).__qualname__


def _settings(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            plain = value is None or isinstance(value, (bool, int, float, str, tuple))
            if plain and not name.startswith("_") and name not in _FREE:
                yield f"{path}.{name}".lstrip("."), repr(value)


def _json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that JSON can hold, as it gives them back."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        try:
            kept[key] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    return kept


def _check_args(args: object, name: str) -> dict[str, Any]:
    """Arguments of timm.create_model as a dict; raises MctfError for those that would load something else."""
    if not isinstance(args, Mapping) or not all(isinstance(key, str) for key in args):
        raise MctfError(f"{name} is {shown(args)}: give a dict of arguments of timm.create_model")
    refused = [key for key in args if key in _REFUSED_ARGS]
    if refused or _json(args).keys() != args.keys():
        bad = next(iter(refused), None) or next(key for key in args if key not in _json(args))
        raise MctfError(f"{name} cannot hold {shown(bad)}: give numbers and text that describe the architecture")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict on the CPU; raises MctfError for weights that are no plain tensors."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, value in model.state_dict().items():
        if is_traceable_wrapper_subclass(value) or value.is_meta or value.is_quantized:
            kind = "has no values" if value.is_meta else f"is a {type(value).__name__}"
            raise MctfError(f"{key} {kind}, which is not saved: save the model before it is quantized or sharded")
        plain = value.detach().cpu().contiguous()
        tensors[key] = plain.clone() if plain.data_ptr() in seen else plain  # the format has no shared tensors
        seen.add(plain.data_ptr())
    return tensors


def _write_pair(path: Path, weights: bytes, config: dict[str, Any]) -> None:
    """Write both files or none; the config names the weights by their checksum, so that a mixed pair is noticed."""
    in_folder = path.suffix != ".safetensors"
    if in_folder:
        check_folder(path, "choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise MctfError(f"{path} cannot be created ({failure.strerror}): choose another folder") from None
    first, second = (path / WEIGHTS_FILE, path / CONFIG_FILE) if in_folder else (path, path.with_suffix(".json"))
    check_target(first)
    check_target(second)
    existed = first.exists()
    atomic_write(first, weights)
    try:
        atomic_write(second, (json.dumps(config, indent=2) + "\n").encode())
    except MctfError:
        if not existed:
            first.unlink(missing_ok=True)
        raise


def load(source: str | os.PathLike[str] | nn.Module, **options: Any) -> nn.Module:
    """The fused model of a file or folder, or of a name on the model hub, in evaluation mode on the CPU.

    source: what `mctf.save` or `save_pretrained` of a fused model wrote. A model of transformers that `from_pretrained`
        made of such files is fused in place.
    options: of `from_pretrained` or of timm.create_model.
    """
    if isinstance(source, nn.Module):
        config = vars(getattr(source, "config", object))
        return _fuse_again(source, read_record(config, f"the config of {type(source).__name__}"), "mctf.load(folder)")
    if isinstance(source, str):
        source = source.removeprefix("hf:")
    path = _path(source)
    config_file, weights = _find_files(path)
    cure = f"give {_SOURCES}"
    config = read_json(config_file, str(config_file), cure, most=_MAX_CONFIG)
    record = read_record(config, str(config_file))
    if "architecture" not in config:
        model = load_saved(str(source), **options)
    else:
        model = _load_timm(config, config_file, weights or _download(str(source), WEIGHTS_FILE), options)
    return _fuse_again(model, record, f"{_SOURCES}; {config_file} may be damaged")


def _path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise MctfError(f"{shown(path)} is no path: give {_SOURCES}")
    if "\0" in os.fspath(path):
        raise MctfError(f"{shown(path)} is no path, it holds a null byte: give {_SOURCES}")
    return Path(path)


def _find_files(path: Path) -> tuple[Path, Path | None]:
    """The config file and the weights of a saved model; no weights for a name on the model hub."""
    try:
        if path.is_dir():
            return path / CONFIG_FILE, path / WEIGHTS_FILE
        exists = path.exists()
    except OSError as failure:  # a name that no file system takes
        raise MctfError(f"{path} cannot be read ({failure.strerror}): give {_SOURCES}") from None
    if exists or path.suffix == ".safetensors":
        return path.with_suffix(".json"), path.with_suffix(".safetensors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or str(path).startswith("."):
        raise MctfError(f"there is no file or folder {path}: give {_SOURCES}")
    return _download(str(path), CONFIG_FILE), None


def _download(name: str, file: str) -> Path:
    """A file on the model hub, from the local cache where it is there."""
    from huggingface_hub import hf_hub_download

    cached = cached_file(name, (file,))
    try:
        return Path(hf_hub_download(name, file) if cached is None else cached)
    except Exception as failure:  # network and hub errors share no base class
        raise MctfError(f"{name} has no {file} ({first_line(failure)}): give {_SOURCES}") from None


def _load_timm(config: dict[str, Any], config_file: Path, weights: Path, options: dict[str, Any]) -> nn.Module:
    """The unfused model of timm that a config describes, with its weights; learned layers are stashed."""
    name, dtype, classes = config["architecture"], config.get("dtype", "float32"), config.get("num_classes")
    cure = "save the model again"
    facts = config.get("pretrained_cfg", {})
    for key, valid in (
        ("architecture", isinstance(name, str)),
        ("dtype", isinstance(dtype, str) and dtype in _DTYPES),
        ("num_classes", classes is None or (type(classes) is int and 0 <= classes < 2**31)),
        ("pretrained_cfg", isinstance(facts, dict)),
    ):
        if not valid:
            raise MctfError(f"{config_file} is damaged, its {key} is {shown(config.get(key))}: {cure}")
    args = _check_args(config.get("model_args", {}), f"model_args in {config_file}")
    if file_digest(weights) != config.get("weights"):
        raise MctfError(f"{weights} holds other weights than those that {config_file} was written for: {cure}")
    if classes is not None:
        args["num_classes"] = classes
    model: Any = create(name, **{**args, **options}).to(_DTYPES[dtype])
    load_weights(model, weights)
    prepared = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **prepared}
    return model


def _fuse_again(model: nn.Module, record: FusionRecord, source: str) -> nn.Module:
    """Fuse a model as a record says. source: where the right files are, for messages."""
    depth = find_host(model).depth
    if record.depth != depth:
        raise MctfError(f"the fusion is for {record.depth} blocks, and the model has {depth}: give {source}")
    per_block = isinstance(record.fused_r, (list, tuple))
    blocks = None if per_block else record.blocks
    try:
        with warnings.catch_warnings(action="error", category=UntrainedWarning):
            fuse(
                model,
                record.method,
                r=record.fused_r,
                blocks=blocks,
                dense=record.dense,
                trim_last=record.trim_last,
                restore=record.restore,
                **record.options,
            )
    except UntrainedWarning:
        raise MctfError(f"the weights lack the layers of {record.method}: give {source}") from None
    stack = fused_stack(model)
    stack.blocks = record.blocks
    if record.r != record.fused_r:
        try:
            set_r(model, record.r)
        except MctfError:
            unfuse(model)
            raise
    return model
