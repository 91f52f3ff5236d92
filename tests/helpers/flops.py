"""fvcore's count of what a model runs."""

from math import prod
from typing import Any

from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape
from torch import Tensor, nn

from helpers.models import family_of, run

EXACT = 1e-9  # both counts are whole numbers of multiply-adds, divided by 1e9


def attention_flops(inputs: list[Any], outputs: list[Any]) -> int:
    """q kT and A v of scaled dot-product attention: B H N d times the number of keys, twice."""
    query, key = get_shape(inputs[0]), get_shape(inputs[1])
    return 2 * prod(query) * key[2]


class Unseen(nn.Module):
    """Keeps a model's parts from fvcore, which hangs hooks on every part it sees: a fused block with hooks on it
    calls those parts whole, and would run more than it does alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hidden = (model.requires_grad_(False),)

    def forward(self, images: Tensor) -> Tensor:
        return run(self.hidden[0], images)


def counted(model: nn.Module, images: Tensor) -> float:
    """GFLOPs that fvcore counts while the model runs on one image, tables of positions left out."""
    analysis = FlopCountAnalysis(Unseen(model), images[:1])
    analysis.set_op_handle("aten::scaled_dot_product_attention", attention_flops)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return (analysis.total() - family_of(model).uncounted(model)) / 1e9
