"""The count of multiply-adds on the meta device, and the formulas that give the same."""

from typing import Any

import pytest

from mctf.core.flops import BlockShape
from mctf.methods import make_method
from mctf.methods._counting import count_macs

SHAPE = BlockShape(channels=48, attention=48, heads=3, mlp=2 * 48 * 96, norms=48)
ODD = BlockShape(channels=40, attention=64, heads=4, mlp=999, norms=40, norm_first=False, context=7, mixing=5, shared=2)
FORMULAS: list[tuple[str, dict[str, Any]]] = [
    ("mctf", {}),
    ("mctf", {"attention": "precise"}),
    ("mctf", {"attention": "previous"}),
    ("mctf", {"attention": "precise", "informativeness": "class"}),
    ("mctf", {"informativeness": "both", "bidirectional": False}),
    ("mctf", {"tau_info": 0, "tau_size": 0, "pooling": "mean"}),
    ("mctf_exact", {"informativeness": "class"}),
    ("tome", {}),
    ("diffrate", {}),
    ("pitome", {}),
    ("atc", {}),
    ("random", {}),
    ("free_drop", {}),
]


@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize(("name", "options"), FORMULAS, ids=str)
def test_a_formula_gives_the_count(name: str, options: dict[str, Any], shape: BlockShape) -> None:
    method = make_method(name, options).resolve(class_token=True)
    for tokens, r, protected in ((65, 16, 1), (40, 7, 2), (33, 0, 1), (21, 5, 0)):
        if protected or name != "mctf_exact":
            counted = count_macs(method, shape, tokens, r, protected)
            assert method.run_macs(shape, tokens, r, protected=protected) == counted


def test_pieces_are_counted_once_each() -> None:
    method = make_method("evit", {})
    expected = SHAPE.attention_branch(65) + SHAPE.mlp_branch(49)
    assert count_macs(method, SHAPE, 65, 16, 1) == expected


def test_learned_layers_are_counted_with_their_norms() -> None:
    method = make_method("dynamic_vit", {})
    patch = 5 * 48 + 48 * 48 + 48 * 24 + 24 * 12 + 12 * 2  # LayerNorm and four linear layers of the predictor
    assert count_macs(method, SHAPE, 65, 16, 1) == SHAPE.plain(49) + 64 * patch
