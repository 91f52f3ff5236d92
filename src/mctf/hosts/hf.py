"""Vision towers of transformers, alone or inside a larger model: the families of `hf_towers.FAMILIES`.

The tower is fused inside the model that holds it; text towers, heads and decoders are unchanged. A model of
transformers iterates over its layers and reads every token afterwards, so it gets one token per input token. Towers are
identified by class name, so that transformers is not imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..core.positions import TokenPositions
from ..core.sequences import SequenceGroup, Sequences
from ..errors import MctfError
from ..fusion_record import KEY
from ..stack import FusedStack
from .base import Architecture, Host
from .hf_cost import cost_around_layers, default_size, layer_shape
from .hf_layers import LayerOps, PositionedLayerOps, check_layer
from .hf_patch import BoundLayer, CallCheck, FusedSaving, LayerForward, parameter_names
from .hf_sequences import SequenceLayerOps
from .hf_towers import LAYERS, TITLES, TOWERS, ops_class
from .patch_embed import MatmulPatchEmbed, is_patch_convolution

_CONTAINERS = (
    *("layers", "encoder.layer", "encoder.layers", "model.layer", "layer"),
    *("transformer.layers", "blocks"),  # Pixtral, Qwen
)
# layer arguments independent of the tokens
_IGNORED = frozenset(["output_hidden_states", "return_dict", "use_cache", "num_items_in_batch"])
_REFUSED_AROUND = ("output_attentions",)  # a model around the tower may take the mask of a text
_REFUSED_IN_TOWER = ("output_attentions", "attention_mask", "head_mask")


def holds_tower(module: nn.Module) -> bool:
    """Whether this is a model of transformers with a supported vision tower, or such a tower itself."""
    pretrained = _is_a(module, "transformers.modeling_utils", frozenset(["PreTrainedModel"]))
    return (pretrained or _is_tower(module)) and any(map(_is_tower, module.modules()))


def find_tower(model: nn.Module) -> tuple[str, Any]:
    """The one vision tower in a model that `holds_tower`, and its name there ("" for the model itself)."""
    towers = [(name, module) for name, module in model.named_modules() if _is_tower(module)]
    if len(towers) > 1:
        names = [name for name, _ in towers]
        raise MctfError(
            f"{type(model).__name__} has several vision towers ({', '.join(names)}): "
            f"fuse one of them, as in mctf.fuse(model.{names[0]})"
        )
    return towers[0]


def _is_tower(module: nn.Module) -> bool:
    return _is_a(module, "transformers.models.", TOWERS) and _container_name(module) != ""


def _is_a(module: nn.Module, package: str, names: frozenset[str]) -> bool:
    return any(cls.__module__.startswith(package) and cls.__name__ in names for cls in type(module).__mro__)


def _container_name(tower: nn.Module) -> str:
    """Name of the module that holds a tower's layers; "" for a class that only wraps the real tower."""
    for name in _CONTAINERS:
        try:
            tower.get_submodule(name)
        except AttributeError:
            continue
        return name
    return ""


