"""Models of transformers: which are supported, where inside them the tower is, which are refused."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.families.hf import MLP, SIZES, TEXT, build, two_towers
from helpers.models import make, make_images, run
from mctf.hosts import find_host

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")


def words() -> Tensor:
    return torch.randint(2, 98, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("library", ["CLIP", "Siglip"])
class TestTwoTowers:
    @torch.no_grad()
    def test_the_vision_tower_is_fused_and_the_text_tower_is_not(self, library: str) -> None:
        model = two_towers(library)
        given = {"input_ids": words(), "attention_mask": torch.ones(3, 7), "pixel_values": torch.randn(2, 3, 64, 64)}
        plain = model(**given)
        assert mctf.fuse(model, r=0) is model
        assert torch.equal(model(**given).logits_per_image, plain.logits_per_image)
        mctf.set_r(model, 8)
        with mctf.trace(model) as trace:
            fused = model(**given)
        assert trace.token_counts == ([65, 57, 49, 41] if library == "CLIP" else [64, 56, 48, 40])
        assert torch.equal(fused.text_embeds, plain.text_embeds)
        assert not torch.equal(fused.image_embeds, plain.image_embeds)
        torch.testing.assert_close(fused.image_embeds, plain.image_embeds, atol=0.3, rtol=0)
        mctf.unfuse(model)
        assert torch.equal(model(**given).logits_per_image, plain.logits_per_image)

    @torch.no_grad()
    def test_the_tower_alone_can_be_fused(self, library: str) -> None:
        model, other = two_towers(library), two_towers(library)
        other.load_state_dict(model.state_dict())
        mctf.fuse(model, r=8)
        mctf.fuse(other.vision_model, r=8)
        images = torch.randn(2, 3, 64, 64)
        pooled = [each.vision_model(images).pooler_output for each in (model, other)]
        assert torch.equal(*pooled)
        mctf.unfuse(other)
        assert not torch.equal(other.vision_model(images).pooler_output, pooled[0])

    @torch.no_grad()
    def test_attention_maps_of_the_text_are_not_refused(self, library: str) -> None:
        model = mctf.fuse(two_towers(library), r=8)
        model.set_attn_implementation("eager")
        output = model.text_model(words(), output_attentions=True)
        assert len(output.attentions) == 2

    def test_the_plan_is_that_of_the_vision_tower(self, library: str) -> None:
        model = two_towers(library)
        whole, tower = mctf.plan(model, r=8), mctf.plan(model.vision_model, r=8)
        assert whole.gflops == tower.gflops
        assert whole.token_counts == tower.token_counts


def from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a timm VisionTransformer under the names of ViTForImageClassification."""
    names = {"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings", "norm": "layernorm"}
    names |= {"patch_embed.proj": "embeddings.patch_embeddings.projection", "blocks": "layers"}
    names |= {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    renamed = {f"classifier.{kind}": state[f"head.{kind}"] for kind in ("weight", "bias")}
    for key, value in state.items():
        if "qkv" in key:
            start, kind = key.replace("attn.qkv", "attention").replace("blocks", "vit.layers").rsplit(".", 1)
            parts = zip("qkv", value.chunk(3), strict=True)
            renamed |= {f"{start}.{letter}_proj.{kind}": part for letter, part in parts}
        elif not key.startswith("head"):
            for ours, theirs in names.items():
                key = re.sub(rf"(^|\.){ours}(\.|$)", rf"\1{theirs}\2", key)
            renamed[f"vit.{key}"] = value
    return renamed


@pytest.mark.parametrize("method", ["mctf", "mctf_exact", "tome"])
@torch.no_grad()
def test_the_same_weights_fuse_as_in_timm(method: str) -> None:
    theirs, model = make("plain").double(), make("hf_vit", layer_norm_eps=1e-6).double()
    if not hasattr(model.vit, "layers"):
        pytest.skip("this version of transformers names its layers otherwise")
    model.load_state_dict(from_timm(theirs.state_dict()))
    images = make_images(model, 3)
    torch.testing.assert_close(run(model, images), theirs(images), atol=1e-9, rtol=1e-9)
    mctf.fuse(model, method, r=8)
    mctf.fuse(theirs, method, r=8)
    torch.testing.assert_close(run(model, images), theirs(images), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_siglip_2_is_fused() -> None:
    features = {name: value for name, value in SIZES.items() if name != "image_size"}
    config = transformers.Siglip2VisionConfig(**features, **MLP, num_hidden_layers=4, num_patches=64)
    model = transformers.Siglip2VisionModel(config).eval()
    patches, grid = torch.randn(2, 60, 192), torch.tensor([[6, 10], [10, 6]])
    mask = torch.ones(2, 60)
    plain = model(patches, mask, grid).pooler_output
    mctf.fuse(model, r=0)
    assert torch.equal(model(patches, mask, grid).pooler_output, plain)
    mctf.set_r(model, 8)
    with mctf.trace(model) as trace:
        assert not torch.equal(model(patches, mask, grid).pooler_output, plain)
    assert trace.token_counts == mctf.plan(model, r=8, image_size=(48, 80)).token_counts == [60, 52, 44, 36]


def with_unknown_part(model: Any) -> None:
    model.vit.layers[1].attention.q_norm = nn.LayerNorm(16)


def with_unknown_parameter(model: Any) -> None:
    model.vit.layers[1].gate = nn.Parameter(torch.ones(48))


def with_hooked_attention(model: Any) -> None:
    model.vit.layers[1].attention.register_forward_hook(lambda *_: None)


def with_replaced_forward(model: Any) -> None:
    model.vit.layers[1].forward = lambda tokens, *_, **__: tokens


def with_another_layer(model: Any) -> None:
    model.vit.layers[1] = nn.TransformerEncoderLayer(48, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_unknown_part, r"layers\.1\.attention.*'q_norm'"),
        (with_unknown_parameter, r"layers\.1.*'gate'"),
        (with_hooked_attention, r"vit\.layers\.1\.attention has hooks"),
        (with_replaced_forward, r"vit\.layers\.1\.forward was replaced"),
        (with_another_layer, r"vit\.layers\.1 is a TransformerEncoderLayer"),
    ],
)
@torch.no_grad()
def test_layers_with_unknown_parts_are_refused(change: Any, reason: str) -> None:
    model = make("hf_vit")
    if not hasattr(model.vit, "layers"):
        pytest.skip("this version of transformers names its layers otherwise")
    change(model)
    before = list(model.named_modules())
    with pytest.raises(mctf.MctfError, match=reason):
        mctf.fuse(model, r=8)
    assert list(model.named_modules()) == before


