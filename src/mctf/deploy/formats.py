"""Four file formats: how an exported graph is written in each, and how the file is loaded and run.

A writer takes a graph and a path in a folder of its own, and may write more files beside it. A loader gives a function
from float32 images (B 3 H W, contiguous) to float32 outputs (B K), and the text of the metadata.
"""

import io
import json
import logging
import re
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from .._utils import optional_import
from ..errors import MctfError, did_you_mean, shown
from .metadata import KEY

OPSET, BFLOAT16_OPSET = 20, 22  # the first with Gelu as one operator, and with bfloat16 convolutions
_LARGEST_ONNX = 1_800_000_000  # bytes; a protobuf ends at 2 GiB, and larger weights lie in a file of their own
_BATCH_SIZES = 4  # that OpenVINO keeps compiled
_METADATA_FILE = "mctf.json"
# Entries of a file of torch.export without Python objects.
_PT2_ENTRY = re.compile(
    r"models/model\.json|data/sample_inputs/model\.pt|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)|extra/.*|archive_format|archive_version|byteorder"
    r"|version|\.data/\w+"
)

Run = Callable[[Tensor], Tensor]
Finish = Callable[[Path], None] | None


@dataclass(frozen=True)
class Format:
    """suffix: of the file. packages: from the extra `export`. beside: suffix of a second file, of the same name.

    write: graph, path and metadata to files. Its last argument changes an ONNX file before it is used further.
    """

    name: str
    suffix: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, Path, str, Finish], None]
    load: Callable[[Path, int | None], tuple[Run, str | None]]
    beside: str | None = None

    def files(self, path: Path) -> tuple[Path, ...]:
        """The files of an export, `path` first."""
        return (path,) if self.beside is None else (path, path.with_suffix(self.beside))

    def check_packages(self) -> None:
        """Raise MctfError with the install line where a package of the extra is missing."""
        with _without_telemetry():
            for package in self.packages:
                optional_import(package, extra="export", purpose=f"{self.name} files")


def find_format(name: object) -> Format:
    if not isinstance(name, str) or name not in FORMATS:
        word = name if isinstance(name, str) else shown(name)
        raise MctfError(f"format {shown(name)} is unknown: {did_you_mean(word, FORMATS)}")
    return FORMATS[name]


def format_of(path: Path) -> Format | None:
    """The format of an exported file by its suffix and content; None for anything else."""
    if path.suffix not in SUFFIXES:
        return None
    if path.suffix != ".pt2":
        return next(each for each in FORMATS.values() if each.suffix == path.suffix)
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        compiled = any("/aotinductor/" in name for name in archive.namelist())
        return FORMATS["aoti" if compiled else "pt2"]
    return FORMATS["pt2"]


def _write_onnx(program: ExportedProgram, path: Path, metadata: str, finish: Finish = None) -> None:
    reduced = any(value.dtype == torch.bfloat16 for value in program.state_dict.values())
    opset = BFLOAT16_OPSET if reduced else OPSET
    table: Any = {torch.ops.aten.scaled_dot_product_attention.default: _onnx_attention()}
    with quiet():
        onnx_program: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            verbose=False,
            input_names=["images"],
            output_names=["outputs"],
            custom_translation_table=table,
        )
    onnx_program.model.metadata_props[KEY] = metadata
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    onnx_program.save(str(path), external_data=size > _LARGEST_ONNX)
    if finish is not None:
        finish(path)


def _onnx_attention() -> Callable[..., Any]:
    """softmax(q kT * scale + mask) v for tensors of four axes; the exporter's own works out all shapes at run time."""
    op: Any = import_module("onnxscript").opset20

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scaled = op.Mul(query, op.CastLike(op.Constant(value_float=float(factor)), query))
        logits = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
        if attn_mask is not None:
            logits = op.Add(logits, attn_mask)
        return op.MatMul(op.Softmax(logits, axis=-1), value)

    return attention


def _load_onnx(path: Path, threads: int | None) -> tuple[Run, str | None]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # idle threads take cores from other models
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (given,), (result,) = session.get_inputs(), session.get_outputs()

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([result.name], {given.name: images.numpy()})[0])

    return run, session.get_modelmeta().custom_metadata_map.get(KEY)


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """While open, OpenVINO is imported without the package that reports each use of it to its makers.

    The report is sent by a fork of this process, which has threads: the fork may wait for a lock that nobody holds any
    more, and Python waits for the fork when it ends. An OpenVINO that was imported before stays as it is.
    """
    name = "openvino_telemetry"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _write_openvino(program: ExportedProgram, path: Path, metadata: str, finish: Finish = None) -> None:
    with _without_telemetry():
        import openvino

    onnx_path = path.with_suffix(".onnx")
    _write_onnx(program, onnx_path, metadata, finish)
    with quiet():
        model = openvino.convert_model(str(onnx_path))
    for part in path.parent.glob(f"{onnx_path.name}*"):
        part.unlink()
    model.set_rt_info(metadata, [KEY])
    openvino.save_model(model, str(path), compress_to_fp16=False)


