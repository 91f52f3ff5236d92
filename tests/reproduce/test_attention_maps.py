"""Both maps against loops and against what the fused model computes, and the pictures made of them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

import mctf
from helpers.models import equal_tokens, make, make_images
from helpers.subjects import make_subject, make_task
from mctf.api import fused_stack
from mctf.core.assignment import Assignment
from mctf.hosts import find_host
from mctf.reproduce.analyses import Maps, approximate, both_maps, compared
from mctf.reproduce.pictures import AttentionPictures, four_blocks, heated, look


def test_approximation_is_what_loops_give() -> None:
    full = torch.rand(1, 2, 5, 5, dtype=torch.float64).softmax(dim=3)
    slots, weights = [0, 1, 1, 2, 1], torch.tensor([[0.5, 1.0, 3.0, 2.0, 0.25]], dtype=torch.float64)
    found = approximate(full, Assignment(torch.tensor([slots]), 3), weights)
    for head in range(2):
        for p in range(3):
            members = [i for i in range(5) if slots[i] == p]
            for u in range(3):
                sums = [sum(full[0, head, i, j] for j in range(5) if slots[j] == u) for i in members]
                total = sum(weights[0, i] for i in members)
                expected = sum(weights[0, i] * each for i, each in zip(members, sums, strict=True)) / total
                assert found[0, head, p, u] == pytest.approx(expected.item())


@pytest.mark.parametrize("name", ["plain", "registers", "eva_dinov3"])
@torch.no_grad()
def test_maps_are_attention_and_the_model_runs_as_ever(name: str) -> None:
    model = make(name)
    counts = mctf.plan(model, r=9).token_counts
    images = make_images(mctf.fuse(model, r=9), 2)
    before, method = model(images), fused_stack(model).method
    with compared(model) as maps:
        assert torch.equal(model(images), before)
    assert fused_stack(model).method is method
    assert sorted(maps) == [1, 2, 3]
    for block, both in maps.items():
        for each in (both.approximated, both.precise):
            assert each.shape[2:] == (counts[block], counts[block])
            torch.testing.assert_close(each.sum(dim=3), torch.ones(each.shape[:3]))
        assert ((both.distance() > 0) & (both.distance() < 1)).all()


@torch.no_grad()
def test_where_equal_tokens_are_fused_both_maps_are_the_same() -> None:
    """A token of size 2 counts twice, so pairs of equal tokens lose nothing when they become one."""
    model = make("plain").double()
    x = equal_tokens(model, 2)  # the class token, then 24 pairs
    slots = torch.tensor([0, *(1 + pair for pair in range(24) for _ in range(2))]).expand(2, -1)
    block = find_host(model).ops(model.blocks[1], {}, None)
    maps = both_maps(block, x, None, Assignment(slots, 25), torch.rand(2, 49, dtype=torch.float64) + 0.1)
    torch.testing.assert_close(maps.approximated, maps.precise)
    assert maps.precise.std() > 1e-3


def test_maps_are_nothing_to_everything_apart() -> None:
    maps = Maps(torch.eye(3)[None, None], torch.eye(3)[None, None].roll(1, dims=3))
    assert maps.distance().tolist() == [1.0]
    assert Maps(maps.precise, maps.precise).distance().tolist() == [0.0]


@pytest.mark.parametrize(
    ("depth", "fusing", "blocks"),
    [(12, range(1, 12), [2, 5, 8, 11]), (4, range(1, 4), [1, 2, 3]), (24, range(1, 13), [5, 11, 12]), (2, [1], [1])],
)
def test_blocks_that_are_shown(depth: int, fusing: Sequence[int], blocks: list[int]) -> None:
    """Of a deep model the last blocks have nothing left to fuse."""
    assert four_blocks([block in fusing for block in range(depth)]) == blocks


def test_a_model_with_nothing_to_fuse_is_not_looked_at(tmp_path) -> None:
    tiny = make_subject(tmp_path, make("plain", img_size=24))
    assert AttentionPictures().unsuited(tiny) == "the model has too few tokens to fuse any"
    assert AttentionPictures().unsuited(make_subject(tmp_path)) is None


@torch.no_grad()
def test_heat_is_a_share_of_the_attention() -> None:
    model = mctf.fuse(make("plain"), r=12)
    heats, distances = look(model, make_images(model, 1))
    assert sorted(heats) == sorted(distances) == [1, 2, 3]
    for both in heats.values():
        for heat in both.values():
            assert heat.shape == (64,)
            assert 0.5 < heat.sum() < 1  # the class token has the rest


def test_heat_is_drawn_patch_by_patch() -> None:
    heat = np.array([[0.0, 1.0], [1.0, 0.0]])
    picture = np.asarray(heated(Image.new("RGB", (8, 8), (90, 90, 90)), heat, scale=2)).astype(int)
    assert picture.shape == (16, 16, 3)
    cold, hot = picture[:8, :8], picture[:8, 8:]
    assert (cold == cold[0, 0]).all()
    assert (hot == hot[0, 0]).all()
    assert (picture[8:, 8:] == cold).all()
    assert hot[0, 0].sum() > cold[0, 0].sum() + 200


def test_the_experiment_draws_some_and_measures_all(tmp_path, subject) -> None:
    task, steps = make_task(tmp_path, subject)
    found = AttentionPictures().run(task)
    assert sum(steps) == AttentionPictures().steps(task) == found["images"] == 5
    assert list(found["distance"]) == ["2", "3", "4"]
    assert len(found["drawn"]) == 2
    files = [file for drawn in found["drawn"] for kind in drawn["pictures"].values() for file in kind]
    assert len(set(files)) == 2 * 2 * 3
    for file in files:
        assert Image.open(task.pictures / file).size == (448, 448)
