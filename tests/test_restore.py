"""Restored tokens: where every token is read, a token gets back what fusing took from it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mctf
from helpers.models import METHODS, PAIRS_BY_OPS, by_pickle, family_of, make, make_images, run
from helpers.refusals import assert_refused
from mctf import _run as run_module
from mctf.api import fused_stack
from mctf.methods.base import BlockOutput

every_method = pytest.mark.parametrize("method", METHODS)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # in float64


def draw_tokens(batch: int = 2, tokens: int = 65) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, tokens, 48, generator=generator, dtype=torch.float64)


def fused(method: str = "ward", name: str = "plain", **options: Any) -> Any:
    return mctf.fuse(make(name).double(), method, **{"r": 8, **options})


class Recorder:
    """Keeps what enters and leaves every block."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Tensor, BlockOutput]] = []

    def record(self, index: int, x: Tensor, output: BlockOutput) -> None:
        self.blocks.append((x, output))


def naive_residual(blocks: list[tuple[Tensor, BlockOutput]], image: int, token: int) -> Tensor:
    """The sum over all blocks of the token's difference to the weighted mean of its slot, one token at a time."""
    residual, place = torch.zeros_like(blocks[0][0][0, 0]), token
    for x, output in blocks:
        if output.assignment is None or output.weights is None:
            continue
        slots, weights = output.assignment.slots[image], output.weights[image].double()
        members = slots == slots[place]
        mean = (weights[members, None] * x[image, members]).sum(dim=0) / weights[members].sum()
        residual = residual + x[image, place] - mean
        place = int(slots[place])
    return residual


@pytest.mark.parametrize("method", [*METHODS, "evit", "diffrate", "random"])
@torch.no_grad()
def test_residuals_are_the_differences_to_the_mean_of_each_fusion(method: str) -> None:
    model, tokens = fused(method, dense=True, r=12), draw_tokens()
    recorder = Recorder()
    torch.manual_seed(0)
    with model.blocks.observed_by(recorder), mctf.trace(model) as trace:
        restored = model.blocks(tokens)
    copied = trace.unpool(recorder.blocks[-1][1].x)
    assert restored.shape == tokens.shape
    for image, token in ((0, 0), (0, 1), (0, 20), (1, 33), (1, 64)):
        expected = copied[image, token] + naive_residual(recorder.blocks, image, token)
        torch.testing.assert_close(restored[image, token], expected, **CLOSE)
    assert not torch.allclose(restored, copied, atol=0.1)


@torch.no_grad()
def test_a_dropped_token_follows_the_kept_one_of_its_slot() -> None:
    model, tokens = fused("random", dense=True, r=[16, 0, 0, 0]), draw_tokens()
    torch.manual_seed(0)
    with mctf.trace(model) as trace:
        restored = model.blocks(tokens)
    assert trace.dropped().sum() == 32
    source = trace.source_map()
    for image, token in trace.dropped().nonzero().tolist():
        kept = (source[image] == source[image, token]) & ~trace.dropped()[image]
        moved = restored[image, kept][0] - tokens[image, kept][0]
        torch.testing.assert_close(restored[image, token], tokens[image, token] + moved, **CLOSE)


