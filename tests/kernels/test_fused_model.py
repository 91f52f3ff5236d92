"""Whole fused models with the kernels against the same models without them."""

import pytest
import timm
import torch

import mctf
from mctf.hosts.patch_embed import MatmulPatchEmbed
from mctf.kernels import disable_kernels


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=10, depth=2, img_size=96).eval().to(device)


METHODS = [(name, {}) for name in ("mctf", "mctf_exact", "tome", "evit", "bat", "random")]
METHODS += [("evit", {"fuse_inattentive": False})]


@pytest.mark.parametrize(("method", "options", "r"), [(*method, 8) for method in METHODS] + [("mctf", {}, "fast")])
@torch.no_grad()
def test_kernels_and_plain_versions_agree(model, method, options, r, device):
    images = torch.randn(2, 3, 96, 96, device=device)
    mctf.fuse(model, method, r=r, **options)
    actual = model(images)
    with disable_kernels():
        expected = model(images)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_tokens_with_strided_channels(device):
    """Without a class token the residual stream keeps the layout of the patch convolution, channels far apart."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", depth=1, img_size=96, class_token=False, global_pool="avg").eval().to(device)
    images = torch.randn(2, 3, 96, 96, device=device)
    patches = model.patch_embed(images)
    assert patches.stride(-1) != 1
    for method in ("mctf_exact", "mctf"):
        mctf.fuse(model, method, r=8)
        actual = model(images)
        with disable_kernels():
            expected = model(images)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        mctf.unfuse(model)


def test_training_agrees(model, device):
    images = torch.randn(2, 3, 96, 96, device=device)
    mctf.fuse(model, "mctf_exact", r=8)
    model(images).sum().backward()
    actual = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    with disable_kernels():
        model(images).sum().backward()
    torch.testing.assert_close(actual, model.blocks[0].attn.qkv.weight.grad, rtol=1e-3, atol=1e-4)


def test_patch_embedding_by_matmul_equals_the_convolution(model, device):
    convolution = model.patch_embed.proj
    product = MatmulPatchEmbed.of(convolution, lambda: True)
    images = torch.randn(2, 3, 101, 96, device=device)
    expected = convolution(images)
    torch.testing.assert_close(product._multiply(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["mctf", "mctf_exact", "tome", "evit"])
def test_a_batch_without_images(method, device):
    options = {"depth": 2, "img_size": 96, "dynamic_img_size": False}  # with dynamic sizes timm takes no empty batch
    model = timm.create_model("test_vit", num_classes=10, **options).eval().to(device)
    mctf.fuse(model, method, r=8)
    logits = model(torch.randn(0, 3, 96, 96, device=device))
    assert logits.shape == (0, 10)
    logits.sum().backward()
