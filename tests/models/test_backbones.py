"""T2T-ViT and LV-ViT: the public checkpoints' keys, stored logits, cost, timm's interface."""

import copy
import csv
import functools
import math
import pickle
import zlib
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

import mctf
from helpers.shared_data import SHARED, needs_shared
from mctf.hosts import count_on_meta
from mctf.models import loading
from mctf.models.t2t_vit import sinusoids

KEYS = "paper/backbone_state_dicts.csv"
GOLDEN = "golden/t2t_lvvit.npz"
PUBLISHED = ("t2t_vit_t_14", "t2t_vit_t_19", "lvvit_s")
FAMILIES = ("t2t_vit_t_14", "lvvit_t")
TINY = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 10}
NARROW = {"t2t_vit_t_14": {"token_dim": 8}, "lvvit_t": {"stem_dim": 8}}


def make(name: str, **options: Any) -> Any:
    """A small model with random weights that matter; class token and biases begin near zero."""
    model = timm.create_model(name, **{**TINY, **NARROW[name], **options}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() in (2, 4):
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            elif path != "pos_embed":
                parameter.add_(0.3 * noise)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def published_keys(name: str) -> dict[str, tuple[int, ...]]:
    with (SHARED / KEYS).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == name]
    return {row["key"]: tuple(int(side) for side in row["shape"].split("x") if side) for row in rows}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


@needs_shared(KEYS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_and_shapes_are_those_of_the_public_checkpoints(name: str) -> None:
    assert shapes(loading.create_empty(name)) == published_keys(name)


@needs_shared(KEYS)
def test_other_shapes_would_be_noticed() -> None:
    with torch.device("meta"):
        assert shapes(timm.create_model("lvvit_s", num_classes=10)) != published_keys("lvvit_s")


def filler(key: str, value: Tensor) -> Tensor:
    """The weight that the stored logits were computed with: random numbers drawn by the key's checksum."""
    drawn = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(tuple(value.shape))
    noise = torch.from_numpy(np.asarray(drawn, dtype=np.float32))
    if key.endswith("num_batches_tracked"):
        return torch.zeros_like(value)
    if key.endswith("running_var"):
        return 1 + 0.02 * noise.abs()
    if value.dim() == 1 and key.endswith("weight"):
        return 1 + 0.02 * noise
    if value.dim() in (2, 4):
        return noise / math.sqrt(math.prod(value.shape[1:]))
    return 0.02 * noise


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(SHARED / GOLDEN))


@torch.no_grad()
def golden_error(model: nn.Module, name: str) -> float:
    """Largest difference of a logit from the stored ones, relative to the largest of those."""
    config = resolve_model_data_config(model)
    mean, std = (torch.tensor(config[entry])[:, None, None] for entry in ("mean", "std"))
    logits = model((torch.from_numpy(golden()["images"]).float() / 255 - mean) / std)
    return float(np.abs(logits.numpy() - golden()[name]).max() / np.abs(golden()[name]).max())


def filled(name: str) -> Any:
    model = timm.create_model(name).eval()
    model.load_state_dict({key: filler(key, value) for key, value in model.state_dict().items()})
    return model


@needs_shared(GOLDEN)
def test_the_stored_logits_are_of_these_models() -> None:
    assert set(golden()) == {"images", *PUBLISHED}


@needs_shared(GOLDEN)
@pytest.mark.parametrize("name", ["t2t_vit_t_14", pytest.param("t2t_vit_t_19", marks=pytest.mark.slow), "lvvit_s"])
def test_logits_are_the_stored_ones(name: str) -> None:
    assert golden_error(filled(name), name) < 1e-4


@needs_shared(GOLDEN)
def test_the_stored_logits_notice_the_scale_of_attention() -> None:
    model = filled("t2t_vit_t_14")
    model.blocks[3].attn.q_norm = nn.Identity()
    assert golden_error(model, "t2t_vit_t_14") > 1e-3


@needs_shared(GOLDEN)
def test_the_stored_logits_notice_a_branch_that_is_not_divided() -> None:
    model = filled("lvvit_s")
    model.blocks[3].ls2 = nn.Identity()
    assert golden_error(model, "lvvit_s") > 1e-3


