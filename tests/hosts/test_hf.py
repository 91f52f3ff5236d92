"""Fused models of transformers: hidden states, feature maps, gradients, and refused arguments."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.families.hf import MLP, Hf, build
from helpers.families.hf_blocks import part
from helpers.models import family_of, make, make_images, names_of, run, tokens_of

pytest.importorskip("transformers", reason="the extra hf is not installed")

every_model = pytest.mark.parametrize("name", names_of(lambda family: isinstance(family, Hf)))


def call(model: Any, images: Tensor, **more: Any) -> Any:
    """The whole output of a model."""
    return model(**family_of(model).given(model, images), **more)


class TestHiddenStates:
    @every_model
    @torch.no_grad()
    def test_with_r_0_they_are_the_baselines(self, name: str) -> None:
        model = make(name)
        images = make_images(model, 2)
        mctf.fuse(model, r=0)
        fused = call(model, images, output_hidden_states=True).hidden_states
        mctf.unfuse(model)
        plain = call(model, images, output_hidden_states=True).hidden_states
        assert len(fused) == len(plain) == 5
        assert all(torch.equal(one, other) for one, other in zip(fused, plain, strict=True))

    @pytest.mark.parametrize("before", [True, False], ids=["hooks before fusing", "hooks after fusing"])
    @every_model
    @torch.no_grad()
    def test_every_token_has_the_state_of_its_fused_token(self, name: str, before: bool) -> None:
        model = make(name)
        images = make_images(model, 2)
        if before:  # transformers attaches its hooks when states are first requested
            call(model, images, output_hidden_states=True)
        mctf.fuse(model, r=8, restore="copy")
        with mctf.trace(model) as trace:
            states = call(model, images, output_hidden_states=True).hidden_states
        assert [state.shape[1] for state in states] == [tokens_of(model)] * 5
        family = family_of(model)
        assert torch.equal(states[0], family.embed(model, images))
        assert torch.equal(family.finish(model, states[-1]), family.features(model, images))
        for block, state in enumerate(states[1:]):
            slots = trace.source_map(block)
            for image in range(2):
                distinct = {int(slot): state[image, position] for position, slot in enumerate(slots[image])}
                assert len(distinct) == trace.token_counts[block]
                assert all(
                    torch.equal(state[image, position], distinct[int(slot)])
                    for position, slot in enumerate(slots[image])
                )

    @torch.no_grad()
    def test_a_compiled_model_returns_them(self) -> None:
        model = mctf.fuse(make("hf_dinov2", depth=2), r=[4, 6])
        images = make_images(model, 2)
        expected = call(model, images, output_hidden_states=True).hidden_states  # attaches hooks under a lock
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        states = compiled(images, output_hidden_states=True).hidden_states
        torch.testing.assert_close(states, expected)

    @torch.no_grad()
    def test_threads_do_not_mix_them(self) -> None:
        model = mctf.fuse(make("hf_vit"), r=8)
        batches = [make_images(model, 1 + index % 3, seed=index) for index in range(12)]
        states = torch.no_grad()(lambda images: call(model, images, output_hidden_states=True).hidden_states)
        alone = [states(images) for images in batches]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(states, batches))
        for one, other in zip(alone, together, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "config"), [("Dinov2Backbone", "Dinov2Config"), ("DINOv3ViTBackbone", "DINOv3ViTConfig")]
)
@torch.no_grad()
def test_feature_maps_of_a_backbone_cover_the_grid(kind: str, config: str) -> None:
    model = build(kind, config, out_features=["stage2", "stage4"]).eval()
    images = torch.randn(2, 3, 64, 48)
    plain = model(images).feature_maps
    mctf.fuse(model, r=0)
    assert all(torch.equal(one, other) for one, other in zip(model(images).feature_maps, plain, strict=True))
    mctf.set_r(model, 8)
    fused = model(images).feature_maps
    assert [map.shape for map in fused] == [(2, 48, 8, 6)] * 2
    assert not torch.equal(fused[-1], plain[-1])
    assert mctf.plan(model, r=8, image_size=(64, 48)).image_tokens == 48 + mctf.hosts.find_host(model).protected


class TestRefusedArguments:
    @every_model
    def test_attention_maps(self, name: str) -> None:
        model = mctf.fuse(make(name), r=8)
        images = make_images(model, 1)
        with pytest.raises(mctf.MctfError, match="output_attentions"):
            call(model, images, output_attentions=True)
        run(model, images)
        Hf.tower(model).config._attn_implementation = "eager"
        Hf.tower(model).config.output_attentions = True
        with pytest.raises(mctf.MctfError, match="output_attentions"):
            call(model, images)
        mctf.unfuse(model)
        assert len(call(model, images).attentions) == 4

    @pytest.mark.parametrize("name", ["hf_vit", "hf_beit", "hf_beit_shared"])
    def test_attention_masks(self, name: str) -> None:
        model = mctf.fuse(make(name), r=8)
        with pytest.raises(mctf.MctfError, match="takes no attention_mask"):
            Hf.tower(model)(make_images(model, 1), attention_mask=torch.ones(1, 65))

    def test_arguments_that_reach_the_layers(self) -> None:
        model = mctf.fuse(make("hf_clip"), r=8)
        with pytest.raises(mctf.MctfError, match="takes no is_causal"):
            call(model, make_images(model, 1), is_causal=True)


@every_model
@torch.no_grad()
def test_sdpa_and_eager_attention_agree(name: str) -> None:
    model = make(name).double()
    images = make_images(model, 2)
    mctf.fuse(model, r=8)
    model.set_attn_implementation("sdpa")
    fast = run(model, images)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(run(model, images), fast, atol=1e-5, rtol=1e-5)  # the weights of pooling are float32


@pytest.mark.parametrize("name", ["hf_vit", "hf_deit", "hf_clip", "hf_siglip", "hf_dinov2", "hf_dinov3", "hf_beit"])
@torch.no_grad()
def test_images_of_another_size(name: str) -> None:
    model = make(name).double()
    more = {} if name in ("hf_dinov2", "hf_dinov3", "hf_beit") else {"interpolate_pos_encoding": True}
    images = make_images(model, 2, size=(72, 56))
    mctf.fuse(model, r=0)
    tower = Hf.tower(model)
    plain = tower(images, **more).last_hidden_state
    mctf.set_r(model, 10)
    with mctf.trace(model) as trace:
        together = tower(images, **more).last_hidden_state
    tokens = 63 + family_of(model).prefix(model)
    assert together.shape == plain.shape == (2, tokens, 48)
    assert (
        trace.token_counts
        == mctf.plan(model, r=10, image_size=(72, 56)).token_counts
        == [tokens - 10 * i for i in range(4)]
    )
    apart = torch.cat([tower(image[None], **more).last_hidden_state for image in images])
    torch.testing.assert_close(together, apart, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_masked_image_modeling() -> None:
    """The mask acts before the layers, so fusion treats a masked image like any other."""
    model = build("ViTForMaskedImageModeling", "ViTConfig", **MLP, encoder_stride=8, masks=True).eval()
    images, masked = torch.randn(2, 3, 64, 64), torch.rand(2, 64) < 0.4
    plain = model(images, bool_masked_pos=masked).reconstruction
    mctf.fuse(model, r=0)
    assert torch.equal(model(images, bool_masked_pos=masked).reconstruction, plain)
    mctf.set_r(model, 8)
    with mctf.trace(model) as trace:
        output = model(images, bool_masked_pos=masked)
    assert output.reconstruction.shape == images.shape
    assert output.loss.isfinite()
    assert trace.token_counts == [65, 57, 49, 41]


@torch.no_grad()
def test_the_decoder_of_a_masked_autoencoder_reads_every_visible_patch() -> None:
    decoder = {f"decoder_{name}": size for name, size in (("hidden_size", 32), ("num_hidden_layers", 2))}
    decoder |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 64}
    model = build("ViTMAEForPreTraining", "ViTMAEConfig", **MLP, **decoder, mask_ratio=0.5).eval()
    images, noise = torch.randn(2, 3, 64, 64), torch.rand(2, 64)
    plain = model(images, noise=noise).logits
    mctf.fuse(model, r=0)
    assert torch.equal(model(images, noise=noise).logits, plain)
    mctf.set_r(model, 6)
    with mctf.trace(model) as trace:
        output = model(images, noise=noise)
    assert output.logits.shape == plain.shape
    assert output.loss.isfinite()
    assert trace.token_counts == [33, 27, 21, 15]


class TestTraining:
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("name", ["hf_vit", "hf_clip", "hf_dinov3", "hf_beit"])
    def test_checkpointed_layers_are_recomputed(self, name: str, reentrant: bool) -> None:
        model = make(name).train()
        images = make_images(model, 2).requires_grad_()
        mctf.fuse(model, r=8)
        calls: list[nn.Module] = []
        norm = part(family_of(model).container(model)[2], "layernorm_after", "norm2", "layer_norm2")
        norm.register_forward_hook(lambda norm, *_: calls.append(norm))
        run(model, images).sum().backward()
        assert len(calls) == 1
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        run(model, images).sum().backward()
        assert len(calls) == 3

    @pytest.mark.parametrize(
        ("name", "rate"),
        [
            ("hf_vit", "hidden_dropout_prob"),
            ("hf_vit", "attention_probs_dropout_prob"),
            ("hf_beit", "drop_path_rate"),
            ("hf_beit", "attention_probs_dropout_prob"),
            ("hf_dinov2", "drop_path_rate"),
            ("hf_dinov3", "attention_dropout"),
            ("hf_clip", "attention_dropout"),
        ],
    )
    @torch.no_grad()
    def test_dropout_acts_in_training_only(self, name: str, rate: str) -> None:
        model = make(name, **{rate: 0.4})
        images = make_images(model, 4)
        mctf.fuse(model, r=[8] * 4)  # every layer fuses, so every layer runs by its pieces
        layers = family_of(model).container(model)
        still = run(model, images)
        assert torch.equal(run(model, images), still)
        for layer in layers.children():  # nothing outside of the layers
            layer.train()
        assert not torch.allclose(run(model, images), still)


@torch.no_grad()
def test_hooks_on_a_layer_see_every_token() -> None:
    model = make("hf_siglip")
    layer = family_of(model).container(model)[2]
    seen: list[tuple[int, int]] = []
    layer.register_forward_hook(lambda module, args, output: seen.append((args[0].shape[1], output.shape[1])))
    mctf.fuse(model, r=8)
    run(model, make_images(model, 1))
    assert seen == [(64, 64)]


@torch.no_grad()
def test_a_layer_called_alone_is_unfused() -> None:
    model = make("hf_vit")
    tokens = torch.randn(1, 65, 48)
    layer = family_of(model).container(model)[1]
    plain = layer(tokens)
    mctf.fuse(model, r=8)
    assert torch.equal(layer(tokens), plain)
