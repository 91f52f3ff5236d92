"""A fused model keeps its identity: taken back, saved, copied, shared by threads, with another r."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import mctf
from helpers.models import METHODS, PAIRS, PAIRS_BY_OPS, by_pickle, family_of, make, make_images, run

every_pair = pytest.mark.parametrize(("name", "method"), PAIRS)
every_method = pytest.mark.parametrize("method", METHODS)


@every_pair
@torch.no_grad()
def test_unfuse_restores_bit_for_bit(name: str, method: str) -> None:
    model = make(name)
    images = make_images(model, 2)
    family = family_of(model)
    plain, container, tree = run(model, images), family.container(model), list(model.named_modules())
    assert mctf.fuse(model, method, r=8) is model
    assert not torch.equal(run(model, images), plain)
    assert mctf.unfuse(model) is model
    assert family.container(model) is container
    assert list(model.named_modules()) == tree
    assert torch.equal(run(model, images), plain)


def test_fusing_leaves_every_training_flag_alone() -> None:
    model = make("plain").train()
    model.blocks[1].eval()
    flags = {path: module.training for path, module in model.named_modules()}
    mctf.fuse(model, r=4)
    assert {path: module.training for path, module in model.named_modules()} == flags
    model.forward_intermediates(make_images(model, 1), indices=[2], stop_early=True)
    assert {path: module.training for path, module in model.named_modules()} == flags
    mctf.unfuse(model)
    assert {path: module.training for path, module in model.named_modules()} == flags


def test_the_mode_changed_while_fused_stays() -> None:
    model = mctf.fuse(make("plain"), r=4)
    model.train()
    assert mctf.unfuse(model).blocks.training
    assert all(module.training for module in model.modules())


@torch.no_grad()
def test_blocks_changed_while_fused_stay_changed() -> None:
    model, other = make("plain"), make("plain", seed=1)
    mctf.fuse(model, r=4)
    model.blocks[2].mlp = other.blocks[2].mlp
    mctf.unfuse(model)
    assert model.blocks[2].mlp is other.blocks[2].mlp


@every_pair
@torch.no_grad()
def test_state_dict_is_the_plain_one(name: str, method: str) -> None:
    model, other = make(name), make(name, seed=1)
    images = make_images(model, 2)
    before = copy.deepcopy(model.state_dict())
    mctf.fuse(model, method, r=8)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]

    model.load_state_dict(other.state_dict())
    mctf.fuse(other, method, r=8)
    assert torch.equal(run(model, images), run(other, images))
    assert torch.equal(run(mctf.unfuse(model), images), run(mctf.unfuse(other), images))


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@pytest.mark.parametrize("duplicate", [by_deepcopy, by_pickle])
@pytest.mark.parametrize(("name", "method"), PAIRS_BY_OPS)
@torch.no_grad()
def test_a_copy_is_independent(name: str, method: str, duplicate) -> None:
    model = make(name)
    images = make_images(model, 2)
    plain = run(model, images)
    mctf.fuse(model, method, r=8)
    fused = run(model, images)
    twin = duplicate(model)
    assert torch.equal(run(twin, images), fused)

    mctf.set_r(twin, 0)
    assert torch.equal(run(twin, images), plain)
    assert torch.equal(run(model, images), fused)

    mctf.unfuse(twin)
    for parameter in twin.parameters():
        parameter.zero_()
    assert torch.equal(run(model, images), fused)
    assert torch.equal(run(mctf.unfuse(model), images), plain)


@torch.no_grad()
def test_a_copy_made_while_tracing_is_not_traced() -> None:
    model = mctf.fuse(make("plain"), r=8)
    with mctf.trace(model) as trace:
        model(make_images(model, 1))
        copy.deepcopy(model)(make_images(model, 3))
    assert len(trace.source_map()) == 1


@every_pair
@torch.no_grad()
def test_set_r_changes_the_next_pass(name: str, method: str) -> None:
    model = make(name)
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8)
    eight = run(model, images)
    mctf.set_r(model, [0, 0.2, 0, 5])
    other = run(model, images)
    mctf.unfuse(model)
    mctf.fuse(model, method, r=[0, 0.2, 0, 5])
    assert torch.equal(run(model, images), other)
    mctf.set_r(model, 8)
    assert not torch.equal(eight, other)
    mctf.unfuse(model)
    mctf.fuse(model, method, r=8)
    assert torch.equal(run(model, images), eight)


@torch.no_grad()
def test_set_r_keeps_the_chosen_blocks() -> None:
    model = mctf.fuse(make("plain"), r=8, blocks=(-2,))
    mctf.set_r(model, 5)
    with mctf.trace(model) as trace:
        model(make_images(model, 1))
    assert trace.token_counts == [65, 65, 60, 60]


@torch.no_grad()
def test_a_pruned_model_keeps_fusing_its_blocks() -> None:
    model = mctf.fuse(make("plain"), r=8, blocks=(1, -1))
    model.prune_intermediate_layers([2])
    for r, counts in ((None, [65, 57, 57]), (5, [65, 60, 60])):
        if r is not None:
            mctf.set_r(model, r)
        with mctf.trace(model) as trace:
            model.forward_features(make_images(model, 1))
        assert trace.token_counts == counts
    mctf.unfuse(model)
    assert len(model.blocks) == 3


@every_method
@torch.no_grad()
def test_threads_share_a_model(method: str) -> None:
    model = mctf.fuse(make("registers"), method, r=8)
    batches = [make_images(model, 1 + index % 3, seed=index) for index in range(24)]
    alone = [model(images) for images in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(torch.no_grad()(model), batches))
        features = list(pool.map(torch.no_grad()(model.forward_intermediates), batches))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    for images, (final, _) in zip(batches, features, strict=True):
        assert torch.equal(final, model.forward_intermediates(images)[0])


@torch.no_grad()
def test_a_trace_sees_its_own_thread_only() -> None:
    model = mctf.fuse(make("plain"), r=8)
    with mctf.trace(model) as trace:
        model(make_images(model, 2))
        seen = trace.source_map()
        elsewhere = threading.Thread(target=torch.no_grad()(model), args=(make_images(model, 3, seed=5),))
        elsewhere.start()
        elsewhere.join()
        assert torch.equal(trace.source_map(), seen)


@torch.no_grad()
def test_a_trace_survives_another_that_ends_during_its_pass() -> None:
    """Another thread's trace may end between two blocks, or in the middle of recording one."""
    model = mctf.fuse(make("plain"), r=8)

    class ReductionCounts:
        def record(self, *_: object) -> None:
            model.blocks._observers.remove(self)

    model.blocks._observers.append(ReductionCounts())
    with mctf.trace(model) as trace:
        model(make_images(model, 1))
    assert len(trace.blocks) == 4
