"""How transformers calls the layers of a fused model.

Everything that transformers hangs on a layer acts when the layer is called: hooks or a wrapped `forward` collect
hidden states, and `__call__` may checkpoint gradients. So a fused pass goes through the layer: the bound block calls
it, and the layer's `forward` hands the call back. What is collected has one token per input token.

Axes: B images, N input tokens, C channels.
"""

import sys
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from ..errors import MctfError
from ..stack import BoundBlock

_Pass = Callable[..., Tensor]
_NOT_SAVED = (
    "the files of a saved model would lose the fusion: run mctf.unfuse(model) first and mctf.fuse after loading, "
    "or save model.state_dict()"
)


class BoundLayer(BoundBlock):
    """One layer of an iterated stack, called through the layer itself."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """B N C -> what the layer returns: B N C, in a tuple where its version returns one."""
        return self._block(x, *args, fused_pass=super().__call__, **kwargs)


class LayerForward:
    """Stands for the `forward` of a layer while its model is fused; called without a fused pass, it is the layer's."""

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        self.layer = layer
        self.in_tuple = in_tuple

    def __call__(self, x: Tensor, *args: Any, fused_pass: _Pass | None = None, **kwargs: Any) -> Any:
        if fused_pass is None:
            return type(self.layer).forward(self.layer, x, *args, **kwargs)
        output = fused_pass(x, *args, **kwargs)
        return (output,) if self.in_tuple else output


class RefusedSaving:
    """Stands for `save_pretrained` and `push_to_hub` of a fused model: their files could not say that it is fused."""

    names = ("save_pretrained", "push_to_hub")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise MctfError(_NOT_SAVED)


def refuse_saving_around(stack: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Called when somebody wants the state_dict: refuses it to the save_pretrained of a model around the fused one.

    That model is not known here, so the callers are asked; a state_dict for anybody else is nobody's business.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        home = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "save_pretrained" and home == "transformers.modeling_utils":
            raise MctfError(_NOT_SAVED)


class CallCheck:
    """Looks at what a fused model is called with, before its layers can give half an answer.

    names: of the parameters of its forward. refused: those it must not be given.
    """

    def __init__(self, names: tuple[str, ...], refused: tuple[str, ...]) -> None:
        self.names = names
        self.refused = refused

    @classmethod
    def hang_on(cls, model: nn.Module, *, refused: tuple[str, ...]) -> None:
        """Have every call of the model checked."""
        names = parameter_names(type(model).forward)[1:]
        model.register_forward_pre_hook(cls(names, refused), with_kwargs=True)

    @classmethod
    def take_off(cls, model: nn.Module) -> None:
        for number, hook in tuple(model._forward_pre_hooks.items()):
            if isinstance(hook, cls):
                del model._forward_pre_hooks[number]
                model._forward_pre_hooks_with_kwargs.pop(number, None)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        for name in self.refused:
            value = given.get(name)
            if value is None:
                value = getattr(model.config, name, None)  # switches may be set in the config
            if value is not None and value is not False:
                raise MctfError(
                    f"a fused model takes no {name}, as attention is between fused tokens: "
                    "leave it out, or run mctf.unfuse(model)"
                )


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of a function, in their order; those of *args and **kwargs left out."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return tuple(name for name, each in signature(function).parameters.items() if each.kind not in kinds)
