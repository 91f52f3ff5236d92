"""Encoder layers of transformers: their parts under every family's and version's names, and their pieces.

All supported layers are pre-norm blocks. They differ in names, in LayerScale, in the position of dropout, and in
whether one product gives q, k and v. A layer with an unknown part is refused: its forward does more than the pieces
reproduce. Layers are identified by class name, so that transformers is not imported.

Axes: B images, H heads, N tokens, M tokens after fusion, P patches, C channels, d channels per head.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.positions import TokenPositions, positions_after
from ..errors import MctfError
from ..methods.base import run_pieces
from ._inspect import check_unsharded, linear_slice
from .base import SoftmaxAttention
from .hf_patch import LayerForward

_NORM1 = ("layernorm_before", "norm1", "layer_norm1", "rms_norm1", "attention_norm")
_NORM2 = ("layernorm_after", "norm2", "layer_norm2", "rms_norm2", "ffn_norm")
_ATTENTION = ("attention", "self_attn", "attn")
_MLP = ("mlp", "ffn", "feed_forward")
_PROJECTION = ("o_proj", "out_proj", "projection_layer", "projection", "proj")
_CHILDREN = {
    *(*_NORM1, *_NORM2, *_ATTENTION, *_MLP, "intermediate", "output", "dropout", "drop_path"),
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

    query, key, value: three projections; product: one module that computes all three side by side, or None.
    scale: of the attention logits. dropout: of attention weights in this pass.
    relative_position_bias: BEiT's table of this layer, as a module. config: of the model.
    """

    norm1: Any
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    product: nn.Module | None
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
    attention = _first(layer, *_ATTENTION)
    nested = hasattr(attention, "attention")  # older versions nest q, k and v, with the projection in `output`
    inner = attention.attention if nested else attention
    heads, head_size = (
        _first(inner, "num_attention_heads", "num_heads"),
        _first(inner, "head_dim", "attention_head_size"),
    )
    dropout = _first(inner, "attention_dropout", "dropout_prob", "dropout")
    rate = dropout.p if isinstance(dropout, nn.Dropout) else float(dropout)
    if nested:
        projection: Branch = _steps(attention.output)
    else:
        projection = (_first(attention, *_PROJECTION),)
        projection += (attention.projection_dropout,) if hasattr(attention, "projection_dropout") else ()
    mlp: Branch = (
        (layer.intermediate, *_steps(layer.output)) if hasattr(layer, "intermediate") else (_first(layer, *_MLP),)
    )
    own_bias = getattr(layer, "relative_position_bias", None)
    query, key, value = _projections(inner, heads * head_size)
    return LayerParts(
        norm1=_first(layer, *_NORM1),
        query=query,
        key=key,
        value=value,
        product=getattr(inner, "qkv", None),
        heads=heads,
        head_size=head_size,
        scale=_first(inner, "scaling", "scale", default=head_size**-0.5),
        dropout=rate if inner.training else 0.0,
        config=inner.config,
        relative_position_bias=own_bias or getattr(inner, "relative_position_bias", None),
        after_attention=(*projection, *_branch_end(layer, 1)),
        norm2=_first(layer, *_NORM2),
        mlp=(*mlp, *_branch_end(layer, 2)),
    )


def _projections(attention: Any, width: int) -> list[Callable[[Tensor], Tensor]]:
    """The projections to flat queries, keys and values, with InternVL's norms of all heads together."""
    if hasattr(attention, "qkv"):
        return [partial(linear_slice, attention.qkv, start=part * width, stop=(part + 1) * width) for part in range(3)]
    found = [_first(attention, f"{name[0]}_proj", name) for name in ("query", "key", "value")]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return [
        project if norm is None else partial(_in_turn, project, norm)
        for project, norm in zip(found, [*norms, None], strict=True)
    ]


