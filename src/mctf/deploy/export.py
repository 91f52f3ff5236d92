"""`mctf.export`: a model, fused or not, written for another runtime and checked against itself."""

import copy
import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from .._utils import check_target, first_line
from ..api import find_stack
from ..core.portable import onnx_operators
from ..data import Preprocessing
from ..errors import MctfError, did_you_mean, is_out_of_memory, shown
from ..hosts import find_host
from ..methods.base import Method, check_bool, check_choice, check_whole
from ..models.class_names import has_projection
from ..models.hf_images import ImageModel
from ..quantization import Quantization, quantize
from .exported import open_file
from .formats import Finish, Format, find_format
from .int8 import int8_layers, quantize_onnx, quantize_torch
from .metadata import SHORT_NAMES, ExportMetadata
from .parity import Parity, generated_images, judge, run_batches

DTYPES = ("float32", "float16", "bfloat16")
_INT8_SLACK = 4  # a range per layer, fixed beforehand, rounds more coarsely than one per token
_LARGER_BATCH = 8  # at which a file with a free batch is checked, beside 1


@dataclass(frozen=True)
class ExportReport:
    """What was written. files: all of them, `path` first.

    parity: of the file by batch size, empty where it was not checked. control: of eager PyTorch in float64, or in the
    dtype of the file where that is lower, or in int8.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: ExportMetadata
    parity: dict[int, Parity]
    control: Parity | None

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def export(
    model: nn.Module,
    path: str | PathLike[str],
    format: str = "onnx",
    *,
    batch: int | None = None,
    dtype: str = "float32",
    precision: str | None = None,
    calibration: Tensor | None = None,
    images: Tensor | None = None,
    check: bool = True,
    name: str | None = None,
    preprocessing: Preprocessing | None = None,
    tick: Callable[[str], object] = lambda step: None,
) -> ExportReport:
    """Write a model for another runtime: "onnx", "openvino", "aoti" (AOTInductor) or "pt2" (torch.export).

    model: fused or not; it is not changed. Images of one size are taken, in batches of any size.
    path: ends in .onnx, .xml (OpenVINO, with a .bin beside it) or .pt2.
    batch: a fixed batch size, for runtimes that need it or are faster with it.
    dtype: of the weights; the file takes and returns float32.
    precision: "int8" for the linear layers of the blocks, in float32 otherwise; "fp32", "fp16" and "bf16" are dtypes.
    calibration: images that show the ranges of activations, which ONNX and OpenVINO files in int8 need: B 3 H W,
        preprocessed. The others measure each token as it runs.
    images: preprocessed, B 3 H W, to check the file on; generated ones by default. check: False skips the check.
    name: of the model in the metadata. preprocessing: how images are prepared, for the metadata; by default what the
        model says about it, if it does. tick: called with the name of each step before it begins.

    The file is run on the images. Where it differs from the model by more than rounding (`mctf.deploy.parity`), the
    error says so and nothing is left behind.
    """
    kind, file = check_request(path, format)
    check_whole(1, optional=True, batch=batch)
    check_choice(dtype=(dtype, DTYPES))
    dtype, int8 = check_precision(precision, dtype)
    model = getattr(model, "_orig_mod", model)  # behind torch.compile
    find_host(model)
    if Quantization.of(model) is not None:
        raise MctfError("the model is quantized: run mctf.unquantize(model), and export it with precision='int8'")
    stack = find_stack(model)
    if stack is not None and stack.method.adaptive:
        refuse_adaptive(stack.method)
    check_bool(check=check)
    if preprocessing is not None and not isinstance(preprocessing, Preprocessing):
        raise MctfError(f"preprocessing is {shown(preprocessing)}: give a mctf.data.Preprocessing")
    if getattr(model, "in_chans", 3) != 3:
        raise MctfError(f"the model takes images of {model.in_chans} channels, and exported files take 3")
    exact = dtype == "float32" and not int8
    model = _tensor_model(copy.deepcopy(model).eval().to("cpu", torch.float32))
    metadata = ExportMetadata.of(
        model,
        format=kind.name,
        dtype=dtype,
        batch=batch,
        name=name,
        precision=precision,
        preprocessing=preprocessing,
    )
    size = metadata.image_size
    _check_images(images, size)
    _check_images(calibration, size, "calibration")
    finish: Finish = None
    source: nn.Module = copy.deepcopy(model)
    if int8:
        layers = int8_layers(model)
        if "onnx" not in kind.packages:
            quantize_torch(source)
        elif calibration is None:
            raise MctfError(
                f"{kind.name} in int8 needs calibration images: pass calibration=, or add --calibration IMAGES"
            )
        else:
            finish = partial(quantize_onnx, layers=layers, images=calibration.to("cpu", torch.float32), batch=batch)

    tick("exporting the graph")
    program = make_graph(_Float32(source, getattr(torch, dtype)), size, batch=batch, kind=kind)
    with tempfile.TemporaryDirectory(prefix=f".{file.name[:50]}.", dir=file.resolve().parent) as folder:
        written = Path(folder) / file.name
        tick(f"writing {kind.name}")
        try:
            kind.write(program, written, metadata.to_json(), finish)
        except Exception as failure:
            if is_out_of_memory(failure) or getattr(failure, "errno", None) == errno.ENOSPC:
                raise  # another format needs the same
            raise MctfError(
                f"the model cannot be written as {kind.name} ({_cause(failure)}): try another format"
            ) from failure
        del program
        parity: dict[int, Parity] = {}
        control = None
        if check:
            tick("checking the file")
            images = generated_images(metadata) if images is None else images.to("cpu", torch.float32)
            parity, control = _check_parity(model, kind, written, metadata, images)
            for each in parity.values():
                judge(kind.name, each, control, exact=exact, slack=_INT8_SLACK if int8 else 2)
        files = _move(written, file)
    return ExportReport(file, files, metadata, parity, control)


def check_precision(precision: str | None, dtype: str = DTYPES[0]) -> tuple[str, bool]:
    """The dtype of a file, and whether its linear layers are int8; raises MctfError for what no file holds."""
    if precision is None:
        return dtype, False
    if precision == "fp8":
        raise MctfError(
            "exported files are never fp8, which is for PyTorch on a GPU (mctf.quantize): choose int8 or bf16"
        )
    named = {short: each for each, short in SHORT_NAMES.items()} | {"int8": DTYPES[0]}
    if precision not in named:
        hint = did_you_mean(precision, named) if isinstance(precision, str) else f"choose from {', '.join(named)}"
        raise MctfError(f"precision {shown(precision)} is unknown: {hint}")
    if dtype not in (DTYPES[0], named[precision]):
        raise MctfError(f"precision {precision} and dtype {dtype} contradict each other: give one of them")
    return named[precision], precision == "int8"


def make_graph(model: nn.Module, size: tuple[int, int], *, batch: int | None, kind: Format) -> ExportedProgram:
    """The operations of a model as one graph, its batch free where `batch` is None."""
    example = torch.zeros(batch or 2, 3, *size)  # a batch of 1 would be fixed
    shapes = None if batch else ({0: torch.export.Dim("batch", min=1, max=1 << 16)},)
    _without_masks(model)
    try:
        with torch.no_grad(), onnx_operators() if "onnx" in kind.packages else nullcontext():
            program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
    except Exception as failure:  # whatever a model's own code does with sizes
        if is_out_of_memory(failure):
            raise
        raise MctfError(
            f"the model cannot be exported ({_cause(failure)}): a fixed batch (batch=1, --batch 1) may help"
        ) from failure
    own = sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("mctf.")})
    if own:
        raise MctfError(
            f"the model calls {own[0]}, which other runtimes do not have: export it with ward, mctf or tome"
        )
    return program


def _cause(failure: BaseException) -> str:
    """One line of the first of the errors behind an error: converters wrap them in pages of advice."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return first_line(failure)[:200]


