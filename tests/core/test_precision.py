"""Low precision and extreme attention: fused models round no worse than plain ones, and never to NaN."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.models import METHODS, PAIRS_BY_OPS, equal_tokens, family_of, make, make_images

every_pair = pytest.mark.parametrize(("name", "method"), PAIRS_BY_OPS)
every_method = pytest.mark.parametrize("method", METHODS)


def rounding_error(model: nn.Module, tokens: Tensor, exact: Tensor, *, mixed: bool) -> float:
    """Root mean square by which bfloat16 moves what the blocks give each input token."""
    family = family_of(model)
    fused = hasattr(family.container(model), "method")
    with mctf.trace(model) if fused else nullcontext() as trace, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        out = family.through_blocks(model, tokens, equal=2)
    every = out if out.shape == exact.shape else trace.unpool(out)
    return float((every.float() - exact).square().mean().sqrt())


@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "bfloat16"])
@every_pair
@torch.no_grad()
def test_bfloat16_rounds_no_worse_than_in_the_plain_model(name: str, method: str, mixed: bool) -> None:
    """Pairs of equal tokens, which fuse for free: all that is left to differ is rounding."""
    model = make(name)
    tokens = equal_tokens(model, 2).float()
    exact = family_of(model).through_blocks(model, tokens, equal=2)
    if not mixed:
        model, tokens = model.bfloat16(), tokens.bfloat16()
    plain = rounding_error(model, tokens, exact, mixed=mixed)
    options = {} if method == "tome" else {"tau_sim": 500.0}
    mctf.fuse(model, method, r=20, blocks=[1], **options)
    assert rounding_error(model, tokens, exact, mixed=mixed) < 1.2 * plain


@every_method
@torch.no_grad()
def test_float16_runs(method: str) -> None:
    model = make("layer_scale").half()
    mctf.fuse(model, method, r=6)
    logits = model(make_images(model, 2))
    assert logits.dtype == torch.float16
    assert logits.isfinite().all()


@every_method
@torch.no_grad()
def test_attention_that_ignores_most_tokens_gives_no_nan(method: str) -> None:
    model = make("plain")
    for block in model.blocks:
        block.attn.qkv.weight.mul_(30)  # softmax underflows to exactly 0 for most keys
    mctf.fuse(model, method, r=8)
    with mctf.trace(model) as trace:
        logits = model(make_images(model, 2))
    if method == "mctf":
        assert trace.blocks[1].informativeness.min() < 1e-20
    assert logits.isfinite().all()
