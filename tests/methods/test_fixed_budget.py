"""What holds for every method without parameters that takes the same number of tokens from each image."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mctf
from helpers.flops import EXACT, counted
from helpers.models import by_pickle, family_of, make, make_images, run, tokens_of
from helpers.naive import assert_images_do_not_meet, assert_r_0_is_plain

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("evit", {}),
    ("evit", {"fuse_inattentive": False}),
    ("bat", {}),
    ("bat", {"clusters": 0.4, "pairs": 0}),
    ("random", {}),
    ("diffrate", {}),
    ("pitome", {}),
    ("atc", {}),
]
MODELS = ["registers", "eva02"]
every_method = pytest.mark.parametrize(("method", "options"), METHODS, ids=str)
every_model = pytest.mark.parametrize("name", MODELS)
SCHEDULE = [0.3, 20, 0, 0.4]


@every_method
@every_model
@torch.no_grad()
def test_r_0_is_the_plain_model_bit_for_bit(name: str, method: str, options: dict[str, Any]) -> None:
    model = make(name)
    assert_r_0_is_plain(model, make_images(model, 2), method, **options)


@every_method
@every_model
@torch.no_grad()
def test_a_batch_is_its_images(name: str, method: str, options: dict[str, Any]) -> None:
    model = make(name).double()
    mctf.fuse(model, method, r=SCHEDULE, **options)
    assert_images_do_not_meet(model, make_images(model, 3))


@torch.no_grad()
def test_images_that_meet_would_be_noticed() -> None:
    model = make("plain").double()
    model.norm = nn.Sequential(model.norm, MeanOfBatch())
    with pytest.raises(AssertionError):
        assert_images_do_not_meet(model, make_images(model, 2))


class MeanOfBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=0)


@every_method
@every_model
@torch.no_grad()
def test_the_plan_is_what_runs(name: str, method: str, options: dict[str, Any]) -> None:
    model = make(name)
    plan = mctf.plan(model, method=method, r=SCHEDULE, **options)
    mctf.fuse(model, method, r=SCHEDULE, **options)
    with mctf.trace(model) as trace:
        run(model, make_images(model, 1))
    assert trace.token_counts == plan.token_counts
    assert plan.token_counts[-1] < tokens_of(model) - 30
    assert counted(model, make_images(model, 1)) == pytest.approx(plan.gflops_run, rel=EXACT)


@every_method
@every_model
@torch.no_grad()
def test_protected_tokens_stay_alone_in_front(name: str, method: str, options: dict[str, Any]) -> None:
    model = make(name)
    mctf.fuse(model, method, r=SCHEDULE, **options)
    with mctf.trace(model) as trace:
        assert run(model, make_images(model, 2)).isfinite().all()
    prefix = family_of(model).prefix(model)
    for index, block in enumerate(trace.blocks):
        source = trace.source_map(index)
        assert (source[:, :prefix] == torch.arange(prefix)).all()
        assert (source[:, prefix:] >= prefix).all()
        for image in source:
            assert image.unique().tolist() == list(range(block.tokens))


@every_method
@torch.no_grad()
def test_copies_are_independent_and_unfuse_restores(method: str, options: dict[str, Any]) -> None:
    model = make("registers")
    images, keys = make_images(model, 2), list(model.state_dict())
    plain = run(model, images)
    mctf.fuse(model, method, r=SCHEDULE, **options)
    fused = run(model, images)
    assert not torch.allclose(fused, plain, atol=1e-3)
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), by_pickle(model)):
        assert torch.equal(run(twin, images), fused)
        assert torch.equal(run(mctf.unfuse(twin), images), plain)
    assert torch.equal(run(model, images), fused)
    assert torch.equal(run(mctf.unfuse(model), images), plain)


@pytest.mark.parametrize(
    "method", [pytest.param("evit", marks=pytest.mark.slow), "bat", "random", "diffrate", "pitome", "atc"]
)
@torch.no_grad()
def test_one_graph_equals_eager(method: str) -> None:
    torch.compiler.reset()
    model = make("registers", depth=1)
    images = make_images(model, 2)
    mctf.fuse(model, method, r=[0.3])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["evit", "bat", "random", "diffrate", "pitome", "atc"])
@torch.no_grad()
def test_export_with_any_batch(method: str) -> None:
    model = mctf.fuse(make("plain", depth=1), method, r=[0.3])
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (make_images(model, 2),), dynamic_shapes=({0: batch},))
    images = make_images(model, 5)
    torch.testing.assert_close(exported.module()(images), model(images), atol=1e-5, rtol=1e-5)


@every_method
@torch.no_grad()
def test_a_trimmed_last_block_gives_the_same_logits(method: str, options: dict[str, Any]) -> None:
    model = make("registers").double()
    images = make_images(model, 2)
    logits = mctf.fuse(model, method, r=SCHEDULE, trim_last=False, **options)(images)
    mctf.fuse(mctf.unfuse(model), method, r=SCHEDULE, trim_last=True, **options)
    torch.testing.assert_close(model(images), logits, atol=1e-9, rtol=1e-9)
    assert mctf.plan(model, method=method, r=SCHEDULE, trim_last=True, **options).trimmed == (method != "random")


@every_method
def test_gradients_reach_every_parameter(method: str, options: dict[str, Any]) -> None:
    model = make("layer_scale").train()
    mctf.fuse(model, method, r=SCHEDULE, **options)
    model(make_images(model, 2)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@every_method
@torch.no_grad()
def test_reduced_precision_stays_near(method: str, options: dict[str, Any]) -> None:
    model = make("registers")
    images = make_images(model, 2)
    mctf.fuse(model, method, r=[0, 0, 0, 0.3], **options)
    exact = model(images)
    rounded = model.bfloat16()(images.bfloat16())
    assert rounded.dtype == torch.bfloat16
    # bfloat16 may choose other tokens where two are nearly equal; in the last block little depends on them
    assert (rounded.float() - exact).abs().mean() < 0.1 * exact.abs().mean()
