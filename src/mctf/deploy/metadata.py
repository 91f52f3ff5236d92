"""What an exported file says about itself, as one JSON object: preprocessing, classes, fusion, cost."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, Self

from .. import __version__
from .._utils import MAX_SIDE
from ..api import find_stack
from ..core.schedule import Amount, ReductionSpec, plain_r
from ..data import Preprocessing
from ..errors import MctfError, shown
from ..fusion_record import KEY as FUSION_KEY
from ..fusion_record import FusionRecord, read_record
from ..hosts import find_host
from ..models.class_names import class_labels, has_projection
from ..models.hf_images import ImageModel
from ..planning import plan

SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
KEY = "mctf"  # the name of the entry in each format
_OUTPUTS = ("logits", "embeddings")
_MOST = 1 << 31


@dataclass(frozen=True)
class ExportMetadata:
    """The facts in an exported file.

    version: of mctf. model: the architecture. output: "logits", or "embeddings" of a model without classifier and of
    one whose head is a projection. batch: the fixed batch size, None where it is dynamic. dtype: of the weights; images
    and outputs are float32. method, r, schedule: None in an unfused model. schedule: one amount per block.
    token_counts: tokens after each block. gflops, gflops_base: of this model and of the unfused one.
    image_size: height and width. preprocessing: None where the model does not say how its images are prepared.
    class_names: empty where there are no classes. precision: of the linear layers of the blocks, "int8" or that of
    dtype. fusion: as in the files of `mctf.save`, with the options of the method; None in an unfused model and for a
    method that no file can describe.
    """

    version: str
    format: str
    model: str
    output: str
    dtype: str
    batch: int | None
    method: str | None
    r: ReductionSpec | None
    schedule: tuple[Amount, ...] | None
    token_counts: tuple[int, ...]
    gflops: float
    gflops_base: float
    image_size: tuple[int, int]
    preprocessing: Preprocessing | None
    class_names: tuple[str, ...]
    precision: str
    fusion: Mapping[str, Any] | None

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        format: str,
        dtype: str,
        batch: int | None,
        name: str | None = None,
        precision: str | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> Self:
        """The facts of a model, fused or not. name: in place of the name of its architecture."""
        stack, host = find_stack(model), find_host(model)
        preprocessing = known_preprocessing(model) if preprocessing is None else preprocessing
        image_size = _image_size(model, host.image_size) if preprocessing is None else preprocessing.image_size
        fusion = None
        if stack is not None:
            with suppress(MctfError):  # of a method that is not registered
                fusion = FusionRecord.of(stack).as_dict()
        amounts: dict[str, Any] = {"r": 0}
        if stack is not None:
            options = {field.name: getattr(stack.method, field.name) for field in fields(stack.method)}  # type: ignore[arg-type]
            amounts = {"r": stack.schedule, "method": stack.method.name, "trim_last": stack.trim_last, **options}
            amounts["dense"] = stack.dense
        planned = plan(model, architecture=host.architecture(image_size), **amounts)
        classes = 0 if has_projection(model) else getattr(model, "num_classes", 0) or 0
        inner = model.pretrained_cfg["architecture"] if isinstance(model, ImageModel) else planned.model
        return cls(
            version=__version__,
            format=format,
            model=name or inner,
            output="logits" if classes else "embeddings",
            dtype=dtype,
            batch=batch,
            method=None if stack is None else stack.method.name,
            r=None if stack is None else _tupled(stack.r),
            schedule=None if stack is None else tuple(stack.schedule),
            token_counts=tuple(planned.token_counts),
            gflops=planned.gflops,
            gflops_base=planned.gflops_base,
            image_size=image_size,
            preprocessing=preprocessing,
            class_names=class_labels(model) if classes else (),
            precision=precision or SHORT_NAMES[dtype],
            fusion=fusion,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None, source: object) -> Self:
        """The facts in a file; raises MctfError for a file that mctf did not write, or that was changed."""
        cure = "write it with mctf.export or mctf export"
        try:
            entries = json.loads(text or "")
        except (ValueError, RecursionError):  # no JSON, a number of too many digits, deep nesting
            entries = None
        if not isinstance(entries, dict) or not {field.name for field in fields(cls)} <= entries.keys():
            raise MctfError(f"{source} holds no metadata of mctf: {cure}")
        facts = {name: _tupled(entries[name]) for name in _VALID}
        for name, valid in _VALID.items():
            if not valid(facts[name]):
                raise MctfError(f"the metadata in {source} is damaged, its {name} is {shown(entries[name])}: {cure}")
        facts["fusion"] = entries["fusion"]
        if facts["fusion"] is not None:
            read_record({FUSION_KEY: facts["fusion"]}, str(source))
        prepared = facts["preprocessing"]
        if prepared is not None:
            facts["preprocessing"] = Preprocessing(**prepared)
        same_size = prepared is None or prepared["image_size"] == facts["image_size"]
        if not same_size or (facts["output"] == "logits") != bool(facts["class_names"]):
            raise MctfError(f"the metadata in {source} is damaged, its entries contradict each other: {cure}")
        return cls(**facts)


def known_preprocessing(model: Any, *, crop_pct: float | None = None) -> Preprocessing | None:
    """What a model says about how its images are prepared: that of timm, open_clip, or of a processor beside it.

    None where it says nothing: mean and standard deviation are not to be guessed.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    if "mean" in config and "std" in config:
        return Preprocessing.of(model, crop_pct=crop_pct)
    config = getattr(model, "preprocess_cfg", None)
    if not isinstance(config, dict):
        return None
    size = config["size"]
    modes = {"shortest": "center", "squash": "squash", "longest": "border"}  # of open_clip, by timm's names
    return Preprocessing(
        image_size=(size, size) if isinstance(size, int) else tuple(size),
        crop_pct=crop_pct or 1.0,
        crop_mode=modes[config["resize_mode"]],
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


def _image_size(model: Any, otherwise: tuple[int, int]) -> tuple[int, int]:
    """Of a model of transformers the size that it was loaded for, of any other that of its host."""
    height, width = model.pretrained_cfg["input_size"][1:] if isinstance(model, ImageModel) else otherwise
    return height, width


def _tupled(value: Any) -> Any:
    """JSON's lists as tuples, as the fields are."""
    if isinstance(value, list):
        return tuple(_tupled(each) for each in value)
    return {name: _tupled(each) for name, each in value.items()} if isinstance(value, dict) else value


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _is_count(value: object, least: int = 0, most: int = _MOST) -> bool:
    return type(value) is int and least <= value <= most


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) < 1000


