"""Where the vision tower of a transformers model is, told by class names: nothing here imports transformers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from torch import Tensor, nn

from ..errors import MctfError
from .hf_patch import LayerForward

# The classes that embed images and run the layers; around them are heads, or a text tower beside.
TOWERS = frozenset(
    [
        *("ViTModel", "DeiTModel", "ViTMAEModel", "BeitModel", "BeitBackbone"),
        *("Dinov2Model", "Dinov2Backbone", "Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
        *("DINOv3ViTModel", "DINOv3ViTBackbone"),
        *("CLIPVisionModel", "SiglipVisionModel", "Siglip2VisionModel"),
        *("CLIPVisionTransformer", "SiglipVisionTransformer", "Siglip2VisionTransformer"),  # before version 5.8
    ]
)
LAYERS = frozenset(
    [
        *("ViTLayer", "DeiTLayer", "ViTMAELayer", "BeitLayer", "Dinov2Layer", "Dinov2WithRegistersLayer"),
        *("DINOv3ViTLayer", "CLIPEncoderLayer", "SiglipEncoderLayer", "Siglip2EncoderLayer"),
    ]
)
_CONTAINERS = ("layers", "encoder.layer", "encoder.layers", "model.layer", "layer")
FAMILIES = "ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, ViTMAE"


def holds_tower(module: nn.Module) -> bool:
    """Whether this is a model of transformers that sees by a tower we know, or such a tower itself."""
    ours = _is_a(module, "transformers.modeling_utils", {"PreTrainedModel"}) or is_tower(module)
    return ours and any(map(is_tower, module.modules()))


def is_tower(module: nn.Module) -> bool:
    return _is_a(module, "transformers.models.", TOWERS) and container_name(module) != ""


def is_layer(module: nn.Module) -> bool:
    """A layer of exactly a known class: a subclass may compute something else."""
    return type(module).__module__.startswith("transformers.models.") and type(module).__name__ in LAYERS


def _is_a(module: nn.Module, home: str, names: "set[str] | frozenset[str]") -> bool:
    return any(cls.__module__.startswith(home) and cls.__name__ in names for cls in type(module).__mro__)


def container_name(tower: nn.Module) -> str:
    """Where a tower keeps its layers; "" for a class that only wraps the real tower."""
    return next((name for name in _CONTAINERS if _has_module(tower, name)), "")


def _has_module(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def find_tower(model: nn.Module) -> tuple[str, Any]:
    """The one vision tower in a model that has any, and its name there ("" for the model itself)."""
    towers = [(name, module) for name, module in model.named_modules() if is_tower(module)]
    if len(towers) > 1:
        names = [name for name, _ in towers]
        raise MctfError(
            f"{type(model).__name__} has several vision towers ({', '.join(names)}): "
            f"fuse one of them, as in mctf.fuse(model.{names[0]})"
        )
    return towers[0]


# MERGED from mctf.hosts.hf_layers:
# The parts of a transformers encoder layer, whatever its family and version call them.
#
# All supported layers are pre-norm blocks with separate q, k and v projections; they differ in names, in LayerScale and
# in where dropout sits. A layer with a part that is not known here is refused: its forward does more than we rebuild.

Branch = tuple[Callable[[Tensor], Tensor], ...]  # applied one after the other

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


@dataclass(frozen=True)
class LayerParts:
    """A layer taken apart: x + after_attention(attention(norm1(x))), then x + mlp(norm2(x)).

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
    """The parts as they are at this moment: users exchange modules."""
    attention = _attention(layer)
    inner = _inner(attention)
    head_size = _first(inner, "head_dim", "attention_head_size")
    return LayerParts(
        norm1=_first(layer, "layernorm_before", "norm1", "layer_norm1"),
        query=_first(inner, "q_proj", "query"),
        key=_first(inner, "k_proj", "key"),
        value=_first(inner, "v_proj", "value"),
        heads=_first(inner, "num_attention_heads", "num_heads"),
        head_size=head_size,
        scale=_first(inner, "scaling", "scale", default=head_size**-0.5),
        dropout=_attention_dropout(inner),
        config=inner.config,
        relative_position_bias=getattr(layer, "relative_position_bias", None)
        or getattr(inner, "relative_position_bias", None),
        after_attention=(*_projection(attention), *_ending(layer, 1)),
        norm2=_first(layer, "layernorm_after", "norm2", "layer_norm2"),
        mlp=(*_mlp(layer), *_ending(layer, 2)),
    )


