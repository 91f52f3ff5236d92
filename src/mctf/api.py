"""fuse, unfuse, set_r: fuse a model in place, restore it, change the schedule."""

import threading
from collections.abc import Iterable
from typing import cast

from torch import nn

from .core.schedule import ReductionSpec
from .errors import MctfError
from .hosts import find_host
from .hosts._inspect import check_model
from .methods._layers import LAYERS, make_layers
from .methods.base import check_bool, check_choice
from .planning import FusionRequest, ScheduleSource
from .stack import RESTORES, FusedStack

_CHANGING = threading.RLock()  # two threads that fuse the same model would fuse it twice


def fuse(
    model: nn.Module,
    method: str | None = None,
    *,
    r: ReductionSpec | None = None,
    flops: float | None = None,
    blocks: Iterable[int] | None = None,
    schedule: ScheduleSource | None = None,
    dense: bool = False,
    trim_last: bool | None = None,
    restore: str = RESTORES[0],
    **options: object,
) -> nn.Module:
    """Make a Vision Transformer cheaper by fusing tokens, in place; `unfuse` takes it back.

    method: "mctf" by default, or the method of the schedule.
    r: tokens to fuse in each block: a count, a ratio below 1 of the unprotected tokens, a list with one amount a
        block, or "fast", the authors' preset (0.35 at blocks 3, 6, 9 of twelve). By default what the method's
        authors use, 16 for mctf.
    flops: in place of r, the share of the baseline's FLOPs to keep; the method's ratio or count is solved for it
        (`mctf.plan` shows what comes out, and `set_r` changes it).
    blocks: which blocks fuse; the method's choice by default (mctf: all but the first).
    schedule: in place of r, the file that `mctf tune` wrote, or its content as a dict.
    dense: give one token per input token to whatever reads the model's tokens, for heads of your own on top of
        `forward_features`; by default a model that reads the class token alone keeps its tokens fused.
    trim_last: let the last block compute queries, projection and MLP only for the tokens that the head reads, where it
        reads the class token alone. Logits are the same. `forward_features` called by itself returns all fused tokens,
        and hooks up to the head switch it off. By default the method's choice: ward does where it fuses anything, the
        published methods do not.
    restore: what an input token gets where every token is read (`dense`, mean or attention pooling, feature maps,
        models of transformers): "residual", its fused token plus the differences that the fusions took from it, or
        "copy", its fused token alone.
    options: the method's own, see `mctf.methods()` and the classes in `mctf.methods`.

    Everything is checked before the model is touched. Returns the same model.
    """
    check_bool(dense=dense)
    check_choice(restore=(restore, RESTORES))
    request = FusionRequest.of(method, r=r, flops=flops, blocks=blocks, schedule=schedule, options=options)
    with _CHANGING:
        return _fuse(model, request, dense=dense, trim_last=trim_last, restore=restore)


def _fuse(model: nn.Module, request: FusionRequest, *, dense: bool, trim_last: bool | None, restore: str) -> nn.Module:
    if trim_last is not None:
        check_bool(trim_last=trim_last)
    if find_stack(model) is not None:
        raise MctfError("the model is fused already: mctf.set_r changes r; mctf.unfuse comes before another method")
    host = find_host(model)
    setting = request.resolve(host, dense=dense, trim_last=trim_last)
    layers = None
    if setting.method.learned:
        layers = make_layers(model, setting.method, host.architecture(None).blocks, setting.amounts)
    stack = FusedStack(
        host.container,
        host,
        setting.method,
        r=setting.r,
        blocks=setting.blocks,
        dense=dense,
        trim_last=trim_last,
        restore=restore,
        layers=layers,
    )
    host.install(stack)
    if layers is not None:
        model.add_module(LAYERS, layers)
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Restore the model's own blocks in place; it computes bit for bit what it did before fusing."""
    with _CHANGING:
        stack = fused_stack(model)
        stack.host.uninstall(stack)
        for module in list(model.modules()):  # the fused model may be inside a wrapper
            if stack.layers is not None and module._modules.get(LAYERS) is stack.layers:
                del module._modules[LAYERS]
        return model


def set_r(model: nn.Module, r: ReductionSpec) -> None:
    """Change the r of a fused model: cheap enough for every training step."""
    fused_stack(model).set_r(r)


def fused_stack(model: nn.Module) -> FusedStack:
    """The fused stack inside a model; raises MctfError where there is none, or more than one."""
    check_model(model)
    stacks = [name for name, module in model.named_modules() if isinstance(module, FusedStack)]
    if not stacks:
        raise MctfError("the model is not fused: run mctf.fuse(model, r=16) first")
    if len(stacks) > 1:
        raise MctfError(f"the module holds {len(stacks)} fused models ({stacks[0]}, {stacks[1]}, …): pass one of them")
    return cast(FusedStack, model.get_submodule(stacks[0]))


def find_stack(model: nn.Module) -> FusedStack | None:
    """The fused stack inside a model, None where there is none."""
    check_model(model)
    return next((module for module in model.modules() if isinstance(module, FusedStack)), None)