def _is_tuple(value: object, valid: Callable[[Any], bool], length: int | None = None) -> bool:
    return isinstance(value, tuple) and len(value) == (length or len(value)) and all(map(valid, value))


def _is_size(value: object) -> bool:
    return _is_tuple(value, lambda side: _is_count(side, 1, MAX_SIDE), 2)


def _is_reduction(value: Any) -> bool:
    try:
        plain_r(value)
    except MctfError:
        return value is None
    return not isinstance(value, str) or value == "fast"


def _is_preprocessing(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {field.name for field in fields(Preprocessing)}:
        return False
    return (
        _is_size(value["image_size"])
        and _is_number(value["crop_pct"])
        and 0.1 <= value["crop_pct"] <= 2
        and value["crop_mode"] in ("center", "squash", "border")
        and value["interpolation"] in ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
        and _is_tuple(
            value["mean"], lambda each: _is_number(each) or (type(each) in (int, float) and _is_number(-each)), 3
        )
        and _is_tuple(value["std"], lambda each: _is_number(each) and each > 1e-6, 3)
    )


_VALID: dict[str, Callable[[Any], bool]] = {
    "version": _is_text,
    "format": _is_text,
    "model": _is_text,
    "output": _OUTPUTS.__contains__,
    "dtype": lambda value: isinstance(value, str) and value in SHORT_NAMES,
    "batch": lambda value: value is None or _is_count(value, 1),
    "method": lambda value: value is None or _is_text(value),
    "r": _is_reduction,
    "schedule": lambda value: value is None or _is_tuple(value, _is_number),
    "token_counts": lambda value: _is_tuple(value, _is_count),
    "gflops": _is_number,
    "gflops_base": _is_number,
    "image_size": _is_size,
    "preprocessing": _is_preprocessing,
    "class_names": lambda value: _is_tuple(value, _is_text),
    "precision": lambda value: isinstance(value, str) and value in ("int8", *SHORT_NAMES.values()),
    "fusion": lambda value: value is None or isinstance(value, dict),
}
