"""What holds for every method under which each image decides how many tokens remain."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import mctf
from helpers.flops import EXACT, counted
from helpers.models import by_pickle, family_of, make, make_images, run, tokens_of
from helpers.naive import assert_images_do_not_meet, assert_r_0_is_plain
from mctf.evaluation.adaptive_flops import mean_tokens

pytestmark = pytest.mark.filterwarnings("ignore::mctf.methods._layers.UntrainedWarning")
METHODS: list[tuple[str, dict[str, Any]]] = [("ats", {}), ("a_vit", {"gamma": 3.0, "beta": 2.0}), ("ia_red2", {})]
every_method = pytest.mark.parametrize(("method", "options"), METHODS, ids=lambda each: each if each else "")
every_model = pytest.mark.parametrize("name", ["registers", "mean_pool_prefix", "eva02", "beit"])


def fused(model: nn.Module, method: str, options: dict[str, Any], **more: Any) -> nn.Module:
    """The model fused; layers of the method's own are drawn so that they drop some tokens."""
    mctf.fuse(model, method, **options, **more)
    generator = torch.Generator().manual_seed(0)
    layers = getattr(model, "token_reduction", nn.Module())
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


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
    model = fused(make(name).double(), method, options)
    images = make_images(model, 4)
    with mctf.trace(model) as trace:
        run(model, images)
    assert any((block.sizes == 0).any() for block in trace.blocks)  # some are padded
    assert_images_do_not_meet(model, images)


@every_method
@every_model
@torch.no_grad()
def test_an_image_alone_is_not_padded_and_costs_what_it_runs(name: str, method: str, options: dict[str, Any]) -> None:
    model = fused(make(name), method, options)
    images = make_images(model, 1)
    if method == "a_vit":  # where a protected token has halted, its place remains
        mctf.unfuse(model)
        fused(model, method, {"gamma": 3.0, "beta": 9.0})
    with mctf.trace(model) as trace:
        run(model, images)
    assert all(block.sizes.all() for block in trace.blocks)
    found = mean_tokens(model, [images])
    assert found.token_counts == tuple(trace.token_counts)
    assert found.token_counts[-1] < tokens_of(model)
    assert counted(model, images) == pytest.approx(found.gflops_run, rel=EXACT)
    plan = mctf.plan(model, method=method, **options)
    assert found.gflops_run < plan.gflops_run
    assert all(count <= most for count, most in zip(found.token_counts, plan.token_counts, strict=True))


@every_method
@torch.no_grad()
def test_protected_tokens_stay_in_front(method: str, options: dict[str, Any]) -> None:
    model = fused(make("registers"), method, options)
    with mctf.trace(model) as trace:
        run(model, make_images(model, 3))
    for index in range(4):
        source = trace.source_map(index)
        assert (source[:, :5] == torch.arange(5)).all()
        patches_left = (trace.blocks[index].sizes[:, 5:] > 0).any(dim=1)
        assert (source[patches_left, 5:] >= 5).all()


@every_method
@torch.no_grad()
def test_copies_and_files_give_the_same(method: str, options: dict[str, Any]) -> None:
    model = fused(make("registers"), method, options)
    images = make_images(model, 2)
    expected = run(model, images)
    for other in (copy.deepcopy(model), by_pickle(model)):
        assert torch.equal(run(other, images), expected)
        for parameter in other.parameters():
            parameter.zero_()
        assert torch.equal(run(model, images), expected)


@every_method
@torch.no_grad()
def test_unfuse_gives_the_model_back(method: str, options: dict[str, Any]) -> None:
    model = make("plain")
    images, names = make_images(model, 2), set(model.state_dict())
    plain = run(model, images)
    assert not torch.equal(run(fused(model, method, options), images), plain)
    assert torch.equal(run(mctf.unfuse(model), images), plain)
    assert set(model.state_dict()) == names


@every_method
@pytest.mark.parametrize("name", ["plain", "eva02"])
def test_iterating_and_checkpointing_give_the_same_values_and_slopes(
    name: str, method: str, options: dict[str, Any]
) -> None:
    model = fused(make(name).double(), method, options)
    images = make_images(model, 3)
    family, slopes, outputs = family_of(model), [], []
    for checkpointed in (False, True):
        family.checkpoint(model, checkpointed)
        model.zero_grad()
        output = run(model, images)
        output.square().sum().backward()
        outputs.append(output.detach())
        slopes.append(torch.cat([each.grad.flatten() for each in model.blocks.parameters() if each.grad is not None]))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-9, rtol=1e-9)


@every_method
@torch.no_grad()
def test_feature_maps_have_every_token(method: str, options: dict[str, Any]) -> None:
    model = fused(make("plain").double(), method, options)
    images = make_images(model, 2)
    final, maps = model.forward_intermediates(images, output_fmt="NLC")
    torch.testing.assert_close(model.forward_head(final), run(model, images), atol=1e-9, rtol=1e-9)
    assert [each.shape for each in maps] == [(2, 64, 48)] * 4
    assert all(each.isfinite().all() for each in maps)


@pytest.mark.slow
@every_method
@torch.no_grad()
def test_compiles_with_breaks(method: str, options: dict[str, Any]) -> None:
    model = fused(make("plain", depth=2), method, options)
    images = make_images(model, 2)
    expected = run(model, images)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(images), expected)


@every_method
@torch.no_grad()
def test_one_graph_is_refused_with_the_reason(method: str, options: dict[str, Any]) -> None:
    model = fused(make("plain"), method, options)
    torch.compiler.reset()
    with pytest.raises(Unsupported, match="depends on the images: compile without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(make_images(model, 2))


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_runs_in_reduced_precision(method: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = fused(make("registers").to(dtype), method, options)
    output = run(model, make_images(model, 3))
    assert output.dtype == dtype
    assert output.isfinite().all()
