"""Learning rates and weight decay of every step and layer."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import make
from mctf.train.config import Recipe
from mctf.train.optimizer import Schedule, Steps, make_optimiser


def recipe(**options: Any) -> Recipe:
    values = {"epochs": 10, "cooldown_epochs": 3, "warmup_epochs": 2, "lr": 1e-3, "min_lr": 1e-5, "warmup_lr": 1e-6}
    return Recipe(model="test_vit", data="nowhere", output=Path("nowhere"), **(values | options))


def rates(made: Recipe, *, per_epoch: int) -> list[float]:
    schedule = Schedule(make_optimiser(make("plain"), made), made, per_epoch=per_epoch)
    return [schedule.set(step) for step in range(made.all_epochs * per_epoch)]


def test_the_rate_rises_falls_by_a_cosine_and_stays() -> None:
    found = rates(recipe(), per_epoch=5)
    assert len(found) == 65
    assert found[0] == pytest.approx(1e-6)
    assert found[5] == pytest.approx((1e-6 + 1e-3) / 2)  # half of the warm-up
    for step in range(10, 50):
        expected = 1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / 50)) / 2
        assert found[step] == pytest.approx(expected)
    assert found[50:] == [1e-5] * 15


def test_without_warm_up_it_begins_at_the_top() -> None:
    found = rates(recipe(warmup_epochs=0), per_epoch=5)
    assert found[0] == pytest.approx(1e-3)
    assert found == sorted(found, reverse=True)


def test_a_rate_depends_on_the_step_alone() -> None:
    made = recipe()
    whole = rates(made, per_epoch=5)
    schedule = Schedule(make_optimiser(make("plain"), made), made, per_epoch=5)
    assert [schedule.set(step) for step in (40, 3, 60)] == [whole[40], whole[3], whole[60]]


def test_biases_norms_and_tokens_do_not_decay() -> None:
    model = make("plain")
    optimiser = make_optimiser(model, recipe())
    assert isinstance(optimiser, torch.optim.AdamW)
    decays = {id(each): group["weight_decay"] for group in optimiser.param_groups for each in group["params"]}
    for name, parameter in model.named_parameters():
        spared = parameter.dim() == 1 or name in ("pos_embed", "cls_token")
        assert decays[id(parameter)] == (0 if spared else 0.05), name


def test_layers_learn_the_slower_the_earlier_they_come() -> None:
    model = make("plain")
    made = recipe(layer_decay=0.5, warmup_epochs=0)
    optimiser = make_optimiser(model, made)
    assert Schedule(optimiser, made, per_epoch=5).set(0) == pytest.approx(1e-3)
    rate = {id(each): group["lr"] for group in optimiser.param_groups for each in group["params"]}
    found = [rate[id(block.mlp.fc1.weight)] for block in model.blocks]
    assert all(later == pytest.approx(2 * earlier) for earlier, later in pairwise(found))
    assert rate[id(model.patch_embed.proj.weight)] < found[0]
    assert rate[id(model.head.weight)] == pytest.approx(1e-3)


def test_batches_that_make_no_whole_step_are_left_out() -> None:
    steps = Steps(batches=7, accumulate=3, epochs=4)
    assert (steps.per_epoch, steps.total) == (2, 8)