class _Float32(nn.Module):
    """A model of some dtype that takes and returns float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.model(images.to(self.dtype))
        if isinstance(self.model, ImageModel) and has_projection(self.model):
            outputs = self.model.projection(outputs)
        return outputs.to(torch.float32)


def _tensor_model(model: Any) -> nn.Module:
    """The model itself, or one of transformers as a model that takes images and returns one tensor."""
    if not hasattr(model, "config") or not hasattr(model, "main_input_name"):
        return model
    return ImageModel.of(model, {}, keep_projection=True).eval()


def _without_masks(model: nn.Module) -> None:
    """Let a model of transformers build no attention masks: while it is exported it would, though nothing is masked."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = [config for config in configs if hasattr(config, "_attn_implementation")]
    if not configs:
        return
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name = "mctf_export"
    transformers.AttentionInterface.register(name, sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(name, lambda *_, **__: None)
    for config in configs:
        config._attn_implementation = name


def check_request(path: object, format: object) -> tuple[Format, Path]:
    """The format and the file to write; raises MctfError where it cannot be written, or a package is missing."""
    kind = find_format(format)
    if not isinstance(path, (str, PathLike)) or not str(path):
        raise MctfError(f"path={shown(path)} is no file name: write model{kind.suffix}")
    file = Path(path)
    if file.suffix != kind.suffix:
        raise MctfError(f"{file.name} should end in {kind.suffix}, as {kind.name} files do")
    check_target(file)
    if file.exists() and not file.is_file():
        raise MctfError(f"{file} is not a regular file: choose another file")
    for other in kind.files(file)[1:]:
        if file.is_symlink():
            raise MctfError(f"{file} is a link, and {other.name} lies beside the file: name the file itself")
        check_target(other)
        if other.exists() and not (file.exists() and other.is_file()):
            raise MctfError(f"{other} would be overwritten, and belongs to no {file.name}: choose another name")
    kind.check_packages()
    return kind, file


def refuse_adaptive(method: Method) -> NoReturn:
    """Raise MctfError for a method whose shapes depend on the images."""
    raise MctfError(
        f"{method.name} keeps as many tokens as each image needs, so its shapes depend on the data, which an exported "
        "graph cannot: choose ward, mctf or another method of fixed counts"
    )


def _check_images(images: object, size: tuple[int, int], name: str = "images") -> None:
    if images is None:
        return
    shape = tuple(images.shape) if isinstance(images, Tensor) else None
    if shape is None or len(shape) != 4 or shape[0] == 0 or shape[1:] != (3, *size):
        got = shown(images) if shape is None else " x ".join(map(str, shape))
        raise MctfError(f"{name} should be a tensor of B x 3 x {size[0]} x {size[1]}, got {got}")


@torch.inference_mode()
def _check_parity(
    model: nn.Module, kind: Format, path: Path, metadata: ExportMetadata, images: Tensor
) -> tuple[dict[int, Parity], Parity]:
    """Figures of the file by batch size, and of the control."""
    if metadata.batch is not None:
        whole = len(images) // metadata.batch * metadata.batch
        images = images[:whole] if whole else images.repeat(metadata.batch, 1, 1, 1)[: metadata.batch]
    classifies = metadata.output == "logits"
    reference = run_batches(_Float32(model, torch.float32), images, _LARGER_BATCH)
    if not reference.isfinite().all():
        raise MctfError(
            "the model gives values that are not finite on the images of the check: check images and weights, or pass "
            "check=False (--no-check)"
        )
    other = torch.float64 if metadata.dtype == "float32" else getattr(torch, metadata.dtype)
    compared = _Float32(copy.deepcopy(model), other)
    if metadata.precision == "int8":
        compared = _Float32(quantize(copy.deepcopy(model), "int8"), torch.float32)
    control = run_batches(compared, images, _LARGER_BATCH)
    try:
        run, _ = open_file(kind, path)
    except MctfError as failure:
        raise MctfError(
            f"{kind.name} does not run the file in {metadata.dtype} here ({_cause(failure)}): nothing was written; "
            "choose another dtype, or --no-check to write it for another machine"
        ) from failure
    sizes = (1, min(_LARGER_BATCH, len(images))) if metadata.batch is None else (metadata.batch,)
    parity = {}
    for size in dict.fromkeys(sizes):
        try:
            outputs = run_batches(run, images, size)
        except Exception as failure:
            raise MctfError(
                f"the {kind.name} file does not run at batch {size} ({_cause(failure)}): nothing was written"
            ) from failure
        parity[size] = Parity.of(outputs, reference, classifies=classifies)
    return parity, Parity.of(control, reference, classifies=classifies)


def _move(written: Path, target: Path) -> tuple[Path, ...]:
    """Move all files of an export beside their target, the named one last; a reader never sees it without the rest."""
    folder = target.resolve().parent
    others = sorted(path for path in written.parent.iterdir() if path != written)
    for path in (*others, written):
        os.replace(path, folder / path.name if path != written else target.resolve())
    return (target, *(target.parent / path.name for path in others))
