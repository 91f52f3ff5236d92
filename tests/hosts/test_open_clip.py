"""open_clip's own image towers, alone and inside CLIP and CoCa models; its other models are refused with the cure."""

from typing import Any

import pytest
import torch
from torch import nn

import mctf
from helpers.families.open_clip import OpenClip
from helpers.models import drawn, make, make_images
from helpers.refusals import assert_refused
from hosts.test_conformance import check_block
from mctf.hosts import find_host

open_clip = pytest.importorskip("open_clip", reason="open_clip_torch is not installed")

TEXT = {"context_length": 7, "vocab_size": 50, "width": 16, "heads": 2, "layers": 2}
VISION = {"layers": 4, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 48}
NORMS = ("qk_norm", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
HEADS: list[dict[str, Any]] = [
    {"pool_type": "avg"},
    {"final_ln_after_pool": True, "pos_embed_type": "sin_cos_2d"},
    {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 4, "no_ln_pre": True},
    {"output_tokens": True, **dict.fromkeys(NORMS, True)},
]


def two_towers(kind: str, **vision: Any) -> Any:
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    text, images = CLIPTextCfg(**TEXT), CLIPVisionCfg(**{**VISION, **vision})
    return drawn(getattr(open_clip, kind)(16, images, text), OpenClip())


@pytest.mark.parametrize("kind", ["CLIP", "CustomTextCLIP"])
@torch.no_grad()
def test_the_image_tower_of_a_clip_model_is_fused(kind: str) -> None:
    model = two_towers(kind)
    images, words = torch.randn(2, 3, 48, 48), torch.randint(0, 49, (2, 7), generator=torch.Generator().manual_seed(0))
    plain = model(images, words)
    assert mctf.fuse(model, r=0) is model
    assert all(map(torch.equal, model(images, words), plain))
    mctf.set_r(model, 6)
    with mctf.trace(model) as trace:
        fused = model(images, words)
    assert trace.token_counts == mctf.plan(model, r=6).token_counts == [37, 31, 25, 19]
    assert torch.equal(fused[1], plain[1])
    assert not torch.allclose(fused[0], plain[0], atol=1e-4)
    assert mctf.plan(model, r=6).gflops == mctf.plan(model.visual, r=6).gflops
    mctf.unfuse(model)
    assert all(map(torch.equal, model(images, words), plain))
    mctf.fuse(model.visual, r=6)
    assert torch.equal(model(images, words)[0], fused[0])


@torch.no_grad()
def test_the_captions_of_coca_are_those_of_the_unfused_model_at_r_0() -> None:
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIPVisionCfg

    pool = {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2, "output_tokens": True}
    text = {**TEXT, "embed_cls": True, "output_tokens": True}
    decoder = {**TEXT, "attn_pooler_heads": 2, "mlp_ratio": 2}
    model = drawn(CoCa(16, decoder, text, CLIPVisionCfg(**VISION, **pool)), OpenClip())
    images, words = torch.randn(2, 3, 48, 48), torch.randint(1, 49, (2, 7))
    plain = model(images, words)["logits"]
    mctf.fuse(model, r=0)
    assert torch.equal(model(images, words)["logits"], plain)
    mctf.set_r(model, 6)
    fused = model(images, words)["logits"]
    assert fused.shape == plain.shape
    assert not torch.allclose(fused, plain, atol=1e-4)


@pytest.mark.parametrize("features", HEADS, ids=lambda features: "-".join(features)[:40])
@torch.no_grad()
def test_other_heads_and_blocks(features: dict[str, Any]) -> None:
    model = make("open_clip", **features)
    images = make_images(model, 2)
    plain = model(images)
    plain = plain if isinstance(plain, tuple) else (plain,)
    mctf.fuse(model, r=0)
    maps = model.forward_intermediates(images)["image_intermediates"]
    mctf.set_r(model, 8)
    fused = model(images)
    fused = fused if isinstance(fused, tuple) else (fused,)
    assert [each.shape for each in fused] == [each.shape for each in plain]
    assert not torch.allclose(fused[0], plain[0], atol=1e-4)
    plan = mctf.plan(model, r=8)
    assert plan.gflops < plan.gflops_base
    later = model.forward_intermediates(images)["image_intermediates"]
    assert [each.shape for each in later] == [each.shape for each in maps] == [(2, 48, 8, 8)] * 4


@torch.no_grad()
def test_the_pieces_of_a_custom_block_keep_their_contract() -> None:
    model = make("open_clip", **dict.fromkeys(NORMS, True)).double()
    host = find_host(model)
    block = host.ops(model.transformer.resblocks[1], {}, None)
    check_block(block, model._embeds(make_images(model, 2)), prefix=1)


@torch.no_grad()
def test_gradient_checkpointing_calls_the_blocks_again() -> None:
    model = mctf.fuse(make("open_clip"), r=8)
    images = make_images(model, 2)
    gradients = []
    with torch.enable_grad():
        for checkpointed in (False, True):
            model.train().set_grad_checkpointing(checkpointed)
            model.zero_grad()
            model(images).square().sum().backward()
            gradients.append(model.conv1.weight.grad.clone())
    torch.testing.assert_close(*gradients)


class TestRefusals:
    def test_an_image_tower_of_convolutions(self) -> None:
        model = two_towers("CLIP", layers=(1, 1, 1, 1))
        assert_refused(model, "open_clip.model.CLIP is not a supported model: pass", lambda: mctf.fuse(model))

    def test_an_image_tower_of_timm(self) -> None:
        model = two_towers("CustomTextCLIP", timm_model_name="test_vit", image_size=160)
        assert_refused(model, "fuse the one inside it, mctf.fuse(model.visual.trunk)", lambda: mctf.fuse(model))
        mctf.fuse(model.visual.trunk)

    def test_tokens_before_images(self) -> None:
        model = make("open_clip")
        model.transformer.batch_first = False
        text = "transformer takes tokens before images, and mctf images before tokens: use open_clip_torch >= 2.26"
        assert_refused(model, text, lambda: mctf.fuse(model))

    def test_attention_without_a_fused_form(self) -> None:
        model = make("open_clip", scaled_cosine_attn=True)
        text = "transformer.resblocks.0.attn is a cosine attention, which mctf cannot fuse"
        assert_refused(model, text, lambda: mctf.fuse(model))
        model = make("open_clip")
        model.transformer.resblocks[2].attn = nn.Identity()
        text = "transformer.resblocks.2.attn is a Identity, which mctf cannot fuse faithfully"
        assert_refused(model, text, lambda: mctf.fuse(model))

    def test_hooks_and_other_image_sizes(self) -> None:
        model = make("open_clip")
        handle = model.transformer.resblocks[1].register_forward_hook(lambda *_: None)
        assert_refused(model, "transformer.resblocks.1 has hooks", lambda: mctf.fuse(model))
        handle.remove()
        text = "the model does not take 96x96 images: create it with force_image_size=(96, 96)"
        assert_refused(model, text, lambda: mctf.plan(model, image_size=(96, 96)))
