"""Bad input: one clear sentence each, raised before anything is changed."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from torch import nn

import mctf
from models import make, make_images


def assert_refused(model: Any, text: str, call: Callable[[], object]) -> None:
    """The call raises MctfError with this text in one line, and the model stays as it was."""
    before = snapshot(model)
    with pytest.raises(mctf.MctfError) as caught:
        call()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(model) == before


def snapshot(model: Any) -> list[object]:
    """What a refused call could have changed: the modules themselves, their modes and their parameters."""
    if not isinstance(model, nn.Module):
        return [model]
    modules = [(path, id(module), module.training) for path, module in model.named_modules()]
    return [*modules, *((path, id(value), value._version) for path, value in model.state_dict(keep_vars=True).items())]


def test_the_check_can_fail() -> None:
    model = make("plain")
    with pytest.raises(AssertionError, match="assert"):
        assert_refused(model, "is negative", lambda: mctf.fuse(model, r=1.5))

    def change_and_refuse() -> None:
        mctf.fuse(model)
        raise mctf.MctfError("too late")

    with pytest.raises(AssertionError):
        assert_refused(model, "too late", change_and_refuse)


class Wrapper(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(3, 3), "Linear is no model that mctf knows: pass a Vision Transformer with global attention"),
        (Wrapper(nn.Linear(3, 3)), "Wrapper is no model that mctf knows: pass"),
        (None, "expected a torch.nn.Module, got NoneType"),
        ("deit_tiny_patch16_224", "expected a torch.nn.Module, got str"),
    ],
    ids=["linear", "wrapper", "none", "name"],
)
def test_not_a_vision_transformer(model: Any, text: str) -> None:
    assert_refused(model, text, lambda: mctf.fuse(model))


WINDOWS = "it attends inside windows of fixed shape"
GRID = "it pools or convolves its tokens on their grid"
REFUSED = [
    ("swin_tiny_patch4_window7_224", "SwinTransformer", WINDOWS),
    ("swinv2_tiny_window8_256", "SwinTransformerV2", WINDOWS),
    ("swinv2_cr_tiny_224", "SwinTransformerV2Cr", WINDOWS),
    ("samvit_base_patch16", "VisionTransformerSAM", WINDOWS),
    ("sam2_hiera_tiny", "HieraDet", WINDOWS),
    ("maxvit_tiny_tf_224", "MaxxVit", WINDOWS),
    ("davit_tiny", "DaVit", WINDOWS),
    ("tiny_vit_5m_224", "TinyVit", WINDOWS),
    ("xcit_nano_12_p16_224", "Xcit", "it attends over channels, not over tokens"),
    ("edgenext_base", "EdgeNeXt", "it attends over channels, not over tokens"),
    ("pvt_v2_b0", "PyramidVisionTransformerV2", GRID),
    ("coat_tiny", "CoaT", GRID),
    ("hiera_tiny_224", "Hiera", GRID),
    ("mvitv2_tiny", "MultiScaleVit", GRID),
    ("levit_128s", "LevitDistilled", GRID),
    ("pit_ti_224", "PoolingVisionTransformer", GRID),
    ("poolformer_s12", "MetaFormer", GRID),
    ("fastvit_t8", "FastVit", GRID),
    ("efficientformerv2_s0", "EfficientFormerV2", GRID),
    ("convnext_atto", "ConvNeXt", "it has no global attention"),
    ("resnet18", "ResNet", "it has no global attention"),
    ("mixer_s32_224", "MlpMixer", "it has no global attention"),
    ("crossvit_9_240", "CrossVit", None),
]


@pytest.mark.parametrize(("name", "family", "reason"), REFUSED)
def test_families_that_cannot_be_fused(name: str, family: str, reason: str | None) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    text = f"{family} is no model that mctf knows" if reason is None else f"{family} cannot be fused, {reason}"
    assert_refused(model, text, lambda: mctf.fuse(model))
    assert_refused(model, "pass a Vision Transformer with global attention", lambda: mctf.plan(model))
    if reason is not None:
        assert_refused(None, f"Wrapper cannot be fused, {reason}", lambda: mctf.fuse(Wrapper(model)))


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
def test_a_wrapper_is_told_where_its_model_is(name: str, wrap: Callable[[nn.Module], nn.Module], path: str) -> None:
    model = wrap(make(name))
    assert_refused(model, f"fuse the one inside it, mctf.fuse({path})", lambda: mctf.fuse(model))
    mctf.fuse(eval(path))


@pytest.mark.parametrize(
    ("r", "text"),
    [
        (-1, "r=-1 is negative"),
        (-0.5, "neither a whole number of tokens nor a ratio"),
        (float("nan"), "r=nan is neither"),
        (float("inf"), "r=inf is neither"),
        (1.5, "r=1.5 is neither a whole number of tokens nor a ratio in [0, 1): write 16 or 0.35"),
        (1.0, "r=1.0 is neither"),
        (True, "r must be a number, a list of numbers or 'fast', not True"),
        ("fsat", "did you mean 'fast'?"),
        ("16", "r='16' is no known preset"),
        ([8, 8, 8], "r has 3 entries but the model has 4 blocks: give one entry a block"),
        ([8] * 5, "r has 5 entries"),
        ([8, 8, 8, -2], "r=-2 is negative"),
        ([8, 8, "8", 8], "not '8'"),
        ([], "r has 0 entries"),
    ],
    ids=str,
)
def test_bad_r(r: Any, text: str) -> None:
    model = make("plain")
    assert_refused(model, text, lambda: mctf.fuse(model, r=r))
    assert_refused(model, text, lambda: mctf.plan(model, r=r))
    mctf.fuse(model, r=3)
    assert_refused(model, text, lambda: mctf.set_r(model, r))
    assert model.blocks.r == 3


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (3, "blocks=3 is not a list of block numbers: write blocks=[3]"),
        ((1, 4), "blocks names 4, but the model has blocks 0 to 3"),
        ((-5,), "blocks names -5"),
        ((1.0,), "blocks names 1.0"),
        ((True,), "blocks names True"),
        ("12", "blocks names '1'"),
    ],
    ids=str,
)
def test_bad_blocks(blocks: Any, text: str) -> None:
    model = make("plain")
    assert_refused(model, text, lambda: mctf.fuse(model, blocks=blocks))
    assert_refused(model, text, lambda: mctf.fuse(model, r="fast", blocks=blocks))
    assert_refused(model, text, lambda: mctf.plan(model, blocks=blocks))


def test_a_list_and_blocks_contradict_each_other() -> None:
    model = make("plain")
    assert_refused(model, "leave out blocks=", lambda: mctf.fuse(model, r=[1] * 4, blocks=(1,)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"method": "mctff"}, "unknown method 'mctff': did you mean 'mctf'?"),
        ({"method": "nothing like it"}, "choose from "),
        ({"method": 16}, "write r=16"),
        ({"poling": "size"}, "method 'mctf' has no option 'poling': did you mean 'pooling'?"),
        ({"method": "tome", "pooling": "size"}, "method 'tome' has no option 'pooling'"),
        ({"pooling": "avg"}, "pooling='avg' is unknown: choose from attention, max, mean, size"),
        ({"pooling": None}, "pooling=None is unknown"),
        ({"attention": "prev"}, "did you mean 'previous'?"),
        ({"informativeness": "klass"}, "did you mean 'class'?"),
        ({"attention": "exact", "pooling": "max"}, "pooling='max' has no exact attention"),
        ({"tau_sim": -1}, "tau_sim=-1 must be a finite number, 0 or above"),
        ({"tau_info": float("nan")}, "tau_info=nan must be"),
        ({"tau_size": float("inf")}, "tau_size=inf must be"),
        ({"tau_size": "0"}, "tau_size='0' must be"),
        ({"tau_sim": True}, "tau_sim=True must be"),
        ({"bidirectional": "no"}, "bidirectional='no' must be True or False"),
        ({"proportional": None}, "proportional=None must be True or False"),
        ({"method": "tome", "proportional": 1}, "proportional=1 must be True or False"),
    ],
    ids=str,
)
def test_bad_methods_and_options(options: dict[str, Any], text: str) -> None:
    model = make("plain")
    assert_refused(model, text, lambda: mctf.fuse(model, **options))
    assert_refused(model, text, lambda: mctf.plan(model, **options))


@pytest.mark.parametrize("rows", ["class", "both"])
def test_informativeness_of_a_class_token_that_is_not_there(rows: str) -> None:
    model = make("mean_pool")
    text = f"informativeness={rows!r} reads the class token, which this model has not"
    assert_refused(model, text, lambda: mctf.fuse(model, informativeness=rows))
    assert_refused(model, text, lambda: mctf.plan(model, informativeness=rows))


def test_a_register_is_no_class_token() -> None:
    model = make("plain", class_token=False, reg_tokens=2, global_pool="avg")
    assert_refused(model, "reads the class token", lambda: mctf.fuse(model, informativeness="both"))
    mctf.fuse(model, "mctf_exact")
    assert model.blocks.method.informativeness == "mean"


def test_fusing_twice() -> None:
    model = mctf.fuse(make("plain"), r=4)
    assert_refused(model, "the model is fused already: mctf.set_r changes r", lambda: mctf.fuse(model, "tome"))
    outer = Wrapper(model)
    assert_refused(outer, "the model is fused already", lambda: mctf.fuse(outer))


def test_a_plain_model_has_nothing_to_undo_or_watch() -> None:
    model = make("plain")
    text = "the model is not fused: run mctf.fuse(model, r=16) first"
    assert_refused(model, text, lambda: mctf.unfuse(model))
    assert_refused(model, text, lambda: mctf.set_r(model, 3))
    assert_refused(model, text, lambda: mctf.trace(model).__enter__())


@pytest.mark.parametrize("arguments", [{"attn_mask": torch.zeros(65, 65)}, {"is_causal": True}], ids=["mask", "causal"])
@pytest.mark.parametrize("call", ["forward", "forward_features", "forward_intermediates"])
def test_attention_masks_while_fused(call: str, arguments: dict[str, Any]) -> None:
    model = mctf.fuse(make("plain"), r=4)
    images = make_images(model, 1)
    text = "a fused model takes no attention mask"
    assert_refused(model, text, lambda: getattr(model, call)(images, **arguments))


@pytest.mark.parametrize(
    ("features", "text"),
    [
        ({"block_fn": ParallelScalingBlock}, "blocks.0 is a ParallelScalingBlock"),
        ({"block_fn": ParallelThingsBlock}, "blocks.0 is a ParallelThingsBlock"),
        ({"attn_layer": "diff"}, "blocks.0.attn is a DiffAttention"),
    ],
    ids=["parallel scaling", "parallel things", "differential"],
)
def test_blocks_that_fusing_would_get_wrong(features: dict[str, Any], text: str) -> None:
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


@pytest.mark.parametrize(
    ("image_size", "text"),
    [
        (0, "image_size=0 is not a size: write 384 or (384, 512)"),
        (-64, "image_size=-64 is not a size"),
        ((64,), "image_size=(64,) is not a size"),
        ("64", "image_size='64' is not a size"),
        (64.0, "image_size=64.0 is not a size"),
        (72, "the model does not take 72x72 images"),
        ((64, 80), "create it with img_size=(64, 80) or dynamic_img_size=True"),
    ],
    ids=str,
)
def test_bad_image_sizes(image_size: Any, text: str) -> None:
    model = make("plain")
    assert_refused(model, text, lambda: mctf.plan(model, image_size=image_size))


def test_bad_model_names() -> None:
    assert_refused(
        None, "timm has no model 'deit_tiny_patch16_24': did you mean", lambda: mctf.plan("deit_tiny_patch16_24")
    )
    assert_refused(None, "ResNet cannot be fused", lambda: mctf.plan("resnet18"))
    assert_refused(None, "does not take 7x7 images", lambda: mctf.plan("deit_tiny_patch16_224", image_size=7))


@pytest.mark.parametrize("order", [[1], [0, 2]], ids=str)
def test_blocks_called_out_of_order(order: list[int]) -> None:
    model = mctf.fuse(make("plain"), r=4)
    blocks = list(model.blocks)

    def call() -> None:
        tokens = torch.randn(1, 65, 48)
        for index in order:
            tokens = blocks[index](tokens)

    assert_refused(model, "call them in order", call)


@pytest.mark.parametrize("part", [slice(1, None), slice(None, None, 2), slice(None, None, -1)], ids=str)
def test_slices_without_the_first_block(part: slice) -> None:
    model = mctf.fuse(make("plain"), r=4)
    assert_refused(model, "can only be sliced from its first block on", lambda: model.blocks[part])


def test_unknown_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fuze'"):
        _ = mctf.fuze