@dataclass(eq=False)
class HFVision(Host):
    """One vision tower, alone or inside a larger model.

    model: the fused model. tower: the part of it that embeds images and runs the layers; name: its name in there.
    layer: the class of its layers; layer_arguments: names of their arguments after the tokens.
    """

    model: nn.Module
    tower: Any
    name: str
    layer: type[nn.Module]
    layer_arguments: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "HFVision":
        """The host of this model; raises MctfError for layers that it would not reproduce."""
        name, tower = find_tower(model)
        container = _container_name(tower)
        layers = tower.get_submodule(container)
        for index, layer in layers.named_children():
            path = ".".join(filter(None, (name, container, index)))
            check_layer(path, layer, supported=LAYERS, families=f"one of {TITLES}")
        if len(list(layers.children())) < len(layers._modules):
            raise MctfError(f"a layer occurs twice in {container}: give each place a layer of its own (copy.deepcopy)")
        kind = type(next(layers.children()))
        return cls(model, tower, name, kind, parameter_names(kind.forward)[2:])

    @property
    def container(self) -> nn.Module:
        return self.tower.get_submodule(_container_name(self.tower))

    def install(self, stack: FusedStack) -> None:
        """Replace the layers by the fused stack, which is called through the layers themselves."""
        self._replace_container(stack)
        stack.bound_block = BoundLayer
        for layer in stack.children():
            layer.forward = LayerForward(layer, in_tuple=self.in_tuple)
        for part in self._models():
            CallCheck.attach(part, refused=_REFUSED_IN_TOWER if part is self.tower else _REFUSED_AROUND)
            if hasattr(part, FusedSaving.name):
                setattr(part, FusedSaving.name, FusedSaving(part, stack))
            vars(part.config).pop(KEY, None)  # of a model that was saved fused; the stack is what is true
        for owner, name, projection in self._projections():
            if is_patch_convolution(projection):
                setattr(owner, name, MatmulPatchEmbed.of(projection, stack.fuses))

    def uninstall(self, stack: FusedStack) -> None:
        """Undo `install`."""
        self._replace_container(stack.restored())
        for layer in stack.children():
            vars(layer).pop("forward", None)
        for part in self._models():
            CallCheck.detach(part)
            vars(part).pop(FusedSaving.name, None)
        for owner, name, projection in self._projections():
            if isinstance(projection, MatmulPatchEmbed):
                setattr(owner, name, projection.restored())

    def _replace_container(self, container: nn.Module) -> None:
        owner, _, name = _container_name(self.tower).rpartition(".")
        setattr(self.tower.get_submodule(owner), name, container)

    def _models(self) -> list[Any]:
        """The fused model, the tower and the models between them; those of transformers have a config."""
        names = self.name.split(".") if self.name else []
        path = [self.model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
        return [part for part in path if hasattr(part, "config")]

    def _projections(self) -> list[tuple[nn.Module, str, nn.Conv2d]]:
        """The convolutions that embed patches, each with its parent module and its name there."""
        return [
            (owner, name, part)
            for owner in (self.embeddings.modules() if hasattr(self.tower, "embeddings") else (self.tower,))
            for name, part in owner.named_children()
            if isinstance(part, nn.Conv2d)
        ]

    @property
    def embeddings(self) -> Any:
        """The module with class token and registers: the tower itself where it has none of its own."""
        return getattr(self.tower, "embeddings", self.tower)

    @property
    def in_tuple(self) -> bool:
        """Whether this version's layers return a tuple: those that can return their attention do."""
        return "output_attentions" in self.layer_arguments

    @property
    def image_size(self) -> tuple[int, int]:
        prepared = getattr(self.model, "pretrained_cfg", {}).get("input_size")
        if prepared is not None:  # the config of DINOv2 names larger images than its preprocessing
            return prepared[1], prepared[2]
        return default_size(self.tower.config)

    @property
    def class_token(self) -> bool:
        return any(hasattr(self.embeddings, name) for name in ("cls_token", "class_embedding"))

    @property
    def protected(self) -> int:
        embeddings = self.embeddings
        registers = getattr(embeddings, "register_tokens", None)
        more = int(hasattr(embeddings, "distillation_token")) + (0 if registers is None else registers.shape[1])
        return int(self.class_token) + more

    @property
    def uses_positions(self) -> bool:
        return issubclass(ops_class(self.layer), PositionedLayerOps)

    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """The arguments of a layer call after the tokens, by name."""
        accepted = _IGNORED | ops_class(self.layer).adjusted
        given = dict(zip(self.layer_arguments, args, strict=False)) | kwargs
        for name, value in given.items():
            if value is not None and value is not False and name not in accepted:
                raise MctfError(
                    f"a fused model takes no {name}, as it refers to tokens that may be fused: "
                    "omit it, or run mctf.unfuse(model)"
                )
        return given

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> LayerOps:
        return ops_class(self.layer)(block, arguments, positions, prefix=self.protected)

    def has_sequences(self, arguments: Mapping[str, Any]) -> bool:
        kind = ops_class(self.layer)
        return issubclass(kind, SequenceLayerOps) and kind.has_sequences(arguments)

    def sequences(self, x: Tensor, arguments: Mapping[str, Any]) -> Sequences:
        kind = ops_class(self.layer)
        return kind.sequences(x, arguments) if issubclass(kind, SequenceLayerOps) else super().sequences(x, arguments)

    def sequence_arguments(self, arguments: Mapping[str, Any], group: SequenceGroup) -> Mapping[str, Any]:
        kind = ops_class(self.layer)
        return kind.group_arguments(arguments, group) if issubclass(kind, SequenceLayerOps) else arguments

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        """The cost of the whole model where it takes images alone, else of its vision tower."""
        tokens, around = cost_around_layers(
            self.model, self.tower, self.container, image_size or self.image_size, in_tuple=self.in_tuple
        )
        return Architecture(
            name=type(self.model).__name__,
            tokens=tokens,
            protected=self.protected,
            blocks=tuple(layer_shape(layer) for layer in self.container.children()),
            stem=around,
            head=0,  # the part after the layers reads every token, so its cost does not depend on the fusion
            head_per_token=0,
            reads_every_token=True,
        )
