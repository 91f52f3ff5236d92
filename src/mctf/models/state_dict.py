"""State_dicts from files: tensors by name, checked before a model takes them. No code in a file is executed.

A file is what its first bytes say, whatever its name. Everything that a model could not compute with is refused here:
other kinds of numbers, other layouts, undefined values.
"""

import mmap
import pickle
import stat
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import first_line
from ..errors import MctfError, is_out_of_memory, shown

# Keys under which trainers nest the state_dict. Averaged weights come first: authors report the accuracy of those.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number that PyTorch wrote first before it wrote archives
_LFS = b"version https://git-lfs"
_EXPECTED = "give a .safetensors, .pt or .pth file"
OBJECTS = "holds Python objects beside tensors, which are not loaded: save its state_dict, or use .safetensors"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a file. Common wrappers and prefixes are removed."""
    head, size = _begin(path)
    capacity = size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if _is_safetensors(head, size):
                from safetensors.torch import load_file

                loaded: Any = load_file(path)
            else:
                if head.startswith(_ZIP):
                    capacity = _check_archive(path, size)
                # trainers store their arguments beside the weights; a Namespace is data, reading it runs nothing
                # a file, as by a name torch trusts the suffix
                with torch.serialization.safe_globals([Namespace]), _opened(path, head) as file:
                    loaded = torch.load(file, map_location="cpu", weights_only=True)
    except MctfError:
        raise
    except Exception as failure:  # damaged files raise errors of many classes
        raise MctfError(f"{path} {explain_failure(failure)}") from None
    for _ in _WRAPPERS:  # one inside the other, but no endless nesting
        inner = [loaded[name] for name in _WRAPPERS if isinstance(loaded, dict) and isinstance(loaded.get(name), dict)]
        loaded = inner[0] if inner else loaded
    return _named_tensors(path, loaded, capacity)


@contextmanager
def _opened(path: Path, head: bytes) -> Iterator[Any]:
    """A file to load; in the older format a pickle may ask for gigabytes, of which a map gives what is there."""
    with path.open("rb") as file:
        if head.startswith(_ZIP):
            yield file
        else:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                yield mapped


def explain_failure(failure: Exception) -> str:
    """The predicate of a sentence about a file that PyTorch or safetensors could not load."""
    text = str(failure)
    if "TorchScript" in text:
        return "is a TorchScript program, which is not run: save its state_dict, or use .safetensors"
    if isinstance(failure, pickle.UnpicklingError) and ("Unsupported" in text or "weights_only" in text):
        return OBJECTS
    if is_out_of_memory(failure):
        return "claims tensors that do not fit into memory: fetch it again"
    return f"cannot be read as weights ({first_line(failure).rstrip('.:')[:200]}): fetch it again"


def _begin(path: Path) -> tuple[bytes, int]:
    """The first bytes and the size of a file; raises MctfError for what is no file of weights."""
    try:
        about = path.stat()
        if stat.S_ISDIR(about.st_mode):
            raise MctfError(f"{path} is a directory, not a weights file: {_EXPECTED}, or write hf:{path}")
        if not stat.S_ISREG(about.st_mode):
            raise MctfError(f"{path} is not a regular file: {_EXPECTED}")
        with path.open("rb") as file:
            head = file.read(64)
    except (FileNotFoundError, NotADirectoryError, ValueError) as failure:
        if isinstance(failure, MctfError):
            raise
        raise MctfError(f"there is no weights file {path}: {_EXPECTED}") from None
    except OSError as failure:
        raise MctfError(f"the weights file {path} cannot be read ({failure.strerror}): {_EXPECTED}") from None
    if not head:
        raise MctfError(f"{path} is empty: fetch it again")
    if head.startswith(_LFS):
        raise MctfError(f"{path} is a pointer to a file in Git LFS: run git lfs pull")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise MctfError(f"{path} is a web page, not weights: download the file itself")
    if _is_safetensors(head, about.st_size):  # first: the length of a header may begin as a pickle does
        return head, about.st_size
    if head.startswith(_PICKLE) and not head.startswith(_LEGACY):
        raise MctfError(f"{path} {OBJECTS}")
    if not head.startswith((_ZIP, _LEGACY)):
        kind = ".safetensors" if path.suffix == ".safetensors" else "PyTorch or .safetensors"
        raise MctfError(f"{path} cannot be read as weights (it does not begin as a {kind} file): fetch it again")
    return head, about.st_size


def _is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file begins with the length of a header that fits into it, and with the header's brace."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def _check_archive(path: Path, size: int) -> int:
    """Bytes that an archive inflates to; PyTorch stores its tensors as they are, so they are about its size."""
    with zipfile.ZipFile(path) as archive:
        inflated = sum(entry.file_size for entry in archive.infolist())
    if inflated > 4 * size + (1 << 20):
        raise MctfError(
            f"{path} inflates from {size:,} to {inflated:,} bytes, which PyTorch's files do not: fetch it again"
        )
    return max(size, inflated)


def _named_tensors(path: Path, loaded: object, capacity: int) -> dict[str, Tensor]:
    """The contents of a file as a state_dict; raises MctfError where they are none. capacity: bytes in the file."""
    if not isinstance(loaded, dict):
        raise MctfError(f"{path} holds no state_dict: expected tensors by name, not a {type(loaded).__name__}")
    if not loaded:
        raise MctfError(f"{path} holds no state_dict: expected tensors by name, and it is empty")
    for key, value in loaded.items():
        if not isinstance(key, str):
            raise MctfError(f"{path} holds no state_dict: expected tensors by name, and {shown(key)} is no name")
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise MctfError(f"{path} holds no state_dict: expected tensors by name, and {shown(key)} is a {kind}")
        if problem := _unusable(value, capacity):
            raise MctfError(f"{path} cannot be used: {key} {problem}")
    if all(key.startswith("module.") for key in loaded):
        return {key.removeprefix("module."): value for key, value in loaded.items()}
    return loaded


def _unusable(value: Tensor, capacity: int) -> str | None:
    """What keeps a tensor from being a weight, and the cure; None where nothing does."""
    if value.is_meta:
        return "has a shape but no values (device meta): save the model with its weights"
    if value.is_quantized:
        return "is quantized: save it in floating point, by tensor.dequantize()"
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"is a tensor of layout {kind}: save it dense, by tensor.to_dense()"
    if value.numel() * value.element_size() > capacity:
        return f"is {tuple(value.shape)}, more than the file holds: save it by tensor.contiguous()"
    return None


def check_floating(path: Path, source: str) -> None:
    """Raise MctfError for weights or biases that are no floating point; of a .safetensors file the header is read."""
    if not _is_safetensors(*_begin(path)):
        for key, value in read_state_dict(path).items():
            if key.endswith((".weight", ".bias")):
                check_kind(key, value.dtype, torch.float32, source)
        return
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            kinds = {key: file.get_slice(key).get_dtype() for key in names if key.endswith((".weight", ".bias"))}
    except Exception as failure:  # damaged files raise errors of many classes
        raise MctfError(f"{path} {explain_failure(failure)}") from None
    for key, kind in kinds.items():
        if not kind.startswith(("F", "BF")):
            raise MctfError(
                f"{source} holds {key} as {kind}, and the model computes in float32: save it as floating point"
            )


def fit_state_dict(state: Mapping[str, Tensor], model: nn.Module, source: str) -> dict[str, Tensor]:
    """The state_dict in the dtypes of the model; raises MctfError that names the tensor where it is another model's."""
    own = model.state_dict()
    differences = [f"it lacks {key}" for key in sorted(own.keys() - state.keys())[:1]]
    differences += [f"it has an unexpected {key}" for key in sorted(state.keys() - own.keys())[:1]]
    shapes = {key: (tuple(state[key].shape), tuple(own[key].shape)) for key in sorted(own.keys() & state.keys())}
    differences += [f"{key} is {theirs}, not {ours}" for key, (theirs, ours) in shapes.items() if theirs != ours][:1]
    if differences:
        raise MctfError(f"{source} holds weights of another model: {'; '.join(differences)}")
    fitted = {key: convert(key, value, own[key].dtype, source) for key, value in state.items()}
    infinite = {key for key, value in model.named_buffers() if not _is_finite(value)}  # masks of -inf
    check_finite({key: value for key, value in fitted.items() if key not in infinite}, source)
    return fitted


