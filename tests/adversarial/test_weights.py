"""Bad weights: each file is refused in one line that names the tensor or the file, and the model is unchanged."""

import io
import json
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

import mctf
from helpers.refusals import assert_refused
from mctf.models.loading import load_model, load_weights
from mctf.models.state_dict import read_state_dict

State = dict[str, Tensor]
NAN, INF = float("nan"), float("inf")


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3).eval()


@pytest.fixture(scope="module")
def state(model: nn.Module) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


def cast(dtype: torch.dtype) -> Callable[[State], State]:
    return lambda state: {key: value.to(dtype) for key, value in state.items()}


def with_head(change: Callable[[Tensor], object]) -> Callable[[State], dict[Any, Any]]:
    return lambda state: {**state, "head.weight": change(state["head.weight"])}


def set_first(number: float) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight[0, 0] = number
        return weight

    return change


def quantized(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)


# contents of a .pth file, and a part of the message
REFUSED_CONTENTS: dict[str, tuple[Callable[[State], Any], str]] = {
    "int8": (cast(torch.int8), "as int8, and the model computes in float32: save it as floating point"),
    "int64": (cast(torch.int64), "as int64"),
    "uint8": (with_head(lambda weight: weight.to(torch.uint8)), "head.weight as uint8"),
    "bool": (with_head(lambda weight: weight > 0), "head.weight as bool"),
    "complex": (with_head(lambda weight: weight.to(torch.complex64)), "head.weight as complex64"),
    "sparse": (with_head(lambda weight: weight.to_sparse()), "head.weight is a tensor of layout sparse_coo"),
    "csr": (with_head(lambda weight: weight.to_sparse_csr()), "layout sparse_csr: save it dense"),
    "quantized": (with_head(quantized), "head.weight is quantized"),
    "meta": (with_head(lambda weight: weight.to("meta")), "head.weight has a shape but no values"),
    "nan": (with_head(set_first(NAN)), "NaN or infinite values in head.weight"),
    "inf": (with_head(set_first(INF)), "NaN or infinite values in head.weight"),
    "minus_inf": (with_head(set_first(-INF)), "NaN or infinite values in head.weight"),
    "all_nan": (lambda state: {key: value * NAN for key, value in state.items()}, "NaN or infinite"),
    "too_large": (with_head(lambda weight: set_first(1e300)(weight.double())), "NaN or infinite values in head.weight"),
    "expanded": (with_head(lambda weight: torch.zeros(1).expand(10**12, 64)), "more than the file holds"),
    "transposed": (with_head(lambda weight: weight.T), "head.weight is (64, 3), not"),
    "scalar": (with_head(lambda weight: weight.sum()), "head.weight is ()"),
    "no_rows": (with_head(lambda weight: weight[:0]), "head.weight is (0, 64)"),
    "no_columns": (with_head(lambda weight: weight[:, :0]), "head.weight is (3, 0)"),
    "list_value": (with_head(lambda weight: weight.tolist()), "'head.weight' is a list"),
    "none_value": (with_head(lambda weight: None), "'head.weight' is a NoneType"),
    "number_key": (lambda state: {**state, 3: torch.zeros(1)}, "3 is no name"),
    "number_keys": (lambda state: dict(enumerate(state.values())), "0 is no name"),
    "tuple_key": (lambda state: {("a", 1): torch.zeros(1)}, "('a', 1) is no name"),
    "newline_key": (lambda state: {**state, "a\nb\x1b[31m": torch.zeros(1)}, "unexpected a\\nb\\x1b[31m"),
    "empty_key": (lambda state: {**state, "": torch.zeros(1)}, "unexpected"),
    "long_key": (lambda state: {**state, "k" * 100_000: torch.zeros(1)}, "unexpected kkk"),
    "both_prefixed": (lambda state: {**state, "module.head.bias": torch.zeros(3)}, "unexpected module.head.bias"),
    "empty_dict": (lambda state: {}, "it is empty"),
    "empty_wrapped": (lambda state: {"state_dict": {}}, "it is empty"),
    "list": (lambda state: list(state.values()), "not a list"),
    "tensor": (lambda state: torch.zeros(3), "not a Tensor"),
    "number": (lambda state: 3, "not a int"),
    "none": (lambda state: None, "not a NoneType"),
    "text": (lambda state: "weights", "not a str"),
    "wrapped_list": (lambda state: {"state_dict": [1, 2, 3]}, "'state_dict' is a list"),
    "other_wrapper": (lambda state: {"net": state}, "'net' is a dict"),
    "lacking": (lambda state: {"head.bias": state["head.bias"]}, "it lacks blocks.0"),
    "object": (lambda state: {"state_dict": state, "args": Path("/")}, "holds Python objects beside tensors"),
    "module": (lambda state: nn.Linear(2, 2), "holds Python objects beside tensors"),
    "learned_nan": (lambda state: {**state, "token_reduction.1.weight": torch.full((2,), NAN)}, "NaN or infinite"),
    "learned_int": (lambda state: {**state, "token_reduction.1.weight": torch.ones(2).int()}, "as int32"),
}


