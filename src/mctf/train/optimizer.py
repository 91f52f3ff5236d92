"""AdamW and its learning rate, by timm's parts."""

from dataclasses import dataclass

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from ..methods._layers import LAYERS
from .config import Recipe

OWN = "of_the_method"  # marks groups of parameters that a method has brought


def make_optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW without weight decay on biases, norms and what the model excepts; learning rates fall with depth if asked.

    The last layer has the recipe's learning rate, the one before it `layer_decay` times as much, and so on. The layers
    of a learned method have a learning rate of their own.
    """
    on_gpu = next(model.parameters()).is_cuda
    optimiser = create_optimizer_v2(
        model,
        opt="adamw",
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        **({"fused": True} if on_gpu else {}),
    )
    layers = getattr(model, LAYERS, None)
    if layers is not None:
        _set_apart(optimiser, layers, recipe.layers_lr / recipe.lr)
    return optimiser


def _set_apart(optimiser: torch.optim.Optimizer, layers: nn.Module, scale: float) -> None:
    """Groups of their own for the parameters of these layers, whose learning rate is so many times the others'."""
    own = {id(parameter) for parameter in layers.parameters()}
    for group in tuple(optimiser.param_groups):
        inside = [each for each in group["params"] if id(each) in own]
        if inside:
            group["params"] = [each for each in group["params"] if id(each) not in own]
            optimiser.add_param_group({**group, "params": inside, "lr_scale": scale, OWN: True})


@dataclass(frozen=True)
class Steps:
    """How many optimiser steps there are. batches: of an epoch, `accumulate` of them to a step, the rest left out."""

    batches: int
    accumulate: int
    epochs: int

    @property
    def per_epoch(self) -> int:
        return self.batches // self.accumulate

    @property
    def total(self) -> int:
        return self.per_epoch * self.epochs


class Schedule:
    """The learning rate of every step: warm-up in a straight line, half a cosine, then a flat cooldown.

    It depends on the step alone, so there is nothing to save.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, recipe: Recipe, *, per_epoch: int) -> None:
        self.optimiser = optimiser
        self._timm = CosineLRScheduler(
            optimiser,
            t_initial=recipe.epochs * per_epoch,
            lr_min=recipe.min_lr,
            warmup_t=recipe.warmup_epochs * per_epoch,
            warmup_lr_init=recipe.warmup_lr,
            t_in_epochs=False,
        )

    def set(self, step: int) -> float:
        """Set the learning rate for this step, counted from 0; gives that of the model's last layer."""
        self._timm.step_update(step)
        return max(group["lr"] for group in self.optimiser.param_groups if OWN not in group)