@pytest.mark.parametrize(
    ("name", "gflops", "millions"),
    [("t2t_vit_t_14", 6.11, 21.5), ("t2t_vit_t_19", 9.81, 39.2), ("lvvit_s", 6.57, 26.2)],
)
@torch.no_grad()
def test_cost_and_size_are_the_published_ones(name: str, gflops: float, millions: float) -> None:
    model = loading.create_empty(name)
    _, multiply_adds = count_on_meta(model, lambda empty: empty(torch.zeros(1, 3, 224, 224, device="meta")))
    assert round(multiply_adds / 1e9, 2) == gflops
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize(("name", "millions"), [("lvvit_t", 8.5), ("lvvit_m", 55.8)])
def test_size_of_the_other_lv_vits(name: str, millions: float) -> None:
    model = loading.create_empty(name)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


class TestArithmetic:
    """The page's formulas, written out."""

    @torch.no_grad()
    def test_a_t2t_block_scales_by_the_whole_width(self) -> None:
        block = make("t2t_vit_t_14").blocks[1]
        x = images(2, 17, 48)
        q, k, v = block.attn.qkv(block.norm1(x)).view(2, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT * 48**-0.5).softmax(-1)
        x_attended = x + block.attn.proj((attention @ v).transpose(1, 2).flatten(2))
        expected = x_attended + block.mlp(block.norm2(x_attended))
        torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    def test_a_token_transformer_adds_its_values(self) -> None:
        layer = make("t2t_vit_t_14").tokens_to_token.attention2
        x = images(2, 9, 72)
        q, k, v = layer.attn.qkv(layer.norm1(x)).chunk(3, -1)
        attended = v + layer.attn.proj((q @ k.mT * 72**-0.5).softmax(-1) @ v)
        expected = attended + layer.mlp(layer.norm2(attended))
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    def test_an_lv_vit_block_halves_its_branches(self) -> None:
        block = make("lvvit_t").blocks[1]
        x = images(2, 17, 48)
        x_attended = x + block.attn(block.norm1(x)) / 2
        expected = x_attended + block.mlp(block.norm2(x_attended)) / 2
        torch.testing.assert_close(block(x), expected)

    @pytest.mark.parametrize("training", [False, True])
    def test_lv_vit_logits_are_of_both_heads(self, training: bool) -> None:
        model = make("lvvit_t").train(training)
        x = images(2, 17, 48)
        logits = model.forward_head(x)
        expected = model.head(x[:, 0]) + 0.5 * model.aux_head(x[:, 1:]).max(dim=1).values
        torch.testing.assert_close(logits, expected)
        logits.sum().backward()
        assert model.head.weight.grad is not None
        assert model.aux_head.weight.grad is not None

    def test_positions_of_t2t_are_sinusoids(self) -> None:
        table = sinusoids(17, 48)
        for position, channel in [(0, 0), (0, 1), (3, 0), (3, 1), (16, 46), (16, 47), (5, 11)]:
            angle = position / 10000 ** (2 * (channel // 2) / 48)
            expected = math.cos(angle) if channel % 2 else math.sin(angle)
            assert table[0, position, channel].item() == pytest.approx(expected, abs=1e-6)
        model = make("t2t_vit_t_14")
        assert torch.equal(model.pos_embed, table)
        assert not model.pos_embed.requires_grad
        assert sinusoids(4, 7).shape == (1, 4, 7)


@pytest.mark.parametrize("name", FAMILIES)
class TestTimmInterface:
    @torch.no_grad()
    def test_other_images_classes_and_channels(self, name: str) -> None:
        model = make(name, img_size=(48, 80), in_chans=1, num_classes=4, drop_path_rate=0.3)
        assert model(images(2, 1, 48, 80)).shape == (2, 4)
        assert model.patch_embed.grid_size == (3, 5)
        assert model.pos_embed.shape == (1, 16, 48)
        assert model.blocks[-1].drop_path2.drop_prob == pytest.approx(0.3)

    @torch.no_grad()
    def test_the_image_size_can_be_set(self, name: str) -> None:
        model = make(name)
        class_position = model.pos_embed[:, 0].clone()
        model.set_input_size(img_size=(96, 64))
        assert model(images(1, 3, 96, 64)).shape == (1, 10)
        assert torch.equal(model.pos_embed[:, 0], class_position)
        assert model.pos_embed.requires_grad == (name != "t2t_vit_t_14")

    @torch.no_grad()
    def test_features_and_head_make_the_logits(self, name: str) -> None:
        model, x = make(name), images(2, 3, 64, 64)
        features = model.forward_features(x)
        assert features.shape == (2, 17, model.num_features)
        assert torch.equal(model.forward_head(features), model(x))
        assert torch.equal(model.forward_head(features, pre_logits=True), features[:, 0])

    @torch.no_grad()
    def test_feature_maps(self, name: str) -> None:
        model, x = make(name), images(2, 3, 64, 64)
        final, maps = model.forward_intermediates(x, indices=[0, 2])
        assert [tuple(one.shape) for one in maps] == [(2, 48, 4, 4)] * 2
        torch.testing.assert_close(final, model.forward_features(x))
        pyramid = timm.create_model(name, **{**TINY, **NARROW[name], "features_only": True, "out_indices": (1,)})
        assert [tuple(one.shape) for one in pyramid(x)] == [(2, 48, 4, 4)]

    @torch.no_grad()
    def test_another_classifier(self, name: str) -> None:
        model, x = make(name), images(2, 3, 64, 64)
        features = model.forward_features(x)
        model.reset_classifier(7)
        assert model(x).shape == (2, 7)
        model.reset_classifier(0)
        assert torch.equal(model(x), features[:, 0])
        model.reset_classifier(0, "")
        assert torch.equal(model(x), features)
        mean = timm.create_model(name, **{**TINY, **NARROW[name], "num_classes": 0, "global_pool": "avg"}).eval()
        mean.load_state_dict(model.state_dict())
        torch.testing.assert_close(mean(x), features[:, 1:].mean(1))

    def test_checkpointed_gradients_are_the_same(self, name: str) -> None:
        model, x = make(name), images(2, 3, 64, 64)
        gradients = []
        for enable in (False, True):
            model.set_grad_checkpointing(enable)
            model.zero_grad()
            model(x).square().mean().backward()
            gradients.append({path: value.grad for path, value in model.named_parameters() if value.grad is not None})
        assert len(gradients[0]) > 30
        torch.testing.assert_close(gradients[0], gradients[1])

    def test_optimizer_groups(self, name: str) -> None:
        model = make(name)
        assert model.no_weight_decay() >= {"pos_embed", "cls_token"}
        groups = param_groups_layer_decay(model, layer_decay=0.5)
        smallest = min(group["lr_scale"] for group in groups)
        slowest = {id(value) for group in groups if group["lr_scale"] == smallest for value in group["params"]}
        assert slowest >= {id(value) for value in model.patch_embed.parameters()}
        grouped = sum(len(group["params"]) for group in groups)
        assert grouped == sum(value.requires_grad for value in model.parameters())

    @torch.no_grad()
    def test_copies_are_independent(self, name: str) -> None:
        model, x = make(name), images(1, 3, 64, 64)
        before = model(x)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for value in model.parameters():
            value.zero_()
        assert all(torch.equal(other(x), before) for other in copies)

    def test_what_timm_records(self, name: str) -> None:
        config = resolve_model_data_config(make(name))
        assert config["input_size"] == (3, 224, 224)
        assert (config["crop_pct"], config["interpolation"]) == (0.9, "bicubic")
        assert config["mean"] == (0.485, 0.456, 0.406)
        assert config["std"] == (0.229, 0.224, 0.225)
        model = loading.create_empty(name)
        classifier = model.pretrained_cfg["classifier"]
        heads = [classifier] if isinstance(classifier, str) else classifier
        assert all(isinstance(model.get_submodule(head), nn.Linear) for head in heads)
        assert {path for path, _ in model.named_modules() if "head" in path} - {"head_drop"} == set(heads)
        with pytest.raises(mctf.MctfError, match="pass a file with --weights"):
            loading.load_model(name)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("t2t_vit_t_14", {"img_size": 72}, "images of 72x72 do not divide into tokens: give multiples of 16 pixels"),
        ("lvvit_t", {"img_size": (64, 0)}, "images of 64x0 do not divide"),
        ("lvvit_t", {"global_pool": "avg"}, "global_pool='avg' does not fit LV-ViT's two heads: use 'token'"),
    ],
)
def test_refused_options(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(mctf.MctfError) as caught:
        make(name, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_refused_calls(name: str) -> None:
    model = make(name)
    with pytest.raises(mctf.MctfError, match=r"expects 64x64 images, got 80x64: create it with img_size=\(80, 64\)"):
        model(images(1, 3, 80, 64))
    with pytest.raises(mctf.MctfError, match="patch_size=8 cannot be set"):
        model.set_input_size(patch_size=8)
