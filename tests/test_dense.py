"""Dense output: one value per patch, whatever was fused, for feature maps and for heads of one's own on top."""

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import mctf
from helpers.families.hf import MLP, SIZES, build
from helpers.flops import EXACT, counted
from helpers.models import METHODS, NAMES, PAIRS, family_of, make, make_images, tokens_of
from helpers.refusals import assert_refused

every_method = pytest.mark.parametrize("method", mctf.methods())


@pytest.mark.parametrize(("name", "method"), PAIRS)
@torch.no_grad()
def test_dense_features_have_one_value_per_input_token(name: str, method: str) -> None:
    model = make(name)
    family, images = family_of(model), make_images(model, 2)
    plain = family.features(model, images)
    logits = family.run(mctf.fuse(model, method, r=8, restore="copy"), images)
    with mctf.trace(model) as trace:
        fused = family.features(model, images)
    mctf.fuse(mctf.unfuse(model), method, r=8, dense=True, restore="copy")
    dense = family.features(model, images)
    assert dense.shape == plain.shape
    assert torch.equal(dense, fused if family.keeps_every_token(model) else trace.unpool(fused))
    assert torch.equal(family.run(model, images), logits)  # a class token says the same


@every_method
@pytest.mark.filterwarnings("ignore::UserWarning")  # layers of learned methods are untrained here
@torch.no_grad()
def test_every_method_can_be_dense(method: str) -> None:
    model = make("registers")
    images = make_images(model, 2)
    plain = model.forward_features(images)
    dense = mctf.fuse(model, method, dense=True).forward_features(images)
    assert dense.shape == plain.shape
    assert torch.equal(mctf.unfuse(model).forward_features(images), plain)


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_dense_tokens_are_the_fused_ones(method: str) -> None:
    model = make("registers")
    images = make_images(model, 2)
    plain = model.forward_features(images)
    mctf.fuse(model, method, r=0, dense=True)
    assert torch.equal(model.forward_features(images), plain)
    mctf.set_r(model, 8)
    assert not torch.equal(model.forward_features(images), plain)
    assert mctf.fuse(mctf.unfuse(model), method, r=8).forward_features(images).shape[1] < plain.shape[1]


@torch.no_grad()
def test_copies_stay_dense() -> None:
    model = mctf.fuse(make("plain"), r=8, dense=True)
    images = make_images(model, 2)
    expected = model.forward_features(images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.forward_features(images), expected)
    tokens = torch.randn(1, tokens_of(model), 48)
    assert model.blocks[:2](tokens).shape == tokens.shape


def test_the_text_of_the_stack_says_dense() -> None:
    assert "dense=True" in repr(mctf.fuse(make("plain"), r=8, dense=True).blocks)
    assert "dense=False" in repr(mctf.fuse(make("plain"), r=8).blocks)


@pytest.mark.parametrize("call", [mctf.fuse, mctf.plan])
def test_dense_is_a_switch(call: Any) -> None:
    model = make("plain")
    assert_refused(model, "dense='no' must be True or False", lambda: call(model, dense="no"))


@pytest.mark.parametrize("name", ["plain", "registers", "lvvit", "mean_pool", "eva02"])
@torch.no_grad()
def test_the_plan_counts_dense_heads(name: str) -> None:
    model = make(name)
    plan, kept = mctf.plan(model, r=8, dense=True), mctf.plan(model, r=8)
    keeps_every = family_of(model).keeps_every_token(model)
    assert (plan.gflops == kept.gflops) == (plan.gflops_run == kept.gflops_run) == keeps_every
    assert plan.gflops >= kept.gflops
    assert plan.token_counts == kept.token_counts
    mctf.fuse(model, r=8, dense=True)
    assert counted(model, make_images(model, 1)) == pytest.approx(plan.gflops_run, rel=EXACT)


