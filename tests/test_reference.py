"""The library against the slow reference, in float64 so that no rounding decides between nearly equal pairs."""

import dataclasses
from typing import Any

import pytest
import torch

from helpers import reference
from helpers.models import DEPTH, NAMES, PRODUCT, REFERENCED, family_of, make, make_images
from helpers.reference_check import assert_as_reference, slow_result


@pytest.mark.parametrize(("name", "method"), [case for case in PRODUCT if case.values[1] in REFERENCED])
@torch.no_grad()
def test_every_model_is_as_the_reference(name: str, method: str) -> None:
    model = make(name).double()
    # odd, even, nothing, and more than there is
    assert_as_reference(model, make_images(model, 2), [5, 16, 0, 60], method)


@pytest.mark.parametrize("method", REFERENCED)
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
