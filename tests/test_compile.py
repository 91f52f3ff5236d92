"""torch.compile of a fused model, as one graph, gives what the eager model gives."""

from shutil import which

import pytest
import torch

import mctf
from helpers.models import CHOSEN, METHODS, ONE_PER_OPS, REFERENCED, make, make_images, run

NIGHTLY = ("mctf_exact", "tome", "pitome", "atc")  # inductor takes long, and others cover their operations
with_inductor = [pytest.param(each, marks=pytest.mark.nightly if each in NIGHTLY else ()) for each in METHODS]
REDUCTIONS = [4, 6]  # of two blocks: compiling is slow


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


# one model per class of BlockOps; the rest of the chosen models are slow tests
BY_TURNS = [
    pytest.param(name, REFERENCED[index % 3], marks=() if name in ONE_PER_OPS else pytest.mark.slow)
    for index, name in enumerate(CHOSEN)
]


@pytest.mark.parametrize(("name", "method"), BY_TURNS)
@torch.no_grad()
def test_one_graph_equals_eager(name: str, method: str) -> None:
    model = make(name, depth=2)
    images = make_images(model, 2)
    mctf.fuse(model, method, r=REDUCTIONS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled, images), run(model, images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["mctf", "mctf_exact"])
@torch.no_grad()
def test_set_r_reaches_a_compiled_model(method: str) -> None:
    model = make("plain", depth=2)
    images = make_images(model, 2)
    mctf.fuse(model, method, r=REDUCTIONS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    first = compiled(images)
    mctf.set_r(compiled, 12)
    assert not torch.allclose(compiled(images), first)
    torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["mctf", "tome"])
def test_gradients_of_one_graph_equal_eager(method: str) -> None:
    model = make("layer_scale", depth=1).double()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=[6])
    model(images).square().sum().backward()
    eager = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(images).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], eager, atol=1e-8, rtol=1e-8)


@torch.no_grad()
def test_other_batches_and_image_sizes_compile() -> None:
    model = mctf.fuse(make("dynamic", depth=1), r=[0.1])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for batch, size in ((2, (64, 64)), (3, (64, 64)), (3, (72, 56))):
        images = make_images(model, batch, size=size)
        torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-5)


EXPORTED = [
    ("plain", "mctf"),
    pytest.param("eva02", "mctf_exact", marks=[pytest.mark.slow, pytest.mark.nightly]),
    pytest.param("beit", "mctf", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ("cait", "mctf_exact"),
    ("registers", "tome"),
]


@pytest.mark.parametrize(("name", "method"), EXPORTED)
@torch.no_grad()
def test_export_with_any_batch(name: str, method: str) -> None:
    model = mctf.fuse(make(name, depth=2), method, r=REDUCTIONS)
    batch = torch.export.Dim("batch", min=2)  # without end: no piece of work may be as long as the batch was
    exported = torch.export.export(model, (make_images(model, 2),), dynamic_shapes=({0: batch},))
    images = make_images(model, 5)
    torch.testing.assert_close(exported.module()(images), model(images), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_intermediate_features_compile() -> None:
    model = mctf.fuse(make("registers", depth=2), r=REDUCTIONS)
    images = make_images(model, 2)
    compiled = torch.compile(model.forward_intermediates, fullgraph=True, backend="eager")
    expected = model.forward_intermediates(images)  # by attention that was kept, where the graph attends anew
    torch.testing.assert_close(compiled(images), expected, atol=3e-5, rtol=3e-5)


@torch.no_grad()
def test_a_compiled_model_can_be_traced() -> None:
    model = mctf.fuse(make("plain", depth=1), r=[6])
    images = make_images(model, 2)
    compiled = torch.compile(model, backend="eager")
    compiled(images)
    with mctf.trace(model) as eager:
        model(images)
    with mctf.trace(compiled) as trace:
        compiled(images)
    assert torch.equal(trace.source_map(), eager.source_map())


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None and which("clang++") is None, reason="no C++ compiler for torch.compile")
@pytest.mark.parametrize("method", with_inductor)
@torch.no_grad()
def test_inductor_equals_eager(method: str) -> None:
    model = make("registers", depth=1).double()  # no rounding decides between nearly equal pairs
    images = make_images(model, 2)
    mctf.fuse(model, method, r=[6])
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), atol=1e-8, rtol=1e-8)