class Segmenter(nn.Module):
    """A user's own head on timm's documented outputs: a class for every pixel."""

    def __init__(self, encoder: Any, *, maps: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.maps = maps
        self.classify = nn.Conv2d(encoder.embed_dim * (2 if maps else 1), 5, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        scores = self.classify(self.features(images))
        return nn.functional.interpolate(scores, images.shape[2:], mode="bilinear")

    def features(self, images: Tensor) -> Tensor:
        """B C h w."""
        if self.maps:
            return torch.cat(self.encoder.forward_intermediates(images, indices=[1, 3], intermediates_only=True), dim=1)
        tokens = self.encoder.forward_features(images)[:, self.encoder.num_prefix_tokens :]
        return tokens.transpose(1, 2).unflatten(2, self.encoder.patch_embed.grid_size)


SEGMENTERS = [(name, False) for name in ("plain", "registers", "odd", "t2t_vit", "lvvit")]
SEGMENTERS += [(name, True) for name in ("registers", "eva_dinov3", "beit", "cait")]


@pytest.mark.parametrize(("name", "maps"), SEGMENTERS)
def test_a_segmentation_head_on_top_learns(name: str, maps: bool) -> None:
    torch.manual_seed(0)
    encoder = make(name, num_classes=0)
    model = Segmenter(encoder, maps=maps)
    images = make_images(encoder, 2)
    plain = model(images)
    mctf.fuse(encoder, r=0, dense=not maps)
    assert torch.equal(model(images), plain)
    mctf.set_r(encoder, 8)
    scores = model(images)
    assert scores.shape == plain.shape
    assert not torch.allclose(scores, plain)
    scores.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.blocks.parameters())
    assert all(parameter.grad.any() for parameter in encoder.patch_embed.parameters())
    mctf.unfuse(model)
    assert torch.equal(model(images), plain)


def test_a_head_that_needs_every_token_fails_without_dense() -> None:
    encoder = mctf.fuse(make("plain"), r=8)
    with pytest.raises(RuntimeError):
        Segmenter(encoder, maps=False)(make_images(encoder, 1))


FEATURE_EXTRACTORS = ["test_vit", "test_eva", "test_beit"]


@pytest.mark.parametrize("name", [name for name in FEATURE_EXTRACTORS if timm.is_model(name)])
@torch.no_grad()
def test_features_only_models_keep_their_shapes(name: str) -> None:
    extractor = timm.create_model(name, features_only=True).eval()
    images = torch.randn(2, 3, *extractor.model.patch_embed.img_size)
    plain = extractor(images)
    mctf.fuse(extractor.model, r=0.2)
    fused = extractor(images)
    assert [features.shape for features in fused] == [features.shape for features in plain]
    assert not torch.equal(fused[-1], plain[-1])


STAGES = {"out_features": ["stage2", "stage4"], "num_hidden_layers": 4}
BACKBONES: dict[str, dict[str, Any]] = {
    "Dinov2": {"mlp_ratio": 2},
    "Dinov2WithRegisters": {"mlp_ratio": 2},
    "DINOv3ViT": {**MLP, "num_register_tokens": 4},
    "Beit": {**MLP, "use_relative_position_bias": True, "drop_path_rate": 0.0},
}


@pytest.mark.skipif("hf_vit" not in NAMES, reason="the extra hf is not installed")
class TestTransformers:
    @pytest.mark.parametrize("library", BACKBONES)
    @torch.no_grad()
    def test_backbones_give_feature_maps(self, library: str) -> None:
        torch.manual_seed(0)
        model = build(f"{library}Backbone", f"{library}Config", masks=True, **BACKBONES[library], **STAGES).eval()
        images = torch.randn(2, 3, 64, 64)
        plain = model(images).feature_maps
        assert [maps.shape for maps in plain] == [(2, 48, 8, 8)] * 2
        mctf.fuse(model, r=0)
        assert all(torch.equal(one, other) for one, other in zip(model(images).feature_maps, plain, strict=True))
        mctf.set_r(model, 8)
        fused = model(images).feature_maps
        assert [maps.shape for maps in fused] == [maps.shape for maps in plain]
        assert not torch.equal(fused[-1], plain[-1])

    @torch.no_grad()
    def test_a_depth_model_reads_a_fused_backbone(self) -> None:
        import transformers

        torch.manual_seed(0)
        stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False}
        backbone = transformers.Dinov2Config(**SIZES, mlp_ratio=2, num_hidden_layers=4, **stages)
        config = transformers.DPTConfig(
            backbone_config=backbone, hidden_size=48, fusion_hidden_size=16, neck_hidden_sizes=[8, 8, 16, 16]
        )
        model = transformers.DPTForDepthEstimation(config).eval()
        images = torch.randn(1, 3, 64, 64)
        plain = model(images).predicted_depth
        mctf.fuse(model, r=8)
        with mctf.trace(model) as trace:
            fused = model(images).predicted_depth
        assert trace.token_counts == [65, 57, 49, 41]
        assert fused.shape == plain.shape
        assert not torch.equal(fused, plain)
        assert torch.equal(mctf.unfuse(model)(images).predicted_depth, plain)
