"""The library against the slow reference, in float64 so that no rounding decides between nearly equal pairs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
import reference
from models import DEPTH, METHODS, NAMES, family_of, make, make_images

# Sizes and their shares are float32 in the library, and so are some rotary tables; everything else is float64 here.
TOLERANCE = 1e-5


def slow_result(
    model: nn.Module, tokens: Tensor, counts: list[int], method: str, options: reference.Options
) -> reference.Result:
    """The reference on one image's tokens (N C)."""
    family = family_of(model)
    blocks, protected = family.pieces(model), family.prefix(model)
    return reference.run_blocks(blocks, tokens, counts, protected=protected, method=method, options=options)


def assert_as_reference(model: nn.Module, images: Tensor, counts: list[int], method: str, **options: Any) -> None:
    """Final tokens, sizes, source map and output of the fused model are the reference's, image by image."""
    family = family_of(model)
    tokens = family.embed(model, images)
    own = {"attention": "exact", "informativeness": "auto"} if method == "mctf_exact" else {}
    meant = reference.Options(**{**own, **options})
    expected = [slow_result(model, one, counts, method, meant) for one in tokens]

    mctf.fuse(model, method, r=counts, **options)
    with mctf.trace(model) as trace:
        output = family.run(model, images)
        features = family.features(model, images)
    mctf.unfuse(model)

    for image, slow in enumerate(expected):
        where = slow.source_map(tokens.shape[1])
        assert trace.source_map()[image].tolist() == where
        assert trace.blocks[-1].sizes[image].tolist() == slow.sizes
        final = family.finish(model, (slow.tokens[where] if family.keeps_every_token(model) else slow.tokens)[None])
        torch.testing.assert_close(features[image], final[0], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(output[image], family.head(model, final)[0], atol=TOLERANCE, rtol=TOLERANCE)


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


# Where positions or talking heads could go wrong: tokens fused before attention, after the block, by other weights.
OTHER_WAYS: list[dict[str, Any]] = [
    {"attention": "precise"},
    {"attention": "previous", "pooling": "size"},
    {"attention": "exact", "pooling": "mean"},
    {"pooling": "max"},
    {"proportional": False, "bidirectional": False},
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("eva02", {}),
    ("eva_rope_mixed", {}),
    ("eva_dinov3", {}),
    ("eva02", {"use_rot_pos_emb": False}),
    ("beit_both", {}),
    ("beit", {"use_rel_pos_bias": False}),
    ("relpos", {"rel_pos_type": "mlp"}),
    ("cait", {}),
]
OTHERS += [(name, {}) for name in ("hf_beit_shared", "hf_dinov3") if name in NAMES]  # where transformers is installed


@pytest.mark.parametrize("options", OTHER_WAYS, ids=str)
@pytest.mark.parametrize(("name", "features"), OTHERS, ids=str)
@torch.no_grad()
def test_positions_follow_the_tokens_under_every_option(
    name: str, features: dict[str, Any], options: dict[str, Any]
) -> None:
    model = make(name, seed=1, **features).double()
    assert_as_reference(model, make_images(model, 1), [4, 9, 0, 11], "mctf", **options)


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
    (tokens,) = family_of(model).embed(model, make_images(model, 1))
    options = reference.Options(), reference.Options(**{field.name: other.get(field.name, 0.7)})
    default, changed = (slow_result(model, tokens, [4, 9, 16, 11], "mctf", option) for option in options)
    assert not torch.allclose(changed.tokens, default.tokens, atol=1e-3)


@torch.no_grad()
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("plain").double()
    monkeypatch.setattr(reference, "pooling_weights", lambda informative, sizes, pooling: list(sizes))
    with pytest.raises(AssertionError):
        assert_as_reference(model, make_images(model, 1), [0, 8, 8, 8], "mctf")
