"""The fused stack as a container: called, iterated, indexed, sliced, and read through."""

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import mctf
from helpers.models import METHODS, make, make_images

every_method = pytest.mark.parametrize("method", METHODS)


def draw_tokens(batch: int = 2, tokens: int = 65) -> Tensor:
    return torch.randn(batch, tokens, 48, generator=torch.Generator().manual_seed(2))


@every_method
@pytest.mark.parametrize("name", ["plain", "mean_pool", "registers"])
@torch.no_grad()
def test_iterating_computes_what_calling_does(name: str, method: str) -> None:
    model = mctf.fuse(make(name), method, r=8, restore="copy")
    tokens = draw_tokens()
    with mctf.trace(model) as trace:
        called = model.blocks(tokens)
    seen = trace.source_map()
    with mctf.trace(model) as trace:
        one_by_one = tokens
        for block in model.blocks:
            one_by_one = block(one_by_one)
            assert one_by_one.shape == tokens.shape
    assert torch.equal(trace.source_map(), seen)
    assert torch.equal(one_by_one, called if called.shape == tokens.shape else trace.unpool(called))


@torch.no_grad()
def test_every_iteration_is_a_run_of_its_own() -> None:
    model = mctf.fuse(make("plain"), r=8)
    first, second = draw_tokens(2), draw_tokens(3).flip(0)
    alone = []
    for tokens in (first, second):
        for block in model.blocks:
            tokens = block(tokens)
        alone.append(tokens)
    for one, other in zip(model.blocks, model.blocks, strict=True):  # two runs, block by block in turn
        first, second = one(first), other(second)
    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])


def test_what_a_caller_does_to_the_tokens_between_two_blocks_counts() -> None:
    model = mctf.fuse(make("plain").double(), r=8)

    def changed_on_the_way() -> Tensor:
        tokens = draw_tokens().double()
        for block in model.blocks:
            tokens = 2 * block(tokens)
        return tokens

    with torch.no_grad():
        without_gradient = changed_on_the_way()  # where a block goes on with the fused tokens of the one before it
    torch.testing.assert_close(without_gradient, changed_on_the_way().detach())  # pooled another way


def test_an_index_reads_the_block_and_refuses_to_call_it() -> None:
    model = make("plain")
    blocks = list(model.blocks)
    mctf.fuse(model, r=8)
    assert len(model.blocks) == 4
    for index in (*range(4), -1):
        assert isinstance(model.blocks[index], type(blocks[0]))
        assert model.blocks[index].attn is blocks[index].attn
    model.blocks[2].drop_path1 = torch.nn.Identity()
    assert blocks[2].drop_path1 is model.blocks[2].drop_path1
    with pytest.raises(mctf.MctfError, match=r"block 3 of a fused stack cannot be called alone.*mctf\.unfuse"):
        model.blocks[-1](draw_tokens())
    assert list(model.blocks.children()) == blocks
    assert model.get_submodule("blocks.2.attn") is blocks[2].attn
    with pytest.raises(IndexError):
        model.blocks[4]


@every_method
@torch.no_grad()
def test_a_slice_is_the_first_blocks_fused_alike(method: str) -> None:
    model = mctf.fuse(make("plain"), method, r=[2, 8, 0.2, 5])
    tokens = draw_tokens()
    with mctf.trace(model) as whole:
        model.blocks(tokens)
    first = model.blocks[:3]
    assert len(first) == 3
    with mctf.trace(model) as part:  # a slice is watched with the whole
        first(tokens)
    assert part.token_counts == whole.token_counts[:3]
    assert torch.equal(part.source_map(), whole.source_map(2))
    assert list(first.children()) == list(model.blocks.children())[:3]
    assert len(model.blocks[:0]) == 0
    assert torch.equal(model.blocks[:](tokens), model.blocks(tokens))


def test_an_iterated_block_reads_and_writes_through() -> None:
    model = make("plain")
    mctf.fuse(model, r=8)
    for bound, block in zip(model.blocks, model.blocks.children(), strict=True):
        assert bound.attn is block.attn
        assert bound.norm1.weight is block.norm1.weight
        bound.attn.fused_attn = False
        bound.note = "seen"
        assert block.note == "seen"
        assert block.attn.fused_attn is False
        with pytest.raises(AttributeError, match="nonsense"):
            _ = bound.nonsense


@every_method
@torch.no_grad()
def test_blocks_without_fused_attention_compute_the_same(method: str) -> None:
    model = mctf.fuse(make("plain"), method, r=[0, 8, 0, 8])
    images = make_images(model, 2)
    fused = model(images)
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(model(images), fused, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_iterating_accepts_arguments_that_mean_nothing() -> None:
    model = mctf.fuse(make("plain"), r=8)
    tokens = draw_tokens()
    block, other = next(iter(model.blocks)), next(iter(model.blocks))
    assert torch.equal(block(tokens, attn_mask=None, is_causal=False), other(tokens, None))


def test_its_text_names_method_and_r() -> None:
    model = mctf.fuse(make("plain"), "tome", r=0.2, blocks=(1, -1))
    assert "method=ToMe(proportional=True), r=0.2, blocks=(1, 3)" in repr(model.blocks)


@torch.no_grad()
def test_timm_feature_extractors_work_fused() -> None:
    extractor = timm.create_model("test_vit", features_only=True).eval()
    images = torch.randn(1, 3, 160, 160)
    plain = extractor(images)
    mctf.fuse(extractor.model, r=0.2)
    fused = extractor(images)
    assert [features.shape for features in fused] == [features.shape for features in plain]
    assert not torch.equal(fused[-1], plain[-1])
    mctf.unfuse(extractor)
    assert all(torch.equal(one, other) for one, other in zip(extractor(images), plain, strict=True))


def test_a_list_speaks_of_every_block_whatever_was_chosen_before() -> None:
    model = mctf.fuse(make("plain"), r=8, blocks=(2,))
    mctf.set_r(model, [4, 0, 0, 2])
    assert model.blocks.schedule == (4, 0, 0, 2)
    mctf.set_r(model, 6)
    assert model.blocks.schedule == (0, 0, 6, 0)


@pytest.mark.filterwarnings("ignore::mctf.methods._layers.UntrainedWarning")
@pytest.mark.parametrize("method", mctf.methods())
@torch.no_grad()
def test_the_first_blocks_alone_do_what_they_do_in_the_whole_model(method: str) -> None:
    """A block knows its place in the depth of the model also where timm runs only the first blocks."""
    model = mctf.fuse(make("plain"), method)
    images = make_images(model, 2)
    whole, early = (model.forward_intermediates(images, indices=[2], stop_early=stop)[1][0] for stop in (False, True))
    assert torch.equal(early, whole)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_a_block_that_was_read_can_be_copied(duplicate: Any) -> None:
    block = mctf.fuse(make("plain"), r=8).blocks[1]
    twin = duplicate(block)
    assert torch.equal(twin.mlp.fc1.weight, block.mlp.fc1.weight)
    assert isinstance(twin, nn.Module)
    with pytest.raises(mctf.MctfError, match="cannot be called alone"):
        twin(torch.zeros(1, 2, 48))


def test_a_block_that_was_read_equals_the_block() -> None:
    model = mctf.fuse(make("plain"), r=8)
    block, other = model.blocks[1], model.blocks[2]
    assert block == model.blocks[1] == model.blocks.get_submodule("1")
    assert block != other
    assert len({block, model.blocks[1], other}) == 2
    assert vars(block) is vars(model.blocks.get_submodule("1"))
