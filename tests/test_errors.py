"""Bad arguments and calls in the wrong state: one sentence each, raised before anything is changed."""

from typing import Any

import pytest
import torch
from torch import nn

import mctf
from helpers.models import make, make_images
from helpers.refusals import assert_refused


def test_the_check_can_fail() -> None:
    model = make("plain")
    with pytest.raises(AssertionError, match="assert"):
        assert_refused(model, "is negative", lambda: mctf.fuse(model, r=1.5))

    def change_and_refuse() -> None:
        mctf.fuse(model)
        raise mctf.MctfError("too late")

    with pytest.raises(AssertionError):
        assert_refused(model, "too late", change_and_refuse)


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
        ("16", "write r=16, without quotes"),
        (" 0.35", "write r=0.35, without quotes"),
        ("lots", "choose from fast"),
        ([8, 8, 8], "r has 3 entries but the model has 4 blocks: give one "),
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
        ("1,2", "blocks='1,2' is not a list of block numbers: write blocks=[1,2]"),
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
        ({"method": "ToMe"}, "unknown method 'ToMe': did you mean 'tome'?"),
        ({"method": 16}, "write r=16"),
        ({"method": b"mctf"}, "method=b'mctf' is not a method's name: choose from mctf, "),
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


@pytest.mark.parametrize(
    ("image_size", "text"),
    [
        (0, "image size 0 is not a size: write 384 or 384x512"),
        (-64, "image size -64 is not a size"),
        ("64x", "image size '64x' is not a size"),
        ((64, 64, 64), "image size (64, 64, 64) is not a size"),
        (64.0, "image size 64.0 is not a size"),
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


def test_fusing_twice() -> None:
    model = mctf.fuse(make("plain"), r=4)
    assert_refused(model, "the model is fused already: mctf.set_r changes r", lambda: mctf.fuse(model, "tome"))
    outer = nn.Sequential(model)
    assert_refused(outer, "the model is fused already", lambda: mctf.fuse(outer))


def test_an_unfused_model_has_nothing_to_undo_or_trace() -> None:
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
