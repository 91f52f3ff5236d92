"""Vision-language models: the tower inside is fused, and the language model gets as many tokens as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mctf
from helpers.families.vlms import VLMS, make_vlm

pytest.importorskip("transformers", reason="the extra hf is not installed")


def generated(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model.generate(**given, max_new_tokens=4, do_sample=False)


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**{"input_ids": torch.tensor([[98, 5], [98, 7]]), **given}).logits


@pytest.mark.parametrize("name", VLMS)
@torch.no_grad()
def test_the_language_model_reads_one_token_per_patch(name: str) -> None:
    model, given = make_vlm(name)
    words, plain = generated(model, given), logits(model, given)
    assert mctf.fuse(model, r=0) is model
    assert torch.equal(logits(model, given), plain)
    assert torch.equal(generated(model, given), words)
    mctf.set_r(model, 6)
    with mctf.trace(model) as trace:
        fused = logits(model, given)
    assert fused.shape == plain.shape
    assert fused.isfinite().all()
    assert not torch.allclose(fused, plain, atol=1e-3)
    assert generated(model, given).shape[0] == 2
    tokens = trace.token_counts[0]
    assert trace.token_counts == [tokens, tokens - 6, tokens - 12, tokens - 18]
    size = (24, 24) if name.startswith("qwen") else (48, 48)  # Qwen's towers name no size
    plan = mctf.plan(model, r=6, image_size=size)
    assert plan.token_counts == trace.token_counts
    assert plan.gflops < plan.gflops_base
    mctf.unfuse(model)
    assert torch.equal(logits(model, given), plain)


@torch.no_grad()
def test_a_vlm_reads_what_residuals_restore() -> None:
    model, given = make_vlm("internvl")
    plain = logits(model, given)
    changes = []
    for restore in ("residual", "copy"):
        changes.append((logits(mctf.fuse(model, "ward", r=4, restore=restore), given) - plain).abs().mean())
        mctf.unfuse(model)
    assert 0 < changes[0] < changes[1]


@torch.no_grad()
def test_a_fused_vlm_is_saved_and_loaded(tmp_path: Path) -> None:
    model, given = make_vlm("smolvlm")
    expected = logits(mctf.fuse(model, r=6), given)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(mctf.load(tmp_path), given), expected)


@torch.no_grad()
def test_a_padded_image_of_a_vlm_is_read_like_one_alone() -> None:
    """Idefics3 gives the mask of an image as pixels; what lies in the padding is of no account."""
    model, given = make_vlm("idefics3")
    mask = torch.ones(2, 1, 48, 48, dtype=torch.bool)
    mask[1, :, :, 32:] = False
    given |= {"pixel_attention_mask": mask}
    mctf.fuse(model, r=4)
    together = logits(model, given)
    alone = [logits(model, {name: value[row, None] for name, value in given.items()}) for row in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)
    mctf.unfuse(model)
    assert not torch.allclose(logits(model, given), together, atol=1e-3)