@torch.no_grad()
def test_attention_maps_requested_before_fusing_do_not_matter() -> None:
    model = build("ViTModel", "ViTConfig", **MLP, attention="eager").eval()
    images = torch.randn(1, 3, 64, 64)
    assert len(model(images, output_attentions=True).attentions) == 4
    mctf.fuse(model, r=8)
    assert model(images).attentions is None


REFUSED = [
    ("SwinModel", "SwinConfig", {"embed_dim": 12, "depths": [1], "num_heads": [2]}, "windows"),
    ("ConvNextModel", "ConvNextConfig", {"hidden_sizes": [8], "depths": [1], "num_stages": 1}, "no global attention"),
    ("BertModel", "BertConfig", TEXT, "is not a supported model"),
]


@pytest.mark.parametrize(("kind", "config", "features", "reason"), REFUSED, ids=lambda each: str(each)[:12])
def test_other_families_are_refused_with_the_reason(kind: str, config: str, features: dict, reason: str) -> None:
    model = getattr(transformers, kind)(getattr(transformers, config)(**features))
    with pytest.raises(mctf.MctfError, match=rf"{kind}.*{reason}"):
        mctf.fuse(model)


def test_the_error_for_a_wrapper_names_the_model_inside() -> None:
    wrapper = nn.Sequential(nn.Identity(), make("hf_dinov2"))
    with pytest.raises(mctf.MctfError, match=r"mctf\.fuse\(model\.get_submodule\('1'\)\)"):
        mctf.fuse(wrapper)


def test_several_towers_are_refused() -> None:
    model = two_towers("CLIP")
    model.second = make("hf_vit").vit
    with pytest.raises(mctf.MctfError, match=r"several vision towers \(vision_model, second\).*model\.vision_model"):
        mctf.fuse(model)
    mctf.fuse(model.second, r=8)


@pytest.mark.parametrize(
    ("name", "protected", "class_token"),
    [("hf_vit", 1, True), ("hf_deit", 2, True), ("hf_dinov2_registers", 5, True), ("hf_siglip", 0, False)],
)
def test_tokens_in_front_are_protected(name: str, protected: int, class_token: bool) -> None:
    host = find_host(make(name))
    assert (host.protected, host.class_token) == (protected, class_token)
    assert host.image_size == (64, 64)


def test_class_token_attention_needs_a_class_token() -> None:
    with pytest.raises(mctf.MctfError, match="class token"):
        mctf.fuse(make("hf_siglip"), informativeness="class")
    mctf.fuse(make("hf_clip"), informativeness="class")


@torch.no_grad()
def test_a_fused_model_embeds_patches_by_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("hf_dinov3")
    own, images = model.embeddings.patch_embeddings, make_images(model, 2)
    mctf.fuse(model, r=8)
    expected = run(model, images)
    monkeypatch.setattr("mctf.hosts.patch_embed._reduced_precision_on_gpu", lambda images: True)
    torch.testing.assert_close(run(model, images), expected, atol=1e-4, rtol=1e-4)
    assert type(model.embeddings.patch_embeddings).__name__ == "MatmulPatchEmbed"
    assert mctf.unfuse(model).embeddings.patch_embeddings is own
