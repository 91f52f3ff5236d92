"""AdamW and its learning-rate schedule, from timm's parts."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from ..methods._layers import LAYERS
from .config import Recipe

_METHOD_LAYERS = "method_layers"  # key of parameter groups that hold layers of the method


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW without weight decay on biases, norms and what the model excludes, with layer-wise decay of the rate.

    The last layer has the recipe's learning rate, the one before it `layer_decay` times as much, and so on. The layers
    of a learned method have a learning rate of their own.
    """
    on_gpu = next(model.parameters()).is_cuda
    optimizer = create_optimizer_v2(
        model,
        opt="adamw",
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        **({"fused": True} if on_gpu else {}),
    )
    layers = getattr(model, LAYERS, None)
    if layers is not None:
        own = {id(parameter) for parameter in layers.parameters()}
        for group in tuple(optimizer.param_groups):
            inside = [each for each in group["params"] if id(each) in own]
            if inside:
                group["params"] = [each for each in group["params"] if id(each) not in own]
                scale = recipe.layers_lr / recipe.lr
                optimizer.add_param_group({**group, "params": inside, "lr_scale": scale, _METHOD_LAYERS: True})
    return optimizer


@dataclass(frozen=True)
class Steps:
    """Number of optimizer steps. batches: per epoch, `accumulate` of them per step; an incomplete step is dropped."""

    batches: int
    accumulate: int
    epochs: int

    @property
    def per_epoch(self) -> int:
        return self.batches // self.accumulate

    @property
    def total(self) -> int:
        return self.per_epoch * self.epochs


@contextmanager
def _silenced(logger: str) -> Iterator[None]:
    """A logger without warnings."""
    library = logging.getLogger(logger)
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)


class LRSchedule:
    """The learning rate of every step: linear warm-up, half a cosine, constant cooldown.

    It depends on the step alone, so checkpoints hold nothing of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, *, per_epoch: int) -> None:
        self.optimizer = optimizer
        with _silenced("timm.scheduler.cosine_lr"):  # a run of one step has no cosine, and needs none
            self._timm = CosineLRScheduler(
                optimizer,
                t_initial=recipe.epochs * per_epoch,
                lr_min=recipe.min_lr,
                warmup_t=recipe.warmup_epochs * per_epoch,
                warmup_lr_init=recipe.warmup_lr,
                t_in_epochs=False,
            )

    def set(self, step: int) -> float:
        """Set the learning rate of this step, counted from 0; returns that of the model's last layer."""
        self._timm.step_update(step)
        return max(group["lr"] for group in self.optimizer.param_groups if _METHOD_LAYERS not in group)