def _load_openvino(path: Path, threads: int | None) -> tuple[Run, str | None]:
    with _without_telemetry():
        import openvino

    with path.open("rb") as file:
        if b"<net" not in file.read(1000):  # OpenVINO would try its other readers, which print what they think
            raise MctfError("it is no model of OpenVINO")
    if not path.with_suffix(".bin").is_file():
        raise MctfError(f"there is no {path.with_suffix('.bin').name} beside it")
    core = openvino.Core()
    model = core.read_model(str(path))
    config = {"INFERENCE_NUM_THREADS": threads or torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    metadata = model.get_rt_info([KEY]).astype(str) if model.has_rt_info([KEY]) else None

    lock, own = threading.Lock(), threading.local()

    @lru_cache(maxsize=_BATCH_SIZES)
    def compiled(batch: int) -> Any:
        """The model for one batch size: with a free batch every operator works out its shapes in every pass."""
        fixed = model.clone()
        fixed.reshape({0: openvino.PartialShape([batch, *list(model.input(0).partial_shape)[1:]])})
        return core.compile_model(fixed, "CPU", config)

    compiled(1 if model.input(0).partial_shape[0].is_dynamic else model.input(0).partial_shape[0].get_length())

    def run(images: Tensor) -> Tensor:
        with lock:  # threads that miss the cache together would each compile
            network = compiled(len(images))
        if getattr(own, "network", None) is not network:  # threads that share a request read each other's outputs
            own.network, own.request = network, network.create_infer_request()
        return torch.from_numpy(own.request.infer([images.numpy()], share_inputs=True)[0].copy())

    return run, metadata


def _write_aoti(program: ExportedProgram, path: Path, metadata: str, finish: Finish = None) -> None:
    from torch._inductor import aoti_compile_and_package

    with quiet():
        aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": {KEY: metadata}}
        )


def _load_aoti(path: Path, threads: int | None) -> tuple[Run, str | None]:
    from torch._inductor import aoti_load_package

    model: Any = aoti_load_package(str(path))
    return torch.no_grad()(model), model.get_metadata().get(KEY)


def _write_pt2(program: ExportedProgram, path: Path, metadata: str, finish: Finish = None) -> None:
    torch.export.save(program, path, extra_files={_METADATA_FILE: metadata})


def _load_pt2(path: Path, threads: int | None) -> tuple[Run, str | None]:
    _refuse_pickles(path)
    extra = {_METADATA_FILE: ""}
    model: Any = torch.export.load(path, extra_files=extra).module()
    return torch.no_grad()(model), extra[_METADATA_FILE]


def _refuse_pickles(path: Path) -> None:
    """Raise MctfError for a file of torch.export with other entries than mctf writes: torch would unpickle them."""
    reader = torch._C.PyTorchFileReader(str(path))  # as torch reads it: two readers may see two archives in one file
    names = set(reader.get_all_records())
    refused = sorted(name for name in names if not _PT2_ENTRY.fullmatch(name))
    for name in names:
        if name.endswith("_config.json"):
            entries = json.loads(reader.get_record(name))["config"].values()
            refused += [name for each in entries if each["use_pickle"] is not False]
    try:
        torch.load(io.BytesIO(reader.get_record("data/sample_inputs/model.pt")), weights_only=True)
    except Exception:  # whatever damaged bytes make it raise
        refused.append("data/sample_inputs/model.pt")
    if refused:
        raise MctfError(f"{refused[0]} holds Python objects, which could run code")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress reports, warnings and logs of converters."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


FORMATS = {
    each.name: each
    for each in (
        Format("onnx", ".onnx", ("onnx", "onnxscript", "onnxruntime"), _write_onnx, _load_onnx),
        Format("openvino", ".xml", ("onnx", "onnxscript", "openvino"), _write_openvino, _load_openvino, ".bin"),
        Format("aoti", ".pt2", (), _write_aoti, _load_aoti),
        Format("pt2", ".pt2", (), _write_pt2, _load_pt2),
    )
}
SUFFIXES = tuple({each.suffix for each in FORMATS.values()})
