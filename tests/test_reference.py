"""The library against the slow reference, in float64 so that no rounding decides between nearly equal pairs."""

import dataclasses
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import mctf
import reference
from models import DEPTH, METHODS, NAMES, make, make_images

# Sizes and their shares are float32 in the library, everything else is float64 here.
TOLERANCE = 1e-6


def embed(model: VisionTransformer, images: Tensor) -> Tensor:
    """The tokens that enter the first block."""
    return model.norm_pre(model._pos_embed(model.patch_embed(images)))


def assert_as_reference(
    model: VisionTransformer, images: Tensor, counts: list[int], method: str, **options: Any
) -> None:
    """Final tokens, sizes, source map and logits of the fused model are the reference's, image by image."""
    tokens = embed(model, images)
    own = {"attention": "exact", "informativeness": "auto"} if method == "mctf_exact" else {}
    meant = reference.Options(**{**own, **options})
    expected = [reference.run_blocks(model, one, counts, method, meant) for one in tokens]

    mctf.fuse(model, method, r=counts, **options)
    with mctf.trace(model) as trace:
        logits = model(images)
        out = model.blocks(tokens)
    every = model.global_pool != "token"
    mctf.unfuse(model)

    for image, slow in enumerate(expected):
        where = slow.source_map(tokens.shape[1])
        features = slow.tokens[where] if every else slow.tokens
        assert trace.source_map()[image].tolist() == where
        assert trace.blocks[-1].sizes[image].tolist() == slow.sizes
        torch.testing.assert_close(out[image], features, atol=TOLERANCE, rtol=TOLERANCE)
        head = model.forward_head(model.norm(features[None]))[0]
        torch.testing.assert_close(logits[image], head, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_model_is_as_the_reference(name: str, method: str) -> None:
    model = make(name).double()
    # odd, even, nothing, and more than there is
    assert_as_reference(model, make_images(model, 2), [5, 16, 0, 60], method)


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_first_block_left_alone_is_as_the_reference(method: str) -> None:
    model = make("odd").double()
    assert_as_reference(model, make_images(model, 2), [0, 20, 20, 20], method)


VARIANTS: list[dict[str, Any]] = [
    {"tau_sim": 0.5},
    {"tau_sim": 0},
    {"tau_info": 0},
    {"tau_size": 0},
    {"tau_info": 0.5, "tau_size": 0.3},
    {"tau_info": 0, "tau_size": 0},
    {"bidirectional": False},
    {"pooling": "size"},
    {"pooling": "mean"},
    {"pooling": "max"},
    {"attention": "precise"},
    {"attention": "previous"},
    {"attention": "exact"},
    {"attention": "exact", "pooling": "size"},
    {"informativeness": "class"},
    {"informativeness": "both"},
    {"informativeness": "auto", "attention": "previous"},
    {"proportional": False},
    {"attention": "precise", "pooling": "max", "bidirectional": False, "proportional": False},
    {"attention": "previous", "pooling": "size", "tau_size": 0, "proportional": False},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("name", ["plain", "registers"])
@torch.no_grad()
def test_every_option_is_as_the_reference(name: str, options: dict[str, Any]) -> None:
    model = make(name, seed=1).double()
    assert_as_reference(model, make_images(model, 2), [4, 9, 16, 11], "mctf", **options)


@torch.no_grad()
def test_tome_without_proportional_attention_is_as_the_reference() -> None:
    model = make("distilled").double()
    assert_as_reference(model, make_images(model, 2), [9] * DEPTH, "tome", proportional=False)


@pytest.mark.parametrize("field", dataclasses.fields(reference.Options), ids=lambda field: field.name)
@torch.no_grad()
def test_the_comparison_notices_every_option(field: dataclasses.Field) -> None:
    """Each option changes the reference's result, so a library that ignored it would be caught."""
    other = {"bidirectional": False, "proportional": False}
    other |= {"pooling": "max", "attention": "precise", "informativeness": "class"}
    model = make("plain").double()
    (tokens,) = embed(model, make_images(model, 1))
    changed = reference.Options(**{field.name: other.get(field.name, 0.7)})
    counts = [4, 9, 16, 11]
    default = reference.run_blocks(model, tokens, counts, "mctf", reference.Options())
    assert not torch.allclose(
        reference.run_blocks(model, tokens, counts, "mctf", changed).tokens, default.tokens, atol=1e-3
    )


@torch.no_grad()
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("plain").double()
    monkeypatch.setattr(reference, "pooling_weights", lambda informative, sizes, pooling: list(sizes))
    with pytest.raises(AssertionError):
        assert_as_reference(model, make_images(model, 1), [0, 8, 8, 8], "mctf")
