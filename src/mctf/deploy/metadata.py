"""What an exported file says about itself, as one JSON object: preprocessing, classes, fusion, cost."""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from .. import __version__
from ..api import find_stack
from ..core.schedule import Amount, ReductionSpec
from ..data import Preprocessing
from ..errors import MctfError
from ..hosts import find_host
from ..models.class_names import class_labels
from ..planning import plan

SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
KEY = "mctf"  # the name of the entry in each format


@dataclass(frozen=True)
class ExportMetadata:
    """The facts in an exported file.

    version: of mctf. model: the architecture. output: "logits", or "embeddings" of a model without classifier.
    batch: the fixed batch size, None where it is free. dtype: of the weights; images and outputs are float32.
    method, r, schedule: None in an unfused model. schedule: one amount per block. token_counts: tokens after each
    block. gflops, gflops_base: of this model and of the unfused one. class_names: empty where there are no classes.
    precision: of the linear layers of the blocks, "int8" or that of dtype.
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
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    precision: str = "fp32"

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
    ) -> Self:
        """The facts of a model, fused or not. name: in place of the name of its architecture."""
        stack, host, preprocessing = find_stack(model), find_host(model), Preprocessing.of(model)
        if not hasattr(model, "pretrained_cfg"):  # a model of one's own says nothing but its size
            preprocessing = replace(preprocessing, image_size=host.image_size)
        amounts: dict[str, Any] = {"r": 0}
        if stack is not None:
            options = {field.name: getattr(stack.method, field.name) for field in fields(stack.method)}  # type: ignore[arg-type]
            amounts = {"r": stack.schedule, "method": stack.method.name, "trim_last": stack.trim_last, **options}
            amounts["dense"] = stack.dense
        planned = plan(model, architecture=host.architecture(preprocessing.image_size), **amounts)
        classes = getattr(model, "num_classes", 0) or 0
        return cls(
            version=__version__,
            format=format,
            model=name or planned.model,
            output="logits" if classes else "embeddings",
            dtype=dtype,
            batch=batch,
            method=None if stack is None else stack.method.name,
            r=None if stack is None else stack.r,
            schedule=None if stack is None else tuple(stack.schedule),
            token_counts=tuple(planned.token_counts),
            gflops=planned.gflops,
            gflops_base=planned.gflops_base,
            preprocessing=preprocessing,
            class_names=class_labels(model) if classes else (),
            precision=precision or SHORT_NAMES[dtype],
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None, source: object) -> Self:
        """The facts in a file; raises MctfError for a file that mctf did not write."""
        try:
            entries = json.loads(text or "")
            known = {field.name for field in fields(cls)}
            entries = {name: _tupled(value) for name, value in entries.items() if name in known}
            return cls(**entries | {"preprocessing": Preprocessing(**entries["preprocessing"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise MctfError(f"{source} holds no metadata of mctf: write it with mctf.export or mctf export") from None


def _tupled(value: Any) -> Any:
    """JSON's lists as tuples, as the fields are."""
    if isinstance(value, list):
        return tuple(_tupled(each) for each in value)
    return {name: _tupled(each) for name, each in value.items()} if isinstance(value, dict) else value
