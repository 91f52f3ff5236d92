"""Models that cannot be fused faithfully: refused before any change, with the module and the cure."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from torch import nn

import mctf
from helpers.models import make, make_images
from helpers.refusals import assert_refused
from mctf.hosts.unsupported import FAMILIES


class Wrapper(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            nn.Linear(3, 3),
            "torch.nn.modules.linear.Linear is not a supported model: pass a Vision Transformer with global attention",
        ),
        (Wrapper(nn.Linear(3, 3)), "hosts.test_unsupported.Wrapper is not a supported model: pass"),
        (None, "expected a torch.nn.Module, got NoneType: pass the model itself"),
        (nn.Linear, "expected a torch.nn.Module, got type: pass the model itself"),
        ("test_vit", "got str: create the model first, for example by timm.create_model('test_vit')"),
    ],
    ids=["linear", "wrapper", "none", "class", "name"],
)
def test_not_a_vision_transformer(model: Any, text: str) -> None:
    assert_refused(model, text, lambda: mctf.fuse(model))


WINDOWS = "it attends inside windows of fixed shape"
GRID = "it pools or convolves its tokens on their grid"
REFUSED = [
    ("swin_tiny_patch4_window7_224", "SwinTransformer", WINDOWS),
    ("samvit_base_patch16", "VisionTransformerSAM", WINDOWS),
    ("maxvit_tiny_tf_224", "MaxxVit", WINDOWS),
    ("xcit_nano_12_p16_224", "Xcit", "it attends over channels, not over tokens"),
    ("pvt_v2_b0", "PyramidVisionTransformerV2", GRID),
    ("hiera_tiny_224", "Hiera", GRID),
    ("levit_128s", "LevitDistilled", GRID),
    ("pit_ti_224", "PoolingVisionTransformer", GRID),
    ("poolformer_s12", "MetaFormer", GRID),
    ("convnext_atto", "ConvNeXt", "it has no global attention"),
    ("resnet18", "ResNet", "it has no global attention"),
    ("mixer_s32_224", "MlpMixer", "it has no global attention"),
    ("crossvit_9_240", "CrossVit", None),
]


@pytest.mark.parametrize(("name", "family", "reason"), REFUSED)
def test_families_that_cannot_be_fused(name: str, family: str, reason: str | None) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    text = f"{family} is not a supported model" if reason is None else f"{family} cannot be fused, {reason}"
    assert_refused(model, text, lambda: mctf.fuse(model))
    assert_refused(model, "pass a Vision Transformer with global attention", lambda: mctf.plan(model))
    if reason is not None:
        name = f"{type(model).__module__}.{type(model).__name__}"
        text = f"Wrapper cannot be fused, {reason}, which fused tokens cannot fill (backbone is a {name}): pass"
        text = text if reason == WINDOWS else f"(backbone is a {name}): pass"
        assert_refused(None, text, lambda: mctf.fuse(Wrapper(model)))


def test_the_named_classes_exist() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("timm.models.")]
    missing = {name for names in FAMILIES.values() for name in names if not any(hasattr(m, name) for m in modules)}
    assert all(name.endswith(("Model", "VisionEncoder", "Backbone")) for name in missing), (
        missing
    )  # those of transformers


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (Wrapper, "model.backbone"),
        (lambda model: Wrapper(Wrapper(model)), "model.backbone.backbone"),
        (lambda model: nn.Sequential(nn.Identity(), model), "model.get_submodule('1')"),
        (torch.compile, "model._orig_mod"),
    ],
    ids=["attribute", "deep", "numbered", "compiled"],
)
@pytest.mark.parametrize("name", ["plain", "distilled"])
def test_the_error_for_a_wrapper_names_the_model_inside(
    name: str, wrap: Callable[[nn.Module], nn.Module], path: str
) -> None:
    model = wrap(make(name))
    assert_refused(model, f"fuse the one inside it, mctf.fuse({path})", lambda: mctf.fuse(model))
    mctf.fuse(eval(path))


@pytest.mark.parametrize("rows", ["class", "both"])
def test_class_token_attention_without_a_class_token(rows: str) -> None:
    model = make("mean_pool")
    text = f"informativeness={rows!r} reads the class token, which this model does not have"
    assert_refused(model, text, lambda: mctf.fuse(model, informativeness=rows))
    assert_refused(model, text, lambda: mctf.plan(model, informativeness=rows))


def test_a_register_is_not_a_class_token() -> None:
    model = make("plain", class_token=False, reg_tokens=2, global_pool="avg")
    assert_refused(model, "reads the class token", lambda: mctf.fuse(model, informativeness="both"))
    mctf.fuse(model, "mctf_exact")
    assert model.blocks.method.informativeness == "mean"


@pytest.mark.parametrize(
    ("features", "text"),
    [
        ({"block_fn": ParallelScalingBlock}, "blocks.0 is a ParallelScalingBlock"),
        ({"block_fn": ParallelThingsBlock}, "blocks.0 is a ParallelThingsBlock"),
        ({"attn_layer": "diff"}, "blocks.0.attn is a DiffAttention"),
    ],
    ids=["parallel scaling", "parallel things", "differential"],
)
def test_unsupported_blocks(features: dict[str, Any], text: str) -> None:
    model = make("plain", **features)
    assert_refused(model, f"{text}, which mctf cannot fuse faithfully: use a model", lambda: mctf.fuse(model))


def hook(model: VisionTransformer, path: str, kind: str) -> Any:
    return getattr(model.get_submodule(path), kind)(lambda *_: None)


@pytest.mark.parametrize("path", ["blocks", "blocks.2", "blocks.2.attn", "blocks.2.attn.attn_drop"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_that_would_not_fire(path: str, kind: str) -> None:
    model = make("plain")
    handle = hook(model, path, kind)
    assert_refused(model, f"{path} has hooks, which would not fire in a fused model", lambda: mctf.fuse(model))
    handle.remove()
    mctf.fuse(model)


@pytest.mark.parametrize("path", ["blocks.2", "blocks.2.attn"])
def test_replaced_forwards_that_would_not_be_called(path: str) -> None:
    model = make("plain")
    model.get_submodule(path).forward = lambda x, **_: x
    assert_refused(model, f"{path}.forward was replaced", lambda: mctf.fuse(model))


@pytest.mark.parametrize("method", ["mctf", "mctf_exact", "tome"])
@pytest.mark.parametrize("path", ["attn.qkv", "attn.proj", "attn.q_norm", "norm1", "norm2", "mlp", "ls1", "drop_path2"])
def test_other_hooks_fire(path: str, method: str) -> None:
    model = make("layer_scale", qk_norm=True, drop_path_rate=0.1)
    fired = []
    model.get_submodule(f"blocks.2.{path}").register_forward_hook(lambda *_: fired.append(path))
    model.get_submodule(f"blocks.2.{path}").register_full_backward_hook(lambda *_: fired.append("back"))
    mctf.fuse(model, method, r=8)
    model(make_images(model, 1)).sum().backward()
    assert set(fired) == {path, "back"}