@pytest.mark.parametrize(("name", "method"), PAIRS_BY_OPS)
@torch.no_grad()
def test_every_host_restores(name: str, method: str) -> None:
    model = make(name)
    family, images = family_of(model), make_images(model, 2)
    plain, features = run(model, images), {}
    for restore in ("copy", "residual"):
        mctf.fuse(model, method, r=0, dense=True, restore=restore)
        assert torch.equal(run(model, images), plain)
        mctf.set_r(model, 8)
        features[restore] = family.features(model, images)
        assert torch.equal(run(mctf.unfuse(model), images), plain)
    prefix = family.prefix(model)
    assert features["copy"].shape == features["residual"].shape
    torch.testing.assert_close(features["residual"][:, :prefix], features["copy"][:, :prefix], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(features["residual"][:, prefix:], features["copy"][:, prefix:], atol=0.01)


@pytest.mark.parametrize("method", ["dynamic_vit", "spvit", "a_vit"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # their layers are untrained here
@torch.no_grad()
def test_methods_that_restore_tokens_themselves_keep_to_copies(method: str) -> None:
    features = []
    for restore in ("copy", "residual"):
        torch.manual_seed(0)
        model = mctf.fuse(make("mean_pool_prefix"), method, restore=restore)
        features.append(model.forward_features(make_images(model, 2)))
    assert torch.equal(*features)


def test_a_head_that_reads_the_tokens_that_are_left_gets_them_from_an_iteration_too() -> None:
    model = make("lvvit").double().train()
    images = make_images(model, 2)
    logits = mctf.fuse(model, "ward", r=8)(images)
    model.set_grad_checkpointing(True)
    torch.testing.assert_close(model(images), logits)
    mctf.fuse(mctf.unfuse(model), "ward", r=8, dense=True)
    dense = model(images)
    model.set_grad_checkpointing(False)
    torch.testing.assert_close(model(images), dense)


@every_method
@pytest.mark.parametrize("name", ["plain", "mean_pool", "registers"])
@torch.no_grad()
def test_iterating_restores_what_calling_does(name: str, method: str) -> None:
    model, tokens = fused(method, name, dense=True), draw_tokens()
    called, one_by_one = model.blocks(tokens), tokens
    for block in model.blocks:
        one_by_one = block(one_by_one)
    assert torch.equal(one_by_one, called)
    one_by_one = tokens
    for block in model.blocks:
        one_by_one = block(one_by_one.clone())  # not the tensor that the block before returned
    torch.testing.assert_close(one_by_one, called, **CLOSE)


@torch.no_grad()
def test_what_is_added_to_one_token_between_blocks_stays_with_it() -> None:
    model, change = fused(r=[16, 0, 0, 0]), torch.zeros_like(draw_tokens())
    change[:, 40] = 1
    before, after = [list(model.blocks) for _ in range(2)]
    tokens = before[0](draw_tokens())
    assert torch.equal(after[0](draw_tokens()), tokens)
    plain, changed = before[1](tokens), after[1](tokens + change)
    moved = (changed - plain - change).norm(dim=2)
    assert (changed - plain)[:, 40].norm(dim=1).min() > 0.5 * change[0, 40].norm()
    assert moved.max() < change[0, 40].norm()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["mctf", "tome", "ward"])
def test_gradients_and_checkpoints(method: str, reentrant: bool) -> None:
    model = fused(method, dense=True).train()
    gradients = []
    for way in ("called", "iterated", "checkpointed"):
        tokens = draw_tokens().requires_grad_()
        model.zero_grad()
        x, kept = tokens, []
        for block in () if way == "called" else model.blocks:
            x = block(x) if way == "iterated" else checkpoint(block, x, use_reentrant=reentrant)
            kept.append(x)
        result = kept[-1] if kept else model.blocks(tokens)
        result.square().mean().backward()
        gradients.append([tokens.grad, *(parameter.grad for parameter in model.blocks.parameters())])
    assert gradients[0][0].abs().sum(dim=2).min() > 0  # every token is read, so every token has a gradient
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, **CLOSE)


@pytest.mark.parametrize("name", ["mean_pool", "post_norm", "registers"])
@torch.no_grad()
def test_dtypes_under_autocast_are_those_of_copies(name: str) -> None:
    model = make(name)
    images, dtypes = make_images(model, 2), []
    for restore in ("copy", "residual"):
        mctf.fuse(model, r=8, restore=restore)
        with torch.autocast("cpu", torch.bfloat16):
            final, maps = model.forward_intermediates(images)
        dtypes.append([each.dtype for each in (final, *maps)])
        mctf.unfuse(model)
    assert dtypes[0] == dtypes[1]


def test_iteration_holds_one_residual() -> None:
    model, x = fused(), draw_tokens()
    blocks = list(model.blocks)
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    run_of_blocks = object.__getattribute__(blocks[0], "_run")
    assert all(state.residual is None for state in run_of_blocks.states.values())
    assert run_of_blocks.last[2].residual.shape == x.shape


@torch.no_grad()
def test_where_nobody_reads_every_token_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = make("plain"), make_images(make("plain"), 2)
    expected = mctf.fuse(model, r=8, restore="copy")(images)
    mctf.fuse(mctf.unfuse(model), r=8)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a residual was computed")

    monkeypatch.setattr(run_module.kernels, "merge", never)
    mctf.set_r(model, 0)
    model.forward_intermediates(images)
    monkeypatch.undo()
    mctf.set_r(model, 8)
    monkeypatch.setattr(run_module.State, "after", never)
    assert torch.equal(model(images), expected)
    with pytest.raises(AssertionError, match="a residual"):
        model.forward_intermediates(images)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["called", "iterated", "trained"])
def test_compiled(way: str) -> None:
    torch.compiler.reset()
    model = fused("mctf_exact", "mean_pool", r=[0, 8, 0, 8])
    images = make_images(model, 2)
    call: Any = model if way == "called" else lambda images: model.forward_intermediates(images)[1]
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with torch.set_grad_enabled(way == "trained"):
        torch.testing.assert_close(compiled(images), call(images))


@pytest.mark.parametrize("restore", ["copy", "residual"])
@torch.no_grad()
def test_copies_slices_and_texts_keep_it(restore: str) -> None:
    model, tokens = fused(dense=True, restore=restore), draw_tokens()
    expected, first = model.blocks(tokens), model.blocks[:2](tokens)
    assert f"restore='{restore}'" in repr(model.blocks)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), by_pickle(model)):
        assert fused_stack(other).restore == restore
        assert torch.equal(other.blocks(tokens), expected)
        assert torch.equal(other.blocks[:2](tokens), first)
    assert (fused_stack(mctf.fuse(make("plain"), r=8)).restore, restore) in [("residual", "copy"), ("residual",) * 2]


@pytest.mark.parametrize("value", ["", "residuals", "Copy", None, True, 1, ["copy"]])
def test_it_is_one_of_two(value: object) -> None:
    model = make("plain")
    assert_refused(model, "restore=", lambda: mctf.fuse(model, restore=value))
