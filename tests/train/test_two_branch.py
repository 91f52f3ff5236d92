"""Two branches of a model in one pass: equal to two passes, and without side effects on the model."""

import threading
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import mctf
from helpers.models import METHODS, make, make_images
from mctf import MctfError
from mctf.api import fused_stack
from mctf.train.two_branch import run_branch, run_branches, run_inference

R, LIGHTER = 8, 3


def fused(name: str, method: str = "mctf", **features: Any) -> VisionTransformer:
    return mctf.fuse(make(name, **features).double(), method, r=R)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["plain", "mean_pool", "map_pool_prefix"])
@pytest.mark.parametrize("lighter", [0, LIGHTER, R])
def test_equal_two_passes(name: str, method: str, lighter: int) -> None:
    model = fused(name, method)
    images = make_images(model, 3)
    branches = run_branches(model, images, lighter)
    for branch, r in zip(branches, (R, lighter), strict=True):
        mctf.set_r(model, r)
        expected = run_branch(model, images)
        torch.testing.assert_close(branch.logits, expected.logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(branch.features, expected.features, rtol=1e-12, atol=1e-12)


def test_patches_are_embedded_once() -> None:
    model = fused("plain")
    calls = []
    model.patch_embed.register_forward_hook(lambda *_: calls.append(1))
    run_branches(model, make_images(model, 2), LIGHTER)
    assert len(calls) == 1


def test_a_host_that_iterates_over_its_blocks_runs_twice_with_equal_results() -> None:
    model = fused("plain").train()
    images = make_images(model, 2)
    expected = run_branches(model, images, LIGHTER)
    model.set_grad_checkpointing(True)
    branches = run_branches(model, images, LIGHTER)
    torch.testing.assert_close(branches[0].logits, expected[0].logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(branches[1].logits, expected[1].logits, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(branches[0].logits, branches[1].logits)


def test_the_schedule_of_the_stack_is_constant_during_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused("plain")
    stack = fused_stack(model)
    seen = []

    class Observer:
        def record(self, index: int, x: torch.Tensor, output: Any) -> None:
            seen.append((index, x.shape[1], stack.schedule, stack.r))

    monkeypatch.setattr(stack, "set_r", pytest.fail)
    with stack.observed_by(Observer()):
        run_branches(model, make_images(model, 2), LIGHTER)
    assert [(index, tokens) for index, tokens, *_ in seen] == [
        *((0, 65), (1, 65), (2, 57), (3, 49)),
        *((0, 65), (1, 65), (2, 62), (3, 59)),
    ]
    assert {(schedule, r) for *_, schedule, r in seen} == {((0, R, R, R), R)}


def test_another_thread_runs_the_model_with_its_own_r_meanwhile() -> None:
    model = fused("plain")
    images = make_images(model, 2)
    expected = model(images)
    results = []

    def run_in_thread(*_: object) -> None:
        handle.remove()
        thread = threading.Thread(target=lambda: results.append(model(images)))
        thread.start()
        thread.join()

    handle = model.blocks[1].norm1.register_forward_hook(run_in_thread)
    heavy, light = run_branches(model, images, LIGHTER)
    torch.testing.assert_close(results[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(heavy.logits, expected, rtol=1e-12, atol=1e-12)
    assert len(light.logits) == 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_is_unchanged_afterwards(checkpointing: bool) -> None:
    model = fused("plain")
    model.set_grad_checkpointing(checkpointing)
    images = make_images(model, 2)
    before = model(images)
    run_branches(model, images, LIGHTER)
    assert fused_stack(model).r == R
    assert not fused_stack(model)._forward_hooks
    assert torch.equal(model(images), before)


def test_lv_vit_whose_second_head_reads_the_other_tokens() -> None:
    model = timm.create_model("lvvit_t", img_size=64, depth=3, embed_dim=48, num_heads=2, num_classes=5).double()
    mctf.fuse(model.eval(), r=R)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    heavy, light = run_branches(model, images, LIGHTER)
    torch.testing.assert_close(heavy.logits, model(images), rtol=1e-12, atol=1e-12)
    mctf.set_r(model, LIGHTER)
    torch.testing.assert_close(light.logits, model(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_branches_hold_the_states_of_the_method(checkpointing: bool) -> None:
    model = mctf.fuse(make("plain"), "evo_vit")
    model.set_grad_checkpointing(checkpointing)
    counts = []
    for branch in run_branches(model, make_images(model, 2), 0.25):
        assert [state is None for state in branch.method_states] == [False] * 4
        counts.append(branch.method_states[-1].selected.assignment.count)
    assert counts == [1 + 32, 1 + 48]
    assert run_branch(mctf.unfuse(model), make_images(model, 2)).method_states == ()


def test_inference_has_no_gradient_and_restores_the_mode_of_every_module() -> None:
    model = fused("plain", drop_path_rate=0.5).train()
    model.blocks[2].eval()
    modes = [module.training for module in model.modules()]
    images = make_images(model, 2)
    branch = run_inference(model, images)
    assert not branch.logits.requires_grad
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(branch.logits, model.eval()(images).detach())


def test_an_unfused_model_is_refused() -> None:
    with pytest.raises(MctfError, match="the model is not fused"):
        run_branches(make("plain"), torch.zeros(1, 3, 64, 64), LIGHTER)


def test_half_precision_is_widened() -> None:
    model = mctf.fuse(make("plain").bfloat16(), r=R)
    branch = run_branch(model, make_images(model, 1))
    assert (branch.logits.dtype, branch.features.dtype) == (torch.float32, torch.float32)
