"""Learning rates and weight decay per step and layer."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import make
from mctf.train.config import Recipe
from mctf.train.optimizer import LRSchedule, Steps, make_optimizer


def recipe(**changes: Any) -> Recipe:
    values = {"epochs": 10, "cooldown_epochs": 3, "warmup_epochs": 2, "lr": 1e-3, "min_lr": 1e-5, "warmup_lr": 1e-6}
    return Recipe(model="test_vit", data="nowhere", output=Path("nowhere"), **(values | changes))


def rates(options: Recipe, *, per_epoch: int) -> list[float]:
    schedule = LRSchedule(make_optimizer(make("plain"), options), options, per_epoch=per_epoch)
    return [schedule.set(step) for step in range(options.total_epochs * per_epoch)]


def test_warm_up_cosine_and_cooldown() -> None:
    rate_per_step = rates(recipe(), per_epoch=5)
    assert len(rate_per_step) == 65
    assert rate_per_step[0] == pytest.approx(1e-6)
    assert rate_per_step[5] == pytest.approx((1e-6 + 1e-3) / 2)  # half of the warm-up
    for step in range(10, 50):
        expected = 1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / 50)) / 2
        assert rate_per_step[step] == pytest.approx(expected)
    assert rate_per_step[50:] == [1e-5] * 15


def test_without_warm_up_it_starts_at_the_peak() -> None:
    rate_per_step = rates(recipe(warmup_epochs=0), per_epoch=5)
    assert rate_per_step[0] == pytest.approx(1e-3)
    assert rate_per_step == sorted(rate_per_step, reverse=True)


def test_the_rate_depends_on_the_step_alone() -> None:
    options = recipe()
    whole = rates(options, per_epoch=5)
    schedule = LRSchedule(make_optimizer(make("plain"), options), options, per_epoch=5)
    assert [schedule.set(step) for step in (40, 3, 60)] == [whole[40], whole[3], whole[60]]


def test_biases_norms_and_tokens_have_no_weight_decay() -> None:
    model = make("plain")
    optimizer = make_optimizer(model, recipe())
    assert isinstance(optimizer, torch.optim.AdamW)
    decays = {id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in model.named_parameters():
        excluded = parameter.dim() == 1 or name in ("pos_embed", "cls_token")
        assert decays[id(parameter)] == (0 if excluded else 0.05), name


def test_layer_decay_lowers_the_rate_of_earlier_layers() -> None:
    model = make("plain")
    options = recipe(layer_decay=0.5, warmup_epochs=0)
    optimizer = make_optimizer(model, options)
    assert LRSchedule(optimizer, options, per_epoch=5).set(0) == pytest.approx(1e-3)
    rate = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    rate_per_step = [rate[id(block.mlp.fc1.weight)] for block in model.blocks]
    assert all(later == pytest.approx(2 * earlier) for earlier, later in pairwise(rate_per_step))
    assert rate[id(model.patch_embed.proj.weight)] < rate_per_step[0]
    assert rate[id(model.head.weight)] == pytest.approx(1e-3)


def test_an_incomplete_step_is_dropped() -> None:
    steps = Steps(batches=7, accumulate=3, epochs=4)
    assert (steps.per_epoch, steps.total) == (2, 8)
