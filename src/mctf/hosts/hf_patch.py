"""What a fused model of transformers has attached while it is fused: layer calls, checks of calls, saving.

transformers attaches hooks or a wrapped `forward` to a layer to collect hidden states, and its `__call__` may
checkpoint gradients. A fused pass therefore goes through the layer: `BoundLayer` calls the layer, and `LayerForward`,
the layer's `forward` while it is fused, calls the fused pass. Collected states have one token per input token.

Axes: B images, N input tokens, C channels.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from ..errors import MctfError
from ..fusion_record import KEY, FusionRecord
from ..methods._layers import LAYERS
from ..stack import BoundBlock, FusedStack


class BoundLayer(BoundBlock):
    """One layer of an iterated stack, called through the layer itself."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """B N C -> the layer's return value: B N C, in a tuple where its version returns one."""
        return self._block(x, *args, fused_pass=super().__call__, **kwargs)


class LayerForward:
    """Replaces the `forward` of a layer while its model is fused; without `fused_pass` it is the layer's own."""

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        self.layer = layer
        self.in_tuple = in_tuple

    def __call__(self, x: Tensor, *args: Any, fused_pass: Callable[..., Tensor] | None = None, **kwargs: Any) -> Any:
        if fused_pass is None:
            return type(self.layer).forward(self.layer, x, *args, **kwargs)
        output = fused_pass(x, *args, **kwargs)
        return (output,) if self.in_tuple else output


class FusedSaving:
    """Replaces `save_pretrained` of a fused model: the config that it writes also holds the fusion (`FusionRecord`).

    `push_to_hub` and trainers call it. It covers the fused model and the models inside it on the way to the tower.
    Where only an inner model was fused, the outer model's `save_pretrained` is its own: it writes the unfused model.

    Trainers name `state_dict` in the call, and resume by `load_state_dict(strict=False)`. By default transformers
    writes the parameter names of older versions, of which that call loads none without a word; so they get their own.
    """

    name = "save_pretrained"

    def __init__(self, model: Any, stack: FusedStack) -> None:
        self.model = model
        self.stack = stack

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.stack.layers is not None and not hasattr(self.model, LAYERS):
            raise MctfError(
                f"the layers of {self.stack.method.name} belong to the model that was fused, not to the "
                f"{type(self.model).__name__} inside: save that model, or run mctf.unfuse(model) first"
            )
        if "state_dict" in kwargs and "save_original_format" in parameter_names(type(self.model).save_pretrained):
            kwargs.setdefault("save_original_format", False)
        setattr(self.model.config, KEY, FusionRecord.of(self.stack).as_dict())
        try:
            return type(self.model).save_pretrained(self.model, *args, **kwargs)
        finally:
            delattr(self.model.config, KEY)


class CallCheck:
    """Forward pre-hook of a fused model: raises MctfError for arguments that its layers would handle only in part.

    names: of the parameters of the model's forward. refused: those that must not be given.
    """

    def __init__(self, names: tuple[str, ...], refused: tuple[str, ...]) -> None:
        self.names = names
        self.refused = refused

    @classmethod
    def attach(cls, model: nn.Module, *, refused: tuple[str, ...]) -> None:
        names = parameter_names(type(model).forward)[1:]
        model.register_forward_pre_hook(cls(names, refused), with_kwargs=True)

    @classmethod
    def detach(cls, model: nn.Module) -> None:
        for key, hook in tuple(model._forward_pre_hooks.items()):
            if isinstance(hook, cls):
                del model._forward_pre_hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        for name in self.refused:
            value = given.get(name)
            if value is None:
                value = getattr(model.config, name, None)  # switches may be set in the config
            if value is not None and value is not False:
                raise MctfError(
                    f"a fused model takes no {name}, as attention is between fused tokens: "
                    "omit it, or run mctf.unfuse(model)"
                )


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of a function in their order, without *args and **kwargs."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return tuple(name for name, each in signature(function).parameters.items() if each.kind not in kinds)
