"""Single families of timm: masks, dropped patches, one rotary table per image, talking heads."""

import pytest
import torch
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

import mctf
from helpers.families.timm_eva import rope_of_runs
from helpers.models import CHOSEN, METHODS, equal_tokens, family_of, make, make_images, names_of
from helpers.refusals import assert_refused
from mctf.core.matching import TINY

TIMM = [name for name in CHOSEN if name in names_of(lambda family: family.timm)]
every_method = pytest.mark.parametrize("method", METHODS)


def through(model: nn.Module, tokens: Tensor, rope: Tensor) -> Tensor:
    for block in model.blocks:
        tokens = block(tokens, rope=rope)
    return tokens


@every_method
@pytest.mark.parametrize("name", ["eva02", "eva_dinov3"])
@torch.no_grad()
def test_one_rotary_table_per_image(name: str, method: str) -> None:
    model = mctf.fuse(make(name).double(), method, r=8)
    tokens = equal_tokens(model, 1)
    rope = rope_of_runs(48, 1, tokens)
    alone = through(model, tokens, rope)
    torch.testing.assert_close(through(model, tokens, rope.expand(2, 1, -1, -1)), alone)
    heads = rope.expand(2, model.blocks[0].attn.num_heads, -1, -1)
    if name == "eva02":  # the keys of the other have fewer heads
        torch.testing.assert_close(through(model, tokens, heads), alone)
    other = torch.stack([rope, rope.flip(0)])[:, None]
    mixed = through(model, tokens, other)
    torch.testing.assert_close(mixed[:1], alone[:1])
    assert not torch.allclose(mixed[1:], alone[1:], atol=1e-3)


@pytest.mark.parametrize("name", ["eva02", "eva_rope_mixed"])
def test_patch_dropout_keeps_positions(name: str) -> None:
    model = make(name, patch_drop_rate=0.3).train()
    images = make_images(model, 3)
    torch.manual_seed(5)
    plain = model(images)
    mctf.fuse(model, r=0)
    torch.manual_seed(5)
    assert torch.equal(model(images), plain)
    mctf.set_r(model, 6)
    with mctf.trace(model) as trace:
        model(images).square().sum().backward()
    kept = trace.source_map().shape[1]
    assert kept < family_of(model).tokens(model)
    assert trace.token_counts == [kept - 6 * block for block in range(4)]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("argument", ["attn_mask", "is_causal"])
@pytest.mark.parametrize("name", ["eva02", "eva_post_norm", "naflex", "beit", "cait"])
def test_masks_are_refused(name: str, argument: str) -> None:
    model = mctf.fuse(make(name), r=4)
    tokens = equal_tokens(model, 1).float()
    block = next(iter(model.blocks))
    assert_refused(model, "takes no attention mask", lambda: block(tokens, **{argument: torch.ones(())}))


@pytest.mark.parametrize("name", TIMM)
@torch.no_grad()
def test_timm_feature_extractors_work_fused(name: str) -> None:
    model = make(name)
    images = make_images(model, 2)
    extractor = FeatureGetterNet(model, out_indices=[1, 3])
    plain = extractor(images)
    mctf.fuse(model, r=8)
    fused = extractor(images)
    assert [features.shape for features in fused] == [features.shape for features in plain]
    assert not torch.equal(fused[-1], plain[-1])
    mctf.unfuse(model)
    assert all(torch.equal(one, other) for one, other in zip(extractor(images), plain, strict=True))


@every_method
@torch.no_grad()
def test_talking_heads_without_mixing_are_softmax_attention(method: str) -> None:
    """With identity mixes, CaiT's blocks compute softmax attention."""
    model = make("cait").double()
    for block in model.blocks:
        for mix in (block.attn.proj_l, block.attn.proj_w):
            nn.init.eye_(mix.weight)
            nn.init.zeros_(mix.bias)
    images = make_images(model, 2)
    mctf.fuse(model, method, r=9)
    talking = model(images)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("attend", "attention_received", "attend_with_received"):
            patched.delattr(f"mctf.hosts.timm_cait.CaitOps.{name}")
        torch.testing.assert_close(model(images), talking)


@torch.no_grad()
def test_negative_received_attention_counts_as_zero() -> None:
    model = make("cait").double()
    model.blocks[1].attn.proj_w.weight[:, 0] -= 2.0
    mctf.fuse(model, r=10)
    with mctf.trace(model) as trace:
        logits = model(make_images(model, 2))
    informative = trace.blocks[1].informativeness
    assert informative.min() == TINY  # the clamp
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["eva02", "eva_rope_mixed", "beit", "beit_shared", "relpos", "naflex_rope", "cait"])
@torch.no_grad()
def test_free_drop_runs_on_every_host(name: str) -> None:
    """The control method calls whole blocks on fewer tokens, which keep their own positions."""
    model = make(name)
    images = make_images(model, 2)
    plain = model(images)
    mctf.fuse(model, "free_drop", r=8)
    dropped = model(images)
    assert dropped.isfinite().all()
    assert not torch.allclose(dropped, plain)


REAL: list[tuple[str, int]] = [
    ("deit3_small_patch16_224", 197),
    ("vit_small_patch14_reg4_dinov2", 1374),
    ("vit_base_patch16_siglip_224", 196),
    ("vit_so400m_patch14_siglip_378", 729),
    ("vit_base_patch32_clip_224", 50),
    ("flexivit_small", 226),
    ("vitamin_small_224", 196),
    ("aimv2_large_patch14_224", 256),
    ("eva02_tiny_patch14_224", 257),
    ("eva_giant_patch14_224", 257),
    ("vit_small_patch16_dinov3", 261),
    ("vit_pe_core_tiny_patch16_384", 577),
    ("vit_small_patch16_rope_mixed_224", 197),
    ("beit_base_patch16_224", 197),
    ("beitv2_base_patch16_224", 197),
    ("cait_xxs24_224", 196),
    ("vit_relpos_small_patch16_224", 196),
    ("naflexvit_base_patch16_siglip", 256),
]


@pytest.mark.parametrize(("name", "tokens"), REAL)
def test_models_by_name(name: str, tokens: int) -> None:
    plan = mctf.plan(name, r=8, blocks=[1])  # the cost of each reducing block is counted
    assert plan.image_tokens == tokens
    assert plan.gflops < plan.gflops_base
