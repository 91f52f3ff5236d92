"""Watching a fused model: the map of every input token, and features spread back by it."""

import pytest
import torch
from torch import nn

import mctf
from helpers.models import PAIRS, make, make_images, run, tokens_of

every_pair = pytest.mark.parametrize(("name", "method"), PAIRS)


@torch.no_grad()
def traced(model: nn.Module, batch: int = 2) -> mctf.Trace:
    with mctf.trace(model) as trace:
        run(model, make_images(model, batch))
    return trace


@every_pair
def test_the_source_map_is_the_blocks_one_after_the_other(name: str, method: str) -> None:
    model = mctf.fuse(make(name), method, r=8)
    trace = traced(model)
    for image in range(2):
        where = list(range(tokens_of(model)))
        for index, block in enumerate(trace.blocks):
            slots = block.assignment.slots[image].tolist()
            where = [slots[place] for place in where]
            assert trace.source_map(index)[image].tolist() == where
        assert trace.source_map()[image].tolist() == where


def test_a_block_can_be_counted_from_the_end() -> None:
    trace = traced(mctf.fuse(make("plain"), r=8))
    assert torch.equal(trace.source_map(-2), trace.source_map(2))
    assert torch.equal(trace.source_map(-4), trace.source_map(0))


def test_blocks_that_fuse_nothing_are_the_identity() -> None:
    trace = traced(mctf.fuse(make("plain"), r=[0, 8, 0, 8]))
    assert trace.token_counts == [65, 57, 57, 49]
    assert trace.blocks[0].informativeness is None
    assert torch.equal(trace.source_map(0), torch.arange(65).expand(2, -1))
    assert torch.equal(trace.source_map(2), trace.source_map(1))
    assert torch.equal(trace.blocks[2].sizes, trace.blocks[1].sizes)


def test_informativeness_is_a_share_of_the_attention() -> None:
    trace = traced(mctf.fuse(make("plain"), r=8))
    for block in trace.blocks[1:]:
        assert block.informativeness.shape == block.assignment.slots.shape
        torch.testing.assert_close(block.informativeness.sum(dim=1), torch.ones(2))
    assert all(block.informativeness is None for block in traced(mctf.fuse(make("plain"), "tome", r=8)).blocks)


def test_spreading_gives_one_feature_per_input_token() -> None:
    model = mctf.fuse(make("registers"), r=8)
    trace = traced(model)
    features = torch.randn(2, trace.token_counts[-1], 3, 5)
    spread = trace.unpool(features)
    assert spread.shape == (2, tokens_of(model), 3, 5)
    for image, row in enumerate(trace.source_map().tolist()):
        for token, slot in enumerate(row):
            assert torch.equal(spread[image, token], features[image, slot])
    early = torch.randn(2, trace.token_counts[1])
    assert torch.equal(trace.unpool(early, block=1), early.gather(1, trace.source_map(1)))


def test_features_of_another_shape_are_refused() -> None:
    trace = traced(mctf.fuse(make("plain"), r=8))
    for shape in ((2, 65, 48), (1, 41, 48), (2,)):
        with pytest.raises(mctf.MctfError, match=r"features must start with \(2, 41\)"):
            trace.unpool(torch.zeros(shape))


def test_a_trace_without_a_pass_says_so() -> None:
    with mctf.trace(mctf.fuse(make("plain"))) as trace:
        pass
    for look in (lambda: trace.blocks, lambda: trace.token_counts, trace.source_map, trace.dropped):
        with pytest.raises(mctf.MctfError, match="nothing was traced yet"):
            look()
    assert repr(trace) == "Trace(token_counts=[])"


def test_a_trace_shows_its_token_counts() -> None:
    model = mctf.fuse(make("plain"), r=3)
    with mctf.trace(model) as trace:
        model(make_images(model, 1))
    assert repr(trace) == f"Trace(token_counts={mctf.plan(model, r=3).token_counts})"


@pytest.mark.parametrize("block", [4, -5])
def test_a_block_that_is_not_there_is_refused(block: int) -> None:
    trace = traced(mctf.fuse(make("plain")))
    for look in (trace.source_map, trace.dropped):
        with pytest.raises(mctf.MctfError, match="there are blocks 0 to 3"):
            look(block)


@torch.no_grad()
def test_the_last_pass_counts() -> None:
    model = mctf.fuse(make("plain"), r=8)
    with mctf.trace(model) as trace:
        model(make_images(model, 3))
        model(make_images(model, 1))
    assert len(trace.source_map()) == 1
    model(make_images(model, 2))
    assert len(trace.source_map()) == 1


@torch.no_grad()
def test_traces_nest() -> None:
    model = mctf.fuse(make("plain"), r=8)
    with mctf.trace(model) as outer:
        model(make_images(model, 1))
        with mctf.trace(model) as inner:
            model(make_images(model, 2))
        model(make_images(model, 3))
    assert len(outer.source_map()) == 3
    assert len(inner.source_map()) == 2


@torch.no_grad()
def test_a_trace_ends_with_an_error() -> None:
    model = mctf.fuse(make("plain"), r=8)
    with pytest.raises(RuntimeError, match="stop"), mctf.trace(model):
        raise RuntimeError("stop")
    assert model.blocks._observers == []


@torch.no_grad()
def test_watching_changes_nothing() -> None:
    model = mctf.fuse(make("plain"), r=8)
    images = make_images(model, 2)
    unwatched = model(images)
    with mctf.trace(model):
        assert torch.equal(model(images), unwatched)