def convert(key: str, value: Tensor, dtype: torch.dtype, source: str) -> Tensor:
    """A tensor in the dtype of the model; raises MctfError where it holds another kind of number."""
    check_kind(key, value.dtype, dtype, source)
    try:
        return value.detach().to(dtype)
    except Exception:  # packed formats of a few bits have no conversion
        raise MctfError(f"{source} holds {key} as {_name(value.dtype)}: save it as {_name(dtype)}") from None


def check_kind(key: str, given: torch.dtype, dtype: torch.dtype, source: str) -> None:
    """Raise MctfError for integers where a model has floating point, and the like."""
    if _kind(given) != _kind(dtype):
        raise MctfError(
            f"{source} holds {key} as {_name(given)}, and the model computes in {_name(dtype)}: "
            f"save it as {_kind(dtype)}"
        )


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise MctfError that names the first of these tensors with NaN or infinite values."""
    for key, value in tensors.items():
        if not _is_finite(value):
            raise MctfError(
                f"{source} holds NaN or infinite values in {key}: use weights saved before training diverged"
            )


def check_values(model: nn.Module, source: str) -> None:
    """Raise MctfError that names the first parameter that is not finite, or the first buffer with NaN."""
    check_finite(dict(model.named_parameters()), source)
    for key, value in model.named_buffers():
        if value.is_floating_point() and not value.is_meta and bool(value.isnan().any()):
            check_finite({key: value}, source)


def _is_finite(value: Tensor) -> bool:
    return value.is_meta or not value.is_floating_point() or bool(torch.isfinite(value).all())


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex or dtype.is_floating_point:
        return "complex numbers" if dtype.is_complex else "floating point"
    return "booleans" if dtype == torch.bool else "integers"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