def _in_turn(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return second(first(x))


def _steps(output: Any) -> Branch:
    return output.dense, output.dropout


def _branch_end(layer: Any, branch: int) -> Branch:
    """Dropout, LayerScale and drop path at the end of a branch, in the order of all layers."""
    steps = [getattr(layer, name) for name in ("dropout", f"layer_scale{branch}") if hasattr(layer, name)]
    if branch == 1 and type(layer).__name__ == "InternVLVisionLayer":  # it has no dropout here
        steps = []
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


def check_layer(name: str, layer: nn.Module, *, supported: Mapping[str, frozenset[str]], families: str) -> None:
    """Raise MctfError for a layer whose forward is not the composition of the pieces, or with hooks inside.

    supported: the classes of layers by name, with the parts that only the attention of such layers has.
    """
    check_unsharded(name, layer)
    kind = type(layer)
    # exactly a supported class: a subclass may compute something else
    if not kind.__module__.startswith("transformers.models.") or kind.__name__ not in supported:
        raise MctfError(f"{name} is a {kind.__name__}, which mctf cannot fuse faithfully: use a model of {families}")
    _check_children(name, layer, _CHILDREN)
    for part, module, children in _bypassed(layer, supported[kind.__name__]):
        _check_children(f"{name}.{part}", module, children)
        # transformers' own hooks collect attention maps, which CallCheck refuses
        hooks = [each for each in module._forward_hooks.values() if not _is_of_transformers(each)]
        if hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise MctfError(f"{name}.{part} has hooks, which would not fire in a fused model: remove them first")
        _check_forward(f"{name}.{part}", module)
    if not isinstance(vars(layer).get("forward"), LayerForward):
        _check_forward(name, layer)


def _bypassed(layer: Any, own: frozenset[str]) -> Iterator[tuple[str, Any, set[str]]]:
    """Modules whose parts are called one by one instead of the module, with the supported names of these parts."""
    name = next(name for name in _ATTENTION if hasattr(layer, name))
    attention = getattr(layer, name)
    if hasattr(attention, "attention"):
        yield name, attention, {"attention", "output"}
        yield f"{name}.attention", attention.attention, _ATTENTION_CHILDREN | own
        yield f"{name}.output", attention.output, _OUTPUT_CHILDREN
    else:
        yield name, attention, _ATTENTION_CHILDREN | own
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
        parts = self.parts
        if parts.product is None:
            q, k = parts.query(h), parts.key(h)
        else:
            q, k = linear_slice(parts.product, h, 0, 2 * parts.heads * parts.head_size).chunk(2, dim=2)
        return self.placed(self.split_heads(q), self.split_heads(k))

    def values(self, h: Tensor) -> Tensor:
        return self.parts.value(h)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.parts
        if parts.product is None:
            return *self.queries_keys(h), self.split_heads(self.values(h))
        q, k, v = map(self.split_heads, parts.product(h).chunk(3, dim=2))
        return *self.placed(q, k), v

    def placed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B H N d) with the positions of their tokens; here they have none."""
        return q, k

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

    def placed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.arguments["position_embeddings"]
        cos, sin = self._mean_rows(cos, fill=1.0), self._mean_rows(sin, fill=0.0)
        return (q * cos + _rotate_half(q) * sin).to(q.dtype), (k * cos + _rotate_half(k) * sin).to(k.dtype)

    def _mean_rows(self, table: Tensor, *, fill: float) -> Tensor:
        """Rows for leading tokens added, and the mean over the positions of each token: P d or B P d -> … M d."""
        rows = F.pad(table, (0, 0, self.prefix, 0), value=fill)
        if self.positions is not None:
            rows = self.positions.mean(rows)
        return rows if rows.dim() == 2 else rows[:, None]


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


class ExpertLayerOps(LayerOps):
    """ViTPose: in its larger models the MLP has an expert per dataset, and the images say which."""

    adjusted = frozenset(["dataset_index"])

    def add_mlp(self, x: Tensor) -> Tensor:
        if self.layer.num_experts == 1:
            return super().add_mlp(x)
        return self.layer.mlp(self.parts.norm2(x), indices=self.arguments["dataset_index"]) + x
