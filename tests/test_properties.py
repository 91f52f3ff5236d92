"""What holds for every method on every model: nothing fused changes nothing, no token is lost, images are apart."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mctf
from helpers.models import (
    DEPTH,
    METHODS,
    PAIRS_BY_OPS,
    PRODUCT,
    equal_tokens,
    family_of,
    make,
    make_images,
    run,
    tokens_of,
)
from helpers.naive import assert_r_0_is_plain
from mctf.core import attention

entries = st.one_of(st.integers(0, 40), st.floats(0, 0.6))
reductions = st.one_of(entries, st.lists(entries, min_size=DEPTH, max_size=DEPTH))
every_product = pytest.mark.parametrize(("name", "method"), PRODUCT)
every_method = pytest.mark.parametrize("method", METHODS)


@every_product
@torch.no_grad()
def test_r_0_is_the_unfused_model_bit_for_bit(name: str, method: str) -> None:
    model = make(name)
    assert_r_0_is_plain(model, make_images(model, 2), method)


def assert_nothing_lost(model: nn.Module, trace: mctf.Trace, tokens: int) -> None:
    """Sizes count the input tokens, and prefix tokens are alone in their own places."""
    prefix = family_of(model).prefix(model)
    for index, block in enumerate(trace.blocks):
        source = trace.source_map(index)
        counted = torch.stack([row.bincount(minlength=block.tokens) for row in source]).float()
        assert source.shape == (len(block.sizes), tokens)
        assert torch.equal(block.sizes.float(), counted)
        assert counted.min() >= 1
        assert (counted.sum(dim=1) == tokens).all()
        assert (counted[:, :prefix] == 1).all()
        assert (source[:, :prefix] == torch.arange(prefix)).all()


@pytest.mark.parametrize(("name", "method"), PAIRS_BY_OPS)
@settings(max_examples=3)
@given(r=reductions, batch=st.integers(1, 3))
@torch.no_grad()
def test_no_token_is_lost(name: str, method: str, r: Any, batch: int) -> None:
    model = make(name)
    mctf.fuse(model, method, r=r)
    with mctf.trace(model) as trace:
        logits = run(model, make_images(model, batch))
    assert logits.isfinite().all()
    assert trace.token_counts == mctf.plan(model, method=method, r=r).token_counts
    assert_nothing_lost(model, trace, tokens_of(model))


@every_method
@given(r=reductions, height=st.integers(3, 12), width=st.integers(3, 12))
@torch.no_grad()
def test_no_token_is_lost_at_any_image_size(method: str, r: Any, height: int, width: int) -> None:
    model = make("dynamic")
    size = (8 * height, 8 * width)
    mctf.fuse(model, method, r=r)
    with mctf.trace(model) as trace:
        logits = model(make_images(model, 2, size=size))
    assert logits.isfinite().all()
    assert trace.token_counts == mctf.plan(model, method=method, r=r, image_size=size).token_counts
    assert_nothing_lost(model, trace, height * width + 1)


@torch.no_grad()
def test_a_lost_token_would_be_noticed() -> None:
    model = make("plain")
    mctf.fuse(model, r=8)
    with mctf.trace(model) as trace:
        model(make_images(model, 1))
    trace.blocks[2].sizes[0, 5] += 1
    with pytest.raises(AssertionError):
        assert_nothing_lost(model, trace, tokens_of(model))


@pytest.mark.parametrize(("name", "method"), PAIRS_BY_OPS)
@settings(max_examples=2)
@given(r=reductions)
@torch.no_grad()
def test_a_batch_of_two_is_two_batches_of_one(name: str, method: str, r: Any) -> None:
    model = make(name).double()  # in float32 the batch decides the last bits, and these decide near-ties
    images = make_images(model, 2)
    mctf.fuse(model, method, r=r)
    apart = torch.cat([run(model, images[:1]), run(model, images[1:])])
    torch.testing.assert_close(run(model, images), apart, atol=1e-9, rtol=1e-9)


def loss_of_equal_tokens(model: nn.Module, equal: int, method: str, **options: Any) -> Tensor:
    """Largest change by fusing in what the blocks give each input token; checks that something was fused."""
    family, tokens = family_of(model), equal_tokens(model, equal)
    plain = family.through_blocks(model, tokens, equal=equal)
    mctf.fuse(model, method, **options)
    with mctf.trace(model) as trace:
        fused = family.through_blocks(model, tokens, equal=equal)
    every = fused if fused.shape == plain.shape else trace.unpool(fused)
    mctf.unfuse(model)
    assert trace.token_counts[-1] < tokens.shape[1]
    return (every - plain).abs().max()


@every_product
@torch.no_grad()
def test_merging_equal_tokens_changes_nothing(name: str, method: str) -> None:
    model = make(name).double()
    assert loss_of_equal_tokens(model, 48, method, r=10) < 1e-5


@every_product
@torch.no_grad()
def test_pairs_of_equal_tokens_find_each_other(name: str, method: str) -> None:
    model = make(name).double()
    # so high a temperature of the similarity that no difference in the other criteria outweighs it
    options = {"tau_sim": 500.0} if method.startswith("mctf") else {}
    assert loss_of_equal_tokens(model, 2, method, r=20, blocks=[1], **options) < 1e-5


@every_method
@torch.no_grad()
def test_equal_tokens_are_not_free_without_proportional_attention(method: str) -> None:
    model = make("plain").double()
    assert loss_of_equal_tokens(model, 48, method, r=10, proportional=False) > 1e-3


@every_method
@pytest.mark.parametrize("name", ["mean_pool", "mean_pool_prefix"])
@torch.no_grad()
def test_a_mean_pooled_head_reads_the_size_weighted_mean(name: str, method: str) -> None:
    model = make(name).double()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=12, restore="copy")
    with mctf.trace(model) as trace:
        logits = model(images)
        every = model.forward_features(images)
    assert every.shape[1] == tokens_of(model)

    prefix = model.num_prefix_tokens
    fused = torch.zeros(2, trace.token_counts[-1], model.embed_dim, dtype=torch.float64)
    fused.scatter_(1, trace.source_map()[..., None].expand_as(every), every)
    sizes = trace.blocks[-1].sizes[:, prefix:, None]
    mean = (sizes * fused[:, prefix:]).sum(dim=1) / sizes.sum(dim=1)
    torch.testing.assert_close(logits, model.head(model.fc_norm(mean)), atol=1e-6, rtol=1e-6)


@every_method
@torch.no_grad()
def test_a_head_changed_while_fused_gets_what_it_reads(method: str) -> None:
    model = make("plain")
    mctf.fuse(model, method, r=12)
    assert model.forward_features(make_images(model, 1)).shape[1] < tokens_of(model)
    model.reset_classifier(5, "avg")
    assert model.forward_features(make_images(model, 1)).shape[1] == tokens_of(model)
    assert model(make_images(model, 1)).shape == (1, 5)


# ToMe looks at no map, but heads that talk to each other make one for every method
CHUNKED = [*product(("registers", "cait", "beit"), ("mctf", "mctf_exact")), ("cait", "tome")]


@pytest.mark.parametrize(("name", "method"), CHUNKED)
@torch.no_grad()
def test_large_batches_are_attended_in_chunks(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name).double()
    images = make_images(model, 5)
    mctf.fuse(model, method, r=12)
    at_once = model(images)
    for piece in (1, 2 * 3 * tokens_of(model) ** 2):  # one image, two images
        monkeypatch.setattr("mctf.core.attention._CPU_CHUNK", piece)
        torch.testing.assert_close(model(images), at_once, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["registers", "beit"])
@torch.no_grad()
def test_attention_that_was_kept_is_the_attention_computed_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mctf.fuse(make(name).double(), r=12)
    images = make_images(model, 3)
    reused: list[attention.ReceivedAttention] = []
    attend = attention.attend

    def noted(*args: Any, received: attention.ReceivedAttention | None = None, **options: Any) -> Tensor:
        reused.extend([] if received is None else [received])
        return attend(*args, received=received, **options)

    monkeypatch.setattr(attention, "attend", noted)
    kept = model(images)
    assert len(reused) > 0
    assert all(received.map_chunks for received in reused)
    reused.clear()
    with torch.enable_grad():
        torch.testing.assert_close(model(images), kept, atol=1e-9, rtol=1e-9)
    monkeypatch.setattr(attention, "_KEEP_MAX", 0)
    torch.testing.assert_close(model(images), kept, atol=1e-9, rtol=1e-9)
    assert len(reused) > 0
    assert not any(received.map_chunks for received in reused)