def check_layer(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose forward is not the one the parts rebuild, or of which someone wants more than that."""
    if not is_layer(layer):
        raise MctfError(
            f"{name} is a {type(layer).__name__}, which mctf cannot fuse faithfully: use a model of one of {FAMILIES}"
        )
    _check_children(name, layer, _CHILDREN)
    for part, module, known in _bypassed(layer):
        _check_children(f"{name}.{part}", module, known)
        _check_bypassed(f"{name}.{part}", module)
    if not isinstance(vars(layer).get("forward"), LayerForward):
        _check_forward(name, layer)


def _bypassed(layer: Any) -> Iterator[tuple[str, Any, set[str]]]:
    """The modules whose parts are called one by one and which are not called themselves, with the parts we know."""
    name = "attention" if hasattr(layer, "attention") else "self_attn"
    attention = _attention(layer)
    if hasattr(attention, "attention"):
        yield name, attention, {"attention", "output"}
        yield f"{name}.attention", attention.attention, _ATTENTION_CHILDREN
        yield f"{name}.output", attention.output, _OUTPUT_CHILDREN
    else:
        yield name, attention, _ATTENTION_CHILDREN
    if hasattr(layer, "output"):
        yield "output", layer.output, _OUTPUT_CHILDREN


def _check_bypassed(name: str, module: Any) -> None:
    others = [hook for hook in module._forward_hooks.values() if not _of_transformers(hook)]
    if others or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise MctfError(f"{name} has hooks, which would not fire in a fused model: remove them first")
    _check_forward(name, module)


def _of_transformers(hook: object) -> bool:
    """Hooks that collect attention maps, which CallCheck refuses to a fused model."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _check_forward(name: str, module: Any) -> None:
    replaced = vars(module).get("forward")
    # collecting outputs leaves the module's own forward behind
    if replaced is not None and getattr(replaced, "__func__", None) is not type(module).forward:
        raise MctfError(f"{name}.forward was replaced, and would not be called in a fused model: restore it first")


def _check_children(name: str, module: Any, known: set[str]) -> None:
    present = {child for child, _ in module.named_children()}
    present |= {child for child, _ in module.named_parameters(recurse=False)}
    unknown = sorted(present - known)
    if unknown:
        raise MctfError(
            f"{name} of {type(module).__name__} has a part {unknown[0]!r} that mctf does not know and would leave out: "
            "use a version of transformers that mctf supports"
        )


def _first(module: Any, *names: str, default: Any = None) -> Any:
    """The one of these attributes that this version of the module has; a default in position of a refusal."""
    found = next((getattr(module, name) for name in names if hasattr(module, name)), default)
    if found is not None:
        return found
    raise MctfError(
        f"{type(module).__name__} has none of {', '.join(names)}: use a version of transformers that mctf supports"
    )


def _attention(layer: Any) -> Any:
    return _first(layer, "attention", "self_attn")


def _inner(attention: Any) -> Any:
    """Where q, k and v are: older versions nest them."""
    return attention.attention if hasattr(attention, "attention") else attention


def _attention_dropout(inner: Any) -> float:
    given = _first(inner, "attention_dropout", "dropout_prob", "dropout")
    rate = given.p if isinstance(given, nn.Dropout) else float(given)
    return rate if inner.training else 0.0


def _projection(attention: Any) -> Branch:
    if hasattr(attention, "attention"):
        return attention.output.dense, attention.output.dropout
    return (_first(attention, "o_proj", "out_proj"),)


def _mlp(layer: Any) -> Branch:
    if hasattr(layer, "intermediate"):
        return layer.intermediate, layer.output.dense, layer.output.dropout
    return (layer.mlp,)


def _ending(layer: Any, branch: int) -> Branch:
    """Dropout, LayerScale and drop-path at the end of a branch, in the order all layers have them."""
    steps = []
    if hasattr(layer, "dropout"):
        steps.append(layer.dropout)
    if hasattr(layer, f"layer_scale{branch}"):
        steps.append(getattr(layer, f"layer_scale{branch}"))
    scale = getattr(layer, f"lambda_{branch}", None)  # BEiT keeps a bare parameter, or the number 1
    if scale is not None:
        steps.append(partial(mul, scale))
    if hasattr(layer, "drop_path"):
        steps.append(layer.drop_path)
    return tuple(steps)
