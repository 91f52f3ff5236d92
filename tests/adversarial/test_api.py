"""Bad arguments of the Python API: MctfError in one line or the right result; the model is unchanged and fuses on."""

import itertools
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

import mctf
import mctf.models  # registers `embedded_small` with timm
from helpers.models import make, make_images, run
from helpers.refusals import snapshot
from mctf.core.schedule import make_schedule
from mctf.errors import is_out_of_memory, one_line, shown
from mctf.hosts import _REGISTERED, find_host
from mctf.methods import _REGISTRY, Method
from mctf.models.loading import load_described, load_model

Record = Callable[[str, object], None]
NAN, INF = float("nan"), float("inf")


class Hostile:
    """An object whose text and comparisons fail."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


# what nobody should pass as a number, a name or a flag
NONSENSE: dict[str, Any] = {
    "nan": NAN,
    "inf": INF,
    "minus_inf": -INF,
    "400_digits": 10**400,
    "5000_digits": 10**5000,
    "minus_400_digits": -(10**400),
    "minus_one": -1,
    "text": "x",
    "newline": "a\nb\x1b[31m",
    "long_text": "x" * 100_000,
    "list": [[1]],
    "dict": {"a": 1},
    "set": {1},
    "bytes": b"abcd",
    "tensor": torch.rand(30, 30),
    "array": np.zeros(3),
    "numpy_nan": np.float32(NAN),
    "decimal": Decimal("NaN"),
    "fraction": Fraction(10**400, 3),
    "complex": 1j,
    "class": int,
    "function": len,
    "module": nn.Linear(1, 1),
    "hostile": Hostile(),
    "ellipsis": ...,
}


@pytest.fixture(scope="module")
def model() -> Any:
    """One model for all cases: none may change it."""
    return make("plain")


@pytest.fixture(scope="module")
def images(model: Any) -> torch.Tensor:
    return make_images(model, 2)


@pytest.fixture(autouse=True)
def unchanged(model: Any, images: torch.Tensor) -> Iterator[None]:
    before = snapshot(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    yield
    assert snapshot(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def refused(call: Callable[[], object], says: str = "") -> None:
    """The call raises MctfError in one printable line of bounded length."""
    with pytest.raises(mctf.MctfError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text == one_line(text)
    assert 10 < len(text) < 700
    assert says in text


def still_fuses(model: Any, images: torch.Tensor) -> None:
    with torch.no_grad():
        before = run(model, images)
        assert run(mctf.fuse(model, r=4), images).isfinite().all()
        assert torch.equal(run(mctf.unfuse(model), images), before)


OPTIONS = [(name, field.name) for name, cls in _REGISTRY.items() for field in fields(cls)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_options_of_methods(
    method: str, option: str, model: Any, images: torch.Tensor, record_property: Record
) -> None:
    for value in NONSENSE.values():
        refused(lambda value=value: mctf.fuse(model, method, **{option: value}), option)  # type: ignore[misc]
        refused(lambda value=value: mctf.plan(model, method=method, **{option: value}), option)  # type: ignore[misc]
    record_property("cases", ["api", 2 * len(NONSENSE)])


@pytest.mark.parametrize("value", NONSENSE)
def test_arguments(value: str, model: Any, images: torch.Tensor, tmp_path: Path, record_property: Record) -> None:
    given = NONSENSE[value]
    calls: list[Callable[[], object]] = [
        lambda: mctf.fuse(given) if value != "module" else mctf.fuse(nn.Linear(1, 1)),
        lambda: mctf.fuse(model, given),
        lambda: mctf.fuse(model, r=given),
        lambda: mctf.fuse(model, r=[given] * 4),
        lambda: mctf.fuse(model, r=3, blocks=[given] if value != "minus_one" else [-5]),
        lambda: mctf.fuse(model, dense=given),
        lambda: mctf.fuse(model, trim_last=given),
        lambda: mctf.fuse(model, restore=given),
        lambda: mctf.unfuse(given),
        lambda: mctf.set_r(given, 3),
        lambda: mctf.load(given),
        lambda: mctf.save(given, tmp_path / "x.safetensors"),
        lambda: mctf.plan(given),
        lambda: mctf.plan(model, r=given),
        lambda: mctf.fuse(model, flops=given),
        lambda: mctf.plan(model, flops=given),
        lambda: mctf.fuse(model, schedule=given),
        lambda: mctf.plan(model, schedule=given),
        lambda: mctf.plan(model, method=given),
        lambda: mctf.plan(model, image_size=given),
        lambda: mctf.plan(model, image_size=(64, given)),
        lambda: mctf.plan(model, dense=given),
        lambda: mctf.plan(model, trim_last=given),
        lambda: mctf.plan(model, architecture=given),
        lambda: mctf.trace(given).__enter__(),
        lambda: mctf.register_host(given, len),
        lambda: mctf.register_method(given),
        lambda: mctf.export(given, "out.pt2", "pt2"),
        lambda: mctf.export(model, given, "pt2"),
        lambda: mctf.export(model, "out.pt2", given),
        lambda: mctf.export(model, "out.pt2", "pt2", batch=given),
        lambda: mctf.export(model, "out.pt2", "pt2", dtype=given),
        lambda: mctf.export(model, "out.pt2", "pt2", images=given),
        lambda: mctf.export(model, "out.pt2", "pt2", check=given),
        lambda: mctf.load_exported(given),
    ]
    if value not in ("set", "dict", "class", "function"):
        calls.append(lambda: mctf.fuse(model, r=3, blocks=given))
    if value not in ("class", "function", "module"):
        calls.append(lambda: mctf.register_host(nn.Linear, given))
    for call in calls:
        refused(call)
    mctf.fuse(model, r=3)
    try:
        refused(lambda: mctf.set_r(model, given))
        assert model.blocks.r == 3
        with torch.no_grad(), mctf.trace(model) as trace:
            run(model, images)
        features = torch.zeros(2, trace.token_counts[-1])
        if value != "minus_one":
            refused(lambda: trace.source_map(given), "was not traced")
            refused(lambda: trace.dropped(given), "was not traced")
            refused(lambda: trace.unpool(features, given), "was not traced")
        refused(lambda: trace.unpool(given), "features must")
    finally:
        mctf.unfuse(model)
    still_fuses(model, images)
    record_property("cases", ["api", len(calls) + 5])


# r that is legal, and what it means in a model of four blocks
LEGAL_R: dict[str, tuple[Any, tuple[float, ...]]] = {
    "zero": (0, (0, 0, 0, 0)),
    "numpy_int": (np.int64(3), (0, 3, 3, 3)),
    "numpy_uint8": (np.uint8(3), (0, 3, 3, 3)),
    "numpy_float": (np.float64(0.5), (0, 0.5, 0.5, 0.5)),
    "fraction": (Fraction(1, 4), (0, 0.25, 0.25, 0.25)),
    "tiny": (1e-320, (0, 1e-320, 1e-320, 1e-320)),
    "minus_zero": (-0.0, (0, 0, 0, 0)),
    "range": (range(4), (0, 1, 2, 3)),
    "tuple": ((1, 0.5, 0, 2), (1, 0.5, 0, 2)),
    "huge": (2**31 - 1, (0, *[2**31 - 1] * 3)),
}


@pytest.mark.parametrize("case", LEGAL_R)
def test_legal_r(case: str, model: Any, images: torch.Tensor, record_property: Record) -> None:
    r, schedule = LEGAL_R[case]
    assert make_schedule(r, depth=4, blocks=None, default_blocks=range(1, 4)) == schedule
    plan = mctf.plan(model, r=r)
    assert plan.token_counts[-1] >= 1
    assert json.loads(json.dumps(plan.as_dict()))["r"] == (list(r) if isinstance(r, (tuple, range)) else r)
    mctf.fuse(model, r=r)
    try:
        assert model.blocks.schedule == schedule
        with torch.no_grad():
            assert run(model, images).isfinite().all()
        assert str(model)
    finally:
        mctf.unfuse(model)
    record_property("cases", ["api", 1])


REFUSED_R: dict[str, Any] = {
    "true": True,
    "numpy_bool": np.bool_(True),
    "one": 1.0,
    "almost_one": Fraction(10**400 - 1, 10**400),
    "above_one": 16.5,
    "text_number": "16 ",
    "tensor_number": torch.tensor(3),
    "tensor_list": torch.tensor([1, 2, 3, 4]),
    "array": np.array([1, 2, 3, 4]),
    "generator": (1 for _ in range(4)),
    "mapping": {0: 1},
    "bytes_of_four": b"1234",
    "none_in_list": [1, None, 1, 1],
    "nan_in_list": [NAN] * 4,
    "bool_in_list": [True] * 4,
    "nested": [[1]] * 4,
    "too_short": [1],
    "too_long": [1] * 100_000,
    "empty": [],
    "empty_text": "",
    "two_to_the_31": 2**31,
}


@pytest.mark.parametrize("case", REFUSED_R)
def test_refused_r(case: str, model: Any, record_property: Record) -> None:
    r = REFUSED_R[case]
    refused(lambda: mctf.fuse(model, r=r), "r")
    refused(lambda: mctf.plan(model, r=r), "r")
    mctf.fuse(model, r=3)
    try:
        refused(lambda: mctf.set_r(model, r), "r")
        assert model.blocks.r == 3
    finally:
        mctf.unfuse(model)
    record_property("cases", ["api", 3])


def failing() -> Iterator[int]:
    yield 1
    raise RuntimeError("no more")


REFUSED_BLOCKS: dict[str, Callable[[], Any]] = {
    "number": lambda: 3,
    "text": lambda: "1,2",
    "endless": lambda: itertools.count(),
    "endless_repeat": lambda: itertools.repeat(1),
    "failing": failing,
    "too_large": lambda: [4],
    "too_small": lambda: [-5],
    "bool": lambda: [True],
    "float": lambda: [1.0],
    "nan": lambda: [NAN],
    "none": lambda: [None],
    "nested": lambda: [[1]],
    "digits": lambda: [10**5000],
    "text_inside": lambda: ["1"],
    "tensor": lambda: torch.tensor([1, 2]),
    "tensor_number": lambda: torch.tensor(1),
    "bytes": lambda: b"12",
    "object": lambda: object(),
}


@pytest.mark.parametrize("case", REFUSED_BLOCKS)
def test_refused_blocks(case: str, model: Any, record_property: Record) -> None:
    for r in (3, "fast"):
        refused(lambda r=r: mctf.fuse(model, r=r, blocks=REFUSED_BLOCKS[case]()), "block")  # type: ignore[misc]
        refused(lambda r=r: mctf.plan(model, r=r, blocks=REFUSED_BLOCKS[case]()), "block")  # type: ignore[misc]
    record_property("cases", ["api", 4])


@pytest.mark.parametrize(
    ("blocks", "schedule"),
    [
        ([], (0, 0, 0, 0)),
        ([1, 1, -3], (0, 3, 0, 0)),
        ({2}, (0, 0, 3, 0)),
        (range(1, 3), (0, 3, 3, 0)),
        (np.array([0, 3]), (3, 0, 0, 3)),
        ((block for block in (1, 2)), (0, 3, 3, 0)),
        ([np.int8(-1)], (0, 0, 0, 3)),
    ],
)
def test_legal_blocks(blocks: Any, schedule: tuple[int, ...], model: Any, record_property: Record) -> None:
    mctf.fuse(model, r=3, blocks=blocks)
    try:
        assert model.blocks.schedule == schedule
    finally:
        mctf.unfuse(model)
    record_property("cases", ["api", 1])


REFUSED_SIZES = [1, 0, -1, 65, 10**9, "x", "64x", "x64", "", (1, 2, 3), [], (), NAN, INF, 64.0, True, None, "64x64x64"]


@pytest.mark.parametrize("size", REFUSED_SIZES, ids=str)
def test_refused_image_sizes(size: Any, model: Any, record_property: Record) -> None:
    if size is not None:
        refused(lambda: mctf.plan(model, image_size=size), "image")
        refused(lambda: mctf.plan("embedded_small", image_size=size), "image")
    refused(lambda: mctf.plan(model, image_size=(64, size)), "image")
    record_property("cases", ["api", 3])


NAMES = {
    "": "timm has no model",
    "a\nb": r"'a\nb'",
    "\x1b[31m": r"\x1b",
    "\ud800": r"\ud800",
    "x" * 10**5: "timm has no model",
    "../../etc/passwd": "timm has no model",
    "embedded.nothing": "embedded.nothing",
    "hf-hub:timm/x": "timm has no model",
    "resnet18": "ResNet",
    "swin_tiny_patch4_window7_224": "windows",
    "hf:": "hf: names no model",
    "hf: ": "hf: names no model",
    "hf:a\0b": "hf:",
    "hf:/etc/passwd": "there is no directory",
    "hf:/": "hf:/",
    "hf:" + "x/" * 3000: "hf:",
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_refused_names(name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(lambda: mctf.plan(name), NAMES[name])
    refused(lambda: load_model(name) if name not in ("resnet18", "swin_tiny_patch4_window7_224") else mctf.plan(name))
    record_property("cases", ["api", 2])


def without_blocks() -> Any:
    model = make("plain")
    del model.blocks
    return model


def with_part(**parts: Any) -> Any:
    model = make("plain")
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def with_other_block() -> Any:
    model = make("plain")
    model.blocks[1] = nn.Identity()
    return model


def quiet(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


REFUSED_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "expected a torch.nn.Module"),
    "name": (lambda: "embedded_small", "timm.create_model('embedded_small')"),
    "class": (lambda: timm.models.VisionTransformer, "expected a torch.nn.Module"),
    "state_dict": (lambda: make("plain").state_dict(), "expected a torch.nn.Module"),
    "list": (lambda: [make("plain")], "expected a torch.nn.Module"),
    "fused": (lambda: mctf.fuse(make("plain")), "fused already"),
    "compiled": (lambda: torch.compile(make("plain")), "mctf.fuse(model._orig_mod)"),
    "parallel": (lambda: nn.DataParallel(make("plain")), "mctf.fuse(model.module)"),
    "sequential": (lambda: nn.Sequential(make("plain"), nn.ReLU()), "get_submodule('0')"),
    "scripted": (lambda: quiet(lambda: torch.jit.script(nn.Linear(2, 2))), "not a supported model"),
    "linear": (lambda: nn.Linear(2, 2), "not a supported model"),
    "empty": (lambda: nn.Module(), "not a supported model"),
    "no_blocks": (without_blocks, "lacks parts"),
    "blocks_none": (lambda: with_part(blocks=None), "lacks parts"),
    "other_block": (with_other_block, "blocks.1 is a Identity"),
    "convolutional": (lambda: timm.create_model("test_resnet"), "cannot be fused"),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_refused_models(case: str, record_property: Record) -> None:
    build, text = REFUSED_MODELS[case]
    subject = build()
    before = snapshot(subject)
    refused(lambda: mctf.fuse(subject), text)
    assert snapshot(subject) == before
    if case not in ("name", "fused"):
        refused(lambda: mctf.plan(subject))
    record_property("cases", ["api", 2])


def test_wrapped_models_fuse_inside(images: torch.Tensor) -> None:
    inner = make("plain")
    wrapper = nn.Sequential(inner, nn.Identity())
    mctf.fuse(inner, r=4)
    with torch.no_grad():
        assert torch.equal(wrapper(images), inner(images))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["mctf", "dynamic_vit"])
def test_unfuse_through_a_wrapper(method: str) -> None:
    inner = make("plain")
    names = list(inner.state_dict())
    mctf.fuse(inner, method, r=0.3)
    mctf.unfuse(nn.Sequential(nn.Sequential(inner)))
    assert list(inner.state_dict()) == names


def test_two_fused_models_in_one_module() -> None:
    first, second = mctf.fuse(make("plain"), r=2), mctf.fuse(make("plain"), r=2)
    both = nn.ModuleList([first, second])
    for call in (lambda: mctf.set_r(both, 5), lambda: mctf.unfuse(both), lambda: mctf.trace(both).__enter__()):
        refused(call, "the module holds 2 fused models (0.blocks, 1.blocks, …): pass one of them")
    assert (first.blocks.r, second.blocks.r) == (2, 2)


def test_a_block_that_occurs_twice_runs_twice(images: torch.Tensor) -> None:
    model = make("plain")
    model.blocks[3] = model.blocks[2]
    with torch.no_grad():
        expected = run(model, images)
        assert torch.equal(run(mctf.fuse(model, r=0), images), expected)
        mctf.set_r(model, 4)
        with mctf.trace(model) as trace:
            run(model, images)
        assert list(trace.token_counts) == list(mctf.plan(model, r=4).token_counts)
        assert len(trace.token_counts) == 4
        assert torch.equal(run(mctf.unfuse(model), images), expected)


def test_threads_that_fuse_one_model(images: torch.Tensor) -> None:
    model, outcomes, together = make("plain"), [], threading.Barrier(4)

    def fuse() -> None:
        together.wait()
        try:
            mctf.fuse(model, r=3)
        except mctf.MctfError:
            outcomes.append("refused")
        else:
            outcomes.append("fused")

    threads = [threading.Thread(target=fuse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["fused", "refused", "refused", "refused"]
    mctf.unfuse(model)
    assert type(model.blocks) is nn.Sequential


def test_a_model_without_memory_fuses() -> None:
    model = make("plain").to("meta")
    mctf.fuse(model, r=4)
    assert model(torch.zeros(2, 3, 64, 64, device="meta")).shape == (2, 10)


@pytest.fixture
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("default_float64")
@pytest.mark.parametrize("method", _REGISTRY)
def test_the_default_dtype_does_not_matter(method: str, model: Any, images: torch.Tensor) -> None:
    mctf.fuse(model, method, r=4)
    try:
        with torch.no_grad():
            assert run(model, images).dtype == torch.float32
    finally:
        mctf.unfuse(model)
    gflops = mctf.plan(model, method=method, r=4).gflops
    torch.set_default_dtype(torch.float32)
    assert mctf.plan(model, method=method, r=4).gflops == gflops


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", _REGISTRY)
def test_the_default_device_does_not_matter(method: str, model: Any, images: torch.Tensor) -> None:
    with torch.device("meta"):
        mctf.fuse(model, method, r=4)
    try:
        with torch.no_grad():
            assert run(model, images).isfinite().all()
    finally:
        mctf.unfuse(model)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_fuses(images: torch.Tensor) -> None:
    from torch.ao.quantization import quantize_dynamic

    model = quantize_dynamic(make("plain"), {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        assert torch.equal(run(mctf.fuse(model, r=0), images), run(mctf.unfuse(model), images))
        assert run(mctf.fuse(model, r=4), images).isfinite().all()


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (object, "<class 'object'>, fails (TypeError"),
        (lambda model: None, "gives None"),
        (lambda model: 1 / 0, "ZeroDivisionError"),
        (int, "<class 'int'>, fails"),
        (type, "gives <class"),
    ],
)
def test_registered_hosts_are_named(host: Any, says: str, record_property: Record) -> None:
    mctf.register_host(nn.Linear, host)
    try:
        for call in (mctf.fuse, mctf.plan, find_host):
            refused(lambda call=call: call(nn.Linear(1, 1)), "the host registered for Linear")  # type: ignore[misc]
            refused(lambda call=call: call(nn.Linear(1, 1)), says)  # type: ignore[misc]
    finally:
        del _REGISTERED[nn.Linear]  # other tests have hosts of their own
    record_property("cases", ["api", 3])


def test_registered_methods_are_checked(images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_nothing(self: Any, *_: Any) -> None:
        return None

    refused(lambda: mctf.register_method(type("A", (Method,), {"name": "a"})), "lacks run")
    for name in (None, 3, "", "two words", "a-b", "1a", "a\nb"):
        attributes = {"run": run_nothing, "name": name}
        refused(lambda attributes=attributes: mctf.register_method(type("A", (Method,), attributes)), "A.name")  # type: ignore[misc]
    refused(lambda: mctf.register_method(type("A", (Method,), {"run": run_nothing})), "A.name")
    monkeypatch.setattr("mctf.methods._REGISTRY", dict(_REGISTRY))
    mctf.register_method(type("A", (Method,), {"run": run_nothing, "name": "nothing_at_all"}))
    model = mctf.fuse(make("plain"), "nothing_at_all")
    refused(lambda: run(model, images), "return a BlockOutput")


INPUTS: dict[str, Any] = {
    "three_axes": torch.zeros(3, 64, 64),
    "five_axes": torch.zeros(1, 1, 3, 64, 64),
    "no_axes": torch.tensor(1.0),
    "grey": torch.zeros(1, 1, 64, 64),
    "four_channels": torch.zeros(1, 4, 64, 64),
    "other_size": torch.zeros(1, 3, 63, 64),
    "no_pixels": torch.zeros(1, 3, 0, 0),
    "int64": torch.zeros(1, 3, 64, 64, dtype=torch.int64),
    "uint8": torch.zeros(1, 3, 64, 64, dtype=torch.uint8),
    "bool": torch.zeros(1, 3, 64, 64, dtype=torch.bool),
    "float16": torch.zeros(1, 3, 64, 64, dtype=torch.float16),
    "float64": torch.zeros(1, 3, 64, 64, dtype=torch.float64),
    "complex": torch.zeros(1, 3, 64, 64, dtype=torch.complex64),
    "sparse": torch.zeros(1, 3, 64, 64).to_sparse(),
    "meta": torch.zeros(1, 3, 64, 64, device="meta"),
    "nan": torch.full((1, 3, 64, 64), NAN),
    "inf": torch.full((1, 3, 64, 64), INF),
    "array": np.zeros((1, 3, 64, 64), np.float32),
    "none": None,
    "text": "image",
    "list": [[1.0]],
}


def outcome(model: Any, given: Any) -> tuple[Any, ...]:
    """The class of the exception; or shape, dtype and whether anything is undefined."""
    try:
        with torch.no_grad():
            result = model(given)
    except Exception as failure:
        return (type(failure),)
    return result.shape, result.dtype, result.is_meta or bool(result.isnan().any())


@pytest.mark.parametrize("case", INPUTS)
def test_model_inputs(case: str, model: Any, images: torch.Tensor, record_property: Record) -> None:
    expected = outcome(model, INPUTS[case])
    with torch.no_grad():
        right = run(model, images)
    for method in _REGISTRY:
        quiet(lambda method=method: mctf.fuse(model, method, r=4))  # type: ignore[misc]
        try:
            assert outcome(model, INPUTS[case]) in (expected, (mctf.MctfError,)), method
            with torch.no_grad():
                assert run(model, images).shape == right.shape
        finally:
            mctf.unfuse(model)
    with torch.no_grad():
        assert torch.equal(run(model, images), right)
    record_property("cases", ["api", len(_REGISTRY)])


class TestTracing:
    OTHER_THREAD = "the model ran in another thread than `mctf.trace`, which records its own thread alone"

    def test_a_model_that_runs_in_another_thread(self, images: torch.Tensor) -> None:
        model = mctf.fuse(make("plain"), r=4)
        with mctf.trace(model) as trace, ThreadPoolExecutor(1) as pool:
            pool.submit(model, images).result()
        for read in (lambda: trace.blocks, lambda: trace.token_counts, trace.source_map, trace.dropped):
            refused(read, self.OTHER_THREAD)
        assert repr(trace) == "Trace(token_counts=[])"

    def test_both_threads(self, images: torch.Tensor) -> None:
        model = mctf.fuse(make("plain"), r=4)
        with mctf.trace(model) as trace:
            model(images)
            thread = threading.Thread(target=model, args=(images[:1],))
            thread.start()
            thread.join()
        assert trace.source_map().shape[0] == 2

    def test_nothing_ran(self) -> None:
        with mctf.trace(mctf.fuse(make("plain"), r=4)) as trace:
            pass
        refused(lambda: trace.blocks, "nothing was traced yet")

    def test_an_unfused_model(self, model: Any) -> None:
        refused(lambda: mctf.trace(model).__enter__(), "run mctf.fuse(model, r=16) first")

    def test_nested(self, images: torch.Tensor) -> None:
        model = mctf.fuse(make("plain"), r=4)
        with torch.no_grad(), mctf.trace(model) as outer:
            with mctf.trace(model) as inner:
                model(images)
            model(images[:1])
        assert (outer.source_map().shape[0], inner.source_map().shape[0]) == (1, 2)

    def test_a_failed_pass_ends_the_trace_and_leaves_the_model(self, images: torch.Tensor) -> None:
        model = mctf.fuse(make("plain"), r=4)
        with pytest.raises(RuntimeError), mctf.trace(model):
            model(images[:, :1])
        assert not model.blocks._observers
        assert model(images).isfinite().all()

    @torch.no_grad()
    @pytest.mark.slow
    def test_a_compiled_model(self, images: torch.Tensor) -> None:
        torch.compiler.reset()
        model = mctf.fuse(make("plain", depth=2), r=[0, 4])
        compiled = torch.compile(model, backend="eager")
        with mctf.trace(compiled) as trace:
            compiled(images)
        with mctf.trace(model) as expected:
            model(images)
        assert trace.token_counts == expected.token_counts
        assert torch.equal(trace.source_map(), expected.source_map())


def test_out_of_memory_is_recognized() -> None:
    for call in (lambda: torch.empty(10**15), lambda: torch.empty(10**12, 10**12), lambda: bytearray(10**16)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            call()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not any(is_out_of_memory(error) for error in (RuntimeError("shapes differ"), OSError(2, "x"), KeyError(1)))


@pytest.mark.parametrize("load", [load_model, lambda name, image_size: load_described(
    name, weights=None, random=True, image_size=image_size
)])  # fmt: skip
def test_images_that_are_too_large_for_the_memory(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: Any, **__: Any) -> nn.Module:
        return torch.empty(10**15)  # type: ignore[return-value]

    monkeypatch.setattr(timm, "create_model", create)
    refused(
        lambda: load("embedded_small", image_size=(4096, 4096)),
        "embedded_small for images of 4096x4096 does not fit into memory",
    )


def test_messages_are_one_bounded_line() -> None:
    error = mctf.MctfError("a\nb\rc\x1b[31m\u2028\u202e\ud800 é 🦊 " + "x" * 10_000)
    assert str(error).startswith(r"a\nb\rc\x1b[31m\u2028\u202e\ud800 é 🦊 xxx")
    assert len(str(error)) < 700
    assert shown(Hostile()) == "<Hostile>"
    assert shown(10**5000) == "<int>"
    assert len(shown("x" * 1000)) == 80