@pytest.mark.parametrize("case", REFUSED_CONTENTS)
def test_refused_contents(
    case: str, model: nn.Module, state: State, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    make, text = REFUSED_CONTENTS[case]
    path = tmp_path / "bad.pth"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(make(state), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_refused(model, text, lambda: load_weights(model, path))
        assert_refused(model, "bad.pth", lambda: load_model("test_vit", weights=path))
    record_property("cases", ["weights", 2])


def nested(state: State) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"head.weight": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}


def test_nested_tensors_are_refused(state: State, tmp_path: Path) -> None:
    torch.save(nested(state), tmp_path / "nested.pth")
    assert_refused(None, "nested.pth", lambda: read_state_dict(tmp_path / "nested.pth"))


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def torch_bytes(contents: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(contents, file, **options)
    return file.getvalue()


def bomb(state: State) -> bytes:
    """An archive of PyTorch's whose one tensor inflates a thousandfold."""
    source = zipfile.ZipFile(io.BytesIO(torch_bytes({"a": torch.zeros(1 << 22)})))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, source.read(entry))
    return target.getvalue()


def other_archive(state: State) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("readme.txt", "hello")
    return target.getvalue()


def scripted(state: State) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)
    return file.getvalue()


# bytes of a file, and a part of the message
REFUSED_FILES: dict[str, tuple[str, Callable[[State], bytes], str]] = {
    "empty": ("a.pth", lambda state: b"", "is empty: fetch it again"),
    "empty_safetensors": ("a.safetensors", lambda state: b"", "is empty"),
    "text": ("a.pth", lambda state: b"not weights at all", "does not begin as a PyTorch or .safetensors file"),
    "text_safetensors": ("a.safetensors", lambda state: b"not weights", "does not begin as a .safetensors file"),
    "json": ("a.safetensors", lambda state: b'{"a": 1}' * 9, "cannot be read as weights"),
    "page": ("a.pth", lambda state: b"<!DOCTYPE html><html>404</html>", "is a web page"),
    "page_indented": ("a.safetensors", lambda state: b"\n\n <HTML>", "is a web page"),
    "git_lfs": ("a.pt", lambda state: b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
    "one_byte": ("a.pth", lambda state: b"\x80", "holds Python objects"),
    "zeros": ("a.pth", lambda state: bytes(4096), "cannot be read as weights"),
    "all_bytes": ("a.pth", lambda state: bytes(range(256)) * 40, "cannot be read as weights"),
    "truncated": ("a.pth", lambda state: torch_bytes(state)[:-1000], "cannot be read as weights"),
    "truncated_early": ("a.pth", lambda state: torch_bytes(state)[:50], "cannot be read as weights"),
    "truncated_safetensors": ("a.safetensors", lambda state: save(state)[:-4], "cannot be read as weights"),
    "truncated_header": ("a.safetensors", lambda state: save(state)[:40], "cannot be read as weights"),
    "plain_pickle": ("a.pth", lambda state: pickle.dumps({"a": 1}), "holds Python objects"),
    "plain_pickle_4": ("a.pkl", lambda state: pickle.dumps(Path("/"), protocol=4), "holds Python objects"),
    "other_archive": ("a.pth", other_archive, "cannot be read as weights"),
    "empty_archive": ("a.pth", lambda state: b"PK\x05\x06" + bytes(18), "cannot be read as weights"),
    "archive_start": ("a.pth", lambda state: b"PK\x03\x04" + bytes(100), "cannot be read as weights"),
    "bomb": ("a.pth", bomb, "inflates from"),
    "torchscript": ("a.pt", scripted, "is a TorchScript program, which is not run"),
    "huge_header": ("a.safetensors", lambda state: safetensors_bytes(b"{}", length=2**63), "cannot be read"),
    "long_header": ("a.safetensors", lambda state: safetensors_bytes(b"{}", length=10**9), "cannot be read"),
    "short_header": ("a.safetensors", lambda state: safetensors_bytes({"a": 1}, length=3), "cannot be read"),
    "no_header": ("a.safetensors", lambda state: safetensors_bytes(b"", length=0), "cannot be read"),
    "empty_header": ("a.safetensors", lambda state: safetensors_bytes({}), "it is empty"),
    "lying_shape": (
        "a.safetensors",
        lambda state: safetensors_bytes({"a": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}}),
        "cannot be read as weights",
    ),
    "negative_offset": (
        "a.safetensors",
        lambda state: safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
        "cannot be read as weights",
    ),
    "unknown_dtype": (
        "a.safetensors",
        lambda state: safetensors_bytes({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        "cannot be read as weights",
    ),
    "deep_header": ("a.safetensors", lambda state: safetensors_bytes(b'{"a":' * 50_000), "cannot be read as weights"),
    "nan_safetensors": ("a.safetensors", lambda state: save({k: v * NAN for k, v in state.items()}), "NaN or infinite"),
    "int_safetensors": ("a.safetensors", lambda state: save({k: v.int() for k, v in state.items()}), "as int32"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_refused_files(
    case: str,
    model: nn.Module,
    state: State,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, make, text = REFUSED_FILES[case]
    (tmp_path / name).write_bytes(make(state))
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_refused(model, text, lambda: load_weights(model, tmp_path / name))
    assert capfd.readouterr() == ("", "")
    record_property("cases", ["weights", 1])


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_file_is_not_run_and_not_advised(tmp_path: Path, legacy: bool, model: nn.Module) -> None:
    contents = {"state_dict": model.state_dict(), "args": Trap(tmp_path / "sprung")}
    torch.save(contents, tmp_path / "evil.pth", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(mctf.MctfError) as caught:
        load_weights(model, tmp_path / "evil.pth")
    assert str(caught.value) == (
        f"{tmp_path}/evil.pth holds Python objects beside tensors, which are not loaded: save its state_dict, "
        "or use .safetensors"
    )
    assert not (tmp_path / "sprung").exists()


def test_only_regular_files_are_read(model: nn.Module, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "loop.pth").symlink_to(tmp_path / "loop.pth")
    (tmp_path / "broken.pth").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for path, text in [
        (tmp_path, "is a directory"),
        (tmp_path / "pipe.pth", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / "loop.pth", "cannot be read"),
        (tmp_path / "broken.pth", "there is no weights file"),
        (tmp_path / "file" / "a.pth", "there is no weights file"),
        (tmp_path / "nul\0.pth", "there is no weights file"),
        (tmp_path / ("long" * 100), "cannot be read"),
        (tmp_path / "new\nline.pth", "there is no weights file"),
        (Path(""), "is a directory"),
    ]:
        assert_refused(model, text, lambda path=path: load_weights(model, path))  # type: ignore[misc]


# legal files: what they hold is what the model gets
TAKEN: dict[str, tuple[str, Callable[[State], bytes]]] = {
    "float16": ("a.pth", lambda state: torch_bytes(cast(torch.float16)(state))),
    "bfloat16": ("a.pth", lambda state: torch_bytes(cast(torch.bfloat16)(state))),
    "float64": ("a.pth", lambda state: torch_bytes(cast(torch.float64)(state))),
    "float8": ("a.safetensors", lambda state: save(cast(torch.float8_e4m3fn)(state))),
    "safetensors_named_pth": ("a.pth", lambda state: save(state)),
    "pth_named_safetensors": ("a.safetensors", lambda state: torch_bytes(state)),
    "no_suffix": ("weights", lambda state: torch_bytes(state)),
    "legacy": ("a.pth", lambda state: torch_bytes(state, _use_new_zipfile_serialization=False)),
    "parameters": ("a.pth", lambda state: torch_bytes({key: nn.Parameter(value) for key, value in state.items()})),
    "ordered": ("a.pth", lambda state: torch_bytes(OrderedDict(state))),
    "views": ("a.pth", lambda state: torch_bytes({key: value.T.contiguous().T for key, value in state.items()})),
    "emoji": ("🦊 a'b\"c.pth", lambda state: torch_bytes(state)),
}


@pytest.mark.filterwarnings("ignore:The use of .x.T. on tensors")
@pytest.mark.parametrize("case", TAKEN)
def test_legal_files(case: str, state: State, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    name, make = TAKEN[case]
    (tmp_path / name).write_bytes(make(state))
    loaded = load_model("test_vit", weights=tmp_path / name)
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float8": 0.1}.get(case, 0.0)
    for key, value in loaded.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=tolerance, atol=tolerance / 10)
    mctf.fuse(loaded, r=4)
    assert loaded(torch.zeros(1, 3, 160, 160)).isfinite().all()
    record_property("cases", ["weights", 1])


def test_a_batch_norm_counter_stays_an_integer(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet").eval()
    state = model.state_dict()
    key = next(key for key, value in state.items() if not value.is_floating_point())
    torch.save({**state, key: torch.tensor(3.5)}, tmp_path / "a.pth")
    assert_refused(model, f"{key} as float32", lambda: load_weights(model, tmp_path / "a.pth"))
    torch.save({**state, key: torch.tensor(3, dtype=torch.int32)}, tmp_path / "a.pth")
    load_weights(model, tmp_path / "a.pth")
    assert model.state_dict()[key].dtype == torch.int64


@pytest.fixture(scope="module")
def saved_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from helpers.models import make

    folder = tmp_path_factory.mktemp("hf") / "good"
    make("hf_deit").save_pretrained(folder)
    return folder


def edit_config(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def edit_weights(change: Callable[[Tensor], Tensor]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        save_file(
            {key: change(value).contiguous() for key, value in state.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    return edit


def pickled(contents: Callable[[Path, State], Any]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(contents(folder, state), folder / "pytorch_model.bin")

    return edit


# changes of a directory written by save_pretrained, and a part of the message
REFUSED_DIRECTORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "empty_config": (lambda folder: (folder / "config.json").write_text(""), "cannot be loaded"),
    "text_config": (lambda folder: (folder / "config.json").write_text("hello"), "cannot be loaded"),
    "binary_config": (lambda folder: (folder / "config.json").write_bytes(bytes(range(256))), "cannot be loaded"),
    "list_config": (lambda folder: (folder / "config.json").write_text("[1]"), "cannot be loaded"),
    "deep_config": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be loaded"),
    "unknown_type": (edit_config(model_type="nonsense"), "cannot be loaded"),
    "no_type": (edit_config(model_type=None), "cannot be loaded"),
    "other_type": (edit_config(model_type="resnet", architectures=["ResNetForImageClassification"]), ""),
    "text_model": (edit_config(model_type="bert", architectures=["BertModel"]), ""),
    "other_width": (edit_config(hidden_size=96), ""),
    "huge_width": (edit_config(hidden_size=10**9), ""),
    "text_width": (edit_config(hidden_size="wide"), ""),
    "negative_depth": (edit_config(num_hidden_layers=-1), ""),
    "remote_code": (
        edit_config(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}),
        "brings code of its own, which is not run",
    ),
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    "empty_weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is empty"),
    "text_weights": (
        lambda folder: (folder / "model.safetensors").write_text("hello" * 9),
        "cannot be read as weights",
    ),
    "nan_weights": (edit_weights(lambda value: value * NAN), "NaN or infinite values in"),
    "int_weights": (edit_weights(lambda value: value.to(torch.int8)), "as I8"),
    "pickled_object": (pickled(lambda folder, state: {**state, "x": Trap(folder / "sprung")}), "holds Python objects"),
    "preprocessing": (lambda folder: (folder / "preprocessor_config.json").write_text("[]"), "cannot be loaded"),
}


@pytest.mark.parametrize("case", REFUSED_DIRECTORIES)
def test_refused_directories(
    case: str,
    saved_hf: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "model"
    shutil.copytree(saved_hf, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    change, text = REFUSED_DIRECTORIES[case]
    change(folder)
    capfd.readouterr()
    assert_refused(None, text, lambda: load_model(f"hf:{folder}"))
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "sprung").exists()
    assert not (folder / "sprung").exists()
    record_property("cases", ["weights", 1])


def test_a_pickled_state_dict_of_transformers_is_read(saved_hf: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_hf, tmp_path / "model")
    pickled(lambda folder, state: state)(tmp_path / "model")
    loaded, expected = load_model(f"hf:{tmp_path / 'model'}"), load_model(f"hf:{saved_hf}")
    for key, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_headers_of_every_length(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The length comes first in the file: its lowest byte may be that of a pickle, 0x80, or any other multiple of 8."""
    seen = set()
    for length in range(0, 256, 8):
        path = tmp_path / "weights.safetensors"
        save_file({"head.weight": torch.ones(2)}, path, metadata={"note": "x" * length})
        seen.add(path.read_bytes()[0])
        assert torch.equal(read_state_dict(path)["head.weight"], torch.ones(2))
    assert seen == set(range(0, 256, 8))
    record_property("cases", ["weights", 32])
