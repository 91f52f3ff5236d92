"""Encoder layers of transformers: their parts under every family's and version's names, and their pieces.

All supported layers are pre-norm blocks with separate q, k and v projections. They differ in names, in LayerScale and
in the position of dropout. A layer with an unknown part is refused: its forward does more than the pieces reproduce.
Layers are identified by class name, so that transformers is not imported.

Axes: B images, H heads, N tokens, M tokens after fusion, P patches, C channels, d channels per head.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.positions import TokenPositions, positions_after
from ..errors import MctfError
from ..methods.base import run_pieces
from ._inspect import check_unsharded
from .base import SoftmaxAttention
from .hf_patch import LayerForward

FAMILIES = "ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, ViTMAE"
LAYERS = frozenset(
    [
        *("ViTLayer", "DeiTLayer", "ViTMAELayer", "BeitLayer", "Dinov2Layer", "Dinov2WithRegistersLayer"),
        *("DINOv3ViTLayer", "CLIPEncoderLayer", "SiglipEncoderLayer", "Siglip2EncoderLayer"),
    ]
)
_CHILDREN = {
    *("layernorm_before", "layernorm_after", "norm1", "norm2", "layer_norm1", "layer_norm2"),
    *("attention", "self_attn", "mlp", "intermediate", "output", "dropout", "drop_path"),
    *("layer_scale1", "layer_scale2", "lambda_1", "lambda_2", "relative_position_bias"),
}
_ATTENTION_CHILDREN = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    *("query", "key", "value", "dropout", "relative_position_bias"),
}
_OUTPUT_CHILDREN = {"dense", "dropout"}

Branch = tuple[Callable[[Tensor], Tensor], ...]  # applied one after the other


@dataclass(frozen=True)
class LayerParts:
    """The parts of a layer: x + after_attention(attention(norm1(x))), then x + mlp(norm2(x)).

    scale: of the attention logits. dropout: of attention weights in this pass.
    relative_position_bias: BEiT's table of this layer, as a module. config: of the model.
    """

    norm1: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    heads: int
    head_size: int
    scale: float
    dropout: float
    relative_position_bias: nn.Module | None
    config: Any
    after_attention: Branch
    norm2: nn.Module
    mlp: Branch


def parts_of(layer: Any) -> LayerParts:
    """The parts at this moment; users may replace modules at any time."""
    attention = _first(layer, "attention", "self_attn")
    nested = hasattr(attention, "attention")  # older versions nest q, k and v, with the projection in `output`
    inner = attention.attention if nested else attention
    head_size = _first(inner, "head_dim", "attention_head_size")
    dropout = _first(inner, "attention_dropout", "dropout_prob", "dropout")
    rate = dropout.p if isinstance(dropout, nn.Dropout) else float(dropout)
    projection: Branch = _steps(attention.output) if nested else (_first(attention, "o_proj", "out_proj"),)
    mlp: Branch = (layer.intermediate, *_steps(layer.output)) if hasattr(layer, "intermediate") else (layer.mlp,)
    own_bias = getattr(layer, "relative_position_bias", None)
    return LayerParts(
        norm1=_first(layer, "layernorm_before", "norm1", "layer_norm1"),
        query=_first(inner, "q_proj", "query"),
        key=_first(inner, "k_proj", "key"),
        value=_first(inner, "v_proj", "value"),
        heads=_first(inner, "num_attention_heads", "num_heads"),
        head_size=head_size,
        scale=_first(inner, "scaling", "scale", default=head_size**-0.5),
        dropout=rate if inner.training else 0.0,
        config=inner.config,
        relative_position_bias=own_bias or getattr(inner, "relative_position_bias", None),
        after_attention=(*projection, *_branch_end(layer, 1)),
        norm2=_first(layer, "layernorm_after", "norm2", "layer_norm2"),
        mlp=(*mlp, *_branch_end(layer, 2)),
    )


def _steps(output: Any) -> Branch:
    return output.dense, output.dropout


def _branch_end(layer: Any, branch: int) -> Branch:
    """Dropout, LayerScale and drop path at the end of a branch, in the order of all layers."""
    steps = [getattr(layer, name) for name in ("dropout", f"layer_scale{branch}") if hasattr(layer, name)]
    scale = getattr(layer, f"lambda_{branch}", None)  # BEiT has a bare parameter, or the number 1
    if scale is not None:
        steps.append(partial(mul, scale))
    if hasattr(layer, "drop_path"):
        steps.append(layer.drop_path)
    return tuple(steps)


def _first(module: Any, *names: str, default: Any = None) -> Any:
    """The one of these attributes that this version of the module has, else the default; raises MctfError."""
    value = next((getattr(module, name) for name in names if hasattr(module, name)), default)
    if value is None:
        raise MctfError(
            f"{type(module).__name__} has none of {', '.join(names)}: use a version of transformers that mctf supports"
        )
    return value


def check_layer(name: str, layer: nn.Module) -> None:
    """Raise MctfError for a layer whose forward is not the composition of the pieces, or with hooks inside."""
    check_unsharded(name, layer)
    # exactly a supported class: a subclass may compute something else
    if not type(layer).__module__.startswith("transformers.models.") or type(layer).__name__ not in LAYERS:
        raise MctfError(
            f"{name} is a {type(layer).__name__}, which mctf cannot fuse faithfully: use a model of one of {FAMILIES}"
        )
    _check_children(name, layer, _CHILDREN)
    for part, module, children in _bypassed(layer):
        _check_children(f"{name}.{part}", module, children)
        # transformers' own hooks collect attention maps, which CallCheck refuses
        hooks = [each for each in module._forward_hooks.values() if not _is_of_transformers(each)]
        if hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise MctfError(f"{name}.{part} has hooks, which would not fire in a fused model: remove them first")
        _check_forward(f"{name}.{part}", module)
    if not isinstance(vars(layer).get("forward"), LayerForward):
        _check_forward(name, layer)


def _bypassed(layer: Any) -> Iterator[tuple[str, Any, set[str]]]:
    """Modules whose parts are called one by one instead of the module, with the supported names of these parts."""
    name = "attention" if hasattr(layer, "attention") else "self_attn"
    attention = _first(layer, "attention", "self_attn")
    if hasattr(attention, "attention"):
        yield name, attention, {"attention", "output"}
        yield f"{name}.attention", attention.attention, _ATTENTION_CHILDREN
        yield f"{name}.output", attention.output, _OUTPUT_CHILDREN
    else:
        yield name, attention, _ATTENTION_CHILDREN
    if hasattr(layer, "output"):
        yield "output", layer.output, _OUTPUT_CHILDREN


def _is_of_transformers(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _check_forward(name: str, module: Any) -> None:
    forward = vars(module).get("forward")
    # collecting outputs stores the module's own forward as an attribute
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        raise MctfError(f"{name}.forward was replaced, and would not be called in a fused model: restore it first")


def _check_children(name: str, module: Any, supported: set[str]) -> None:
    present = {child for child, _ in module.named_children()}
    present |= {child for child, _ in module.named_parameters(recurse=False)}
    unknown = sorted(present - supported)
    if unknown:
        raise MctfError(
            f"{name} of {type(module).__name__} has an unknown part {unknown[0]!r}, which a fused model would skip: "
            "use a version of transformers that mctf supports"
        )


class LayerOps(SoftmaxAttention):
    """The pieces of a layer, through its own modules.

    adjusted: names of layer arguments whose meaning this class adjusts to fused tokens; others are refused.
    """

    adjusted: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, layer: Any, arguments: Mapping[str, Any], positions: TokenPositions | None, *, prefix: int
    ) -> None:
        self.layer = layer
        self.arguments = arguments
        self.positions = positions
        self.prefix = prefix
        self.parts = parts_of(layer)

    @property
    def scale(self) -> float:
        return self.parts.scale

    @property
    def attention_dropout(self) -> float:
        return self.parts.dropout

    def plain(self, x: Tensor) -> Tensor:
        output = type(self.layer).forward(self.layer, x, **self.arguments)
        return output[0] if isinstance(output, tuple) else output

    def norm1(self, x: Tensor) -> Tensor:
        return self.parts.norm1(x)

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.split_heads(self.parts.query(h)), self.split_heads(self.parts.key(h))

    def values(self, h: Tensor) -> Tensor:
        return self.parts.value(h)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.queries_keys(h)
        return q, k, self.split_heads(self.values(h))

    def split_heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(2, (self.parts.heads, self.parts.head_size)).transpose(1, 2)

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        for step in self.parts.after_attention:
            context = step(context)
        return context + x

    def add_mlp(self, x: Tensor) -> Tensor:
        h = self.parts.norm2(x)
        for step in self.parts.mlp:
            h = step(h)
        return h + x


class PositionedLayerOps(LayerOps):
    """Base class: a layer whose pieces depend on the positions of its tokens."""

    def plain(self, x: Tensor) -> Tensor:
        return super().plain(x) if self.positions is None else run_pieces(self, x, None)

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        positions = positions_after(self.positions, assignment, weights)
        return type(self)(self.layer, self.arguments, positions, prefix=self.prefix)


class RotaryLayerOps(PositionedLayerOps):
    """DINOv3: queries and keys of patches are rotated by their positions; those of leading tokens are not."""

    adjusted = frozenset(["position_embeddings"])

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().queries_keys(h)
        cos, sin = self.arguments["position_embeddings"]
        cos, sin = self._mean_rows(cos, fill=1.0), self._mean_rows(sin, fill=0.0)
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin

    def _mean_rows(self, table: Tensor, *, fill: float) -> Tensor:
        """Rows for leading tokens added, and the mean over the positions of each token: P d -> N d or B 1 M d."""
        rows = torch.cat([table.new_full((self.prefix, table.shape[-1]), fill), table])
        return rows if self.positions is None else self.positions.mean(rows)[:, None]


def _rotate_half(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) for the two halves of the channels."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class BiasedLayerOps(PositionedLayerOps):
    """BEiT: attention logits have a bias per pair of positions, of the layer, shared by all layers, or both."""

    # the mask holds the bias that layers share; masks of users are refused by CallCheck
    adjusted = frozenset(["relative_position_bias", "attention_mask", "resolution", "interpolate_pos_encoding"])
    _bias: Tensor | None = None

    @property
    def bias(self) -> Tensor | None:
        """H N N, or B H M M after fusion; None for a layer without bias."""
        if self._bias is None:
            full = self._full_bias()
            self._bias = full if full is None or self.positions is None else self.positions.mean_bias(full)
        return self._bias

    def _full_bias(self) -> Tensor | None:
        """The bias of all pairs of input positions: 1 H N N."""
        shared = self.arguments.get("relative_position_bias", self.arguments.get("attention_mask"))
        table = self.parts.relative_position_bias
        if table is None:
            return shared
        height, width = self.arguments["resolution"]
        patch = self.parts.config.patch_size
        window = (height // patch, width // patch)
        interpolates = self.arguments.get("interpolate_pos_encoding", False)
        own = table(window, interpolates, dim_size=self.prefix + window[0] * window[1])
        return own if shared is None else own + shared


_OPS: dict[str, type[LayerOps]] = {"DINOv3ViTLayer": RotaryLayerOps, "BeitLayer": BiasedLayerOps}


def ops_class(layer: type[nn.Module]) -> type[LayerOps]:
    """The class of the pieces of layers of this class."""
    return _OPS.get(layer.__name__, LayerOps)
