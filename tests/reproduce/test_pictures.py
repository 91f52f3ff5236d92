"""Experiments that draw: attention as heat over the image, and fused patches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

import mctf
from helpers.models import make, make_images
from helpers.subjects import make_subject, make_task
from mctf.reproduce import pictures
from mctf.reproduce.pictures import CRITERIA, AttentionMaps, FusedPatches, attention_heat, four_blocks, overlay_heat


@pytest.mark.parametrize(
    ("depth", "fusing", "blocks"),
    [(12, range(1, 12), [2, 5, 8, 11]), (4, range(1, 4), [1, 2, 3]), (24, range(1, 13), [5, 11, 12]), (2, [1], [1])],
)
def test_the_shown_blocks_fuse(depth: int, fusing: Sequence[int], blocks: list[int]) -> None:
    """The last blocks of a deep model have too few tokens to fuse."""
    assert four_blocks([block in fusing for block in range(depth)]) == blocks


def test_a_model_with_too_few_tokens_is_unsupported(tmp_path) -> None:
    tiny = make_subject(tmp_path, make("plain", img_size=24))
    assert AttentionMaps().unsupported(tiny) == "the model has too few tokens to fuse any"
    assert AttentionMaps().unsupported(make_subject(tmp_path)) is None


@torch.no_grad()
def test_heat_is_a_fraction_of_the_attention() -> None:
    model = mctf.fuse(make("plain"), r=12)
    heat, distances = attention_heat(model, make_images(model, 1))
    assert sorted(heat) == sorted(distances) == [1, 2, 3]
    for by_kind in heat.values():
        for values in by_kind.values():
            assert values.shape == (64,)
            assert 0.5 < values.sum() < 1  # the class token receives the rest


def test_heat_is_drawn_patch_by_patch() -> None:
    heat = np.array([[0.0, 1.0], [1.0, 0.0]])
    picture = np.asarray(overlay_heat(Image.new("RGB", (8, 8), (90, 90, 90)), heat, scale=2)).astype(int)
    assert picture.shape == (16, 16, 3)
    cold, hot = picture[:8, :8], picture[:8, 8:]
    assert (cold == cold[0, 0]).all()
    assert (hot == hot[0, 0]).all()
    assert (picture[8:, 8:] == cold).all()
    assert hot[0, 0].sum() > cold[0, 0].sum() + 200


def test_attention_maps_measures_all_images_and_draws_two(tmp_path, subject) -> None:
    task, steps = make_task(tmp_path, subject)
    result = AttentionMaps().run(task)
    assert sum(steps) == AttentionMaps().steps(task) == result.images == 5
    assert list(result.distance) == ["2", "3", "4"]
    assert len(result.drawn) == 2
    files = [file for drawn in result.drawn for kind in drawn.pictures.values() for file in kind]
    assert len(set(files)) == 2 * 2 * 3
    for file in files:
        assert Image.open(task.pictures / file).size == (448, 448)


def test_fused_patches_draws_every_image_r_and_block(tmp_path, subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_SIDE", 128)
    task, steps = make_task(tmp_path, subject)
    result = FusedPatches().run(task)
    assert sum(steps) == FusedPatches().steps(task)
    assert [list(counts) for counts in result.tokens] == [
        mctf.plan(subject.model, r=r).token_counts for r in result.reductions
    ]
    files = [file for images in result.pictures for blocks in images for file in blocks]
    assert len(files) == len(set(files)) == 3 * 2 * 4
    by_criteria = [file for images in result.criteria.pictures for file in images]
    assert len(set(by_criteria)) == len(CRITERIA) * 2
    for file in [*files, *by_criteria, *result.originals]:
        assert Image.open(task.pictures / file).size == (128, 128)
    shown = {(task.pictures / file).read_bytes() for images in result.pictures for file in images[0]}
    assert len(shown) == 1 + 3 * 3  # the first block does not fuse: one picture for every r


def test_patches_without_a_grid_are_unsupported(tmp_path) -> None:
    subject = make_subject(tmp_path, make("plain", img_size=(64, 64), patch_size=(8, 16)))
    assert "no grid of squares" in str(FusedPatches().unsupported(subject))
