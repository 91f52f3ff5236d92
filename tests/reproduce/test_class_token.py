"""Cosines of class tokens, against a second way to get at them, and on real images."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mctf
from helpers.models import make
from helpers.shared_data import SHARED, needs_shared
from helpers.subjects import make_subject, make_task
from mctf.data import EvalLoader, Preprocessing, open_dataset
from mctf.models.loading import load_model
from mctf.reproduce import paper
from mctf.reproduce.analyses import CRITERIA, ClassToken, class_tokens, order
from mctf.reproduce.runner import Subject
from mctf.reproduce.studies import options_of

WEIGHTS, IMAGES = "data/deit_tiny_patch16_224.safetensors", "data/imagenet-sample-500.zip"


@torch.no_grad()
def by_hand(model, pixels) -> list[torch.Tensor]:
    """The class token after each block, going from block to block."""
    x = model._pos_embed(model.patch_embed(pixels))
    tokens = []
    for block in model.blocks:
        x = block(x)
        tokens.append(x[:, 0])
    return tokens


def test_cosines_are_those_of_the_tokens_after_each_block(tmp_path, subject) -> None:
    task, steps = make_task(tmp_path, subject)
    found = ClassToken().run(task)
    assert sum(steps) == ClassToken().steps(task)
    pixels = torch.cat([batch.pixels for batch in subject.batches])
    plain = by_hand(subject.model, pixels)
    for criteria in CRITERIA:
        fused = by_hand(mctf.fuse(make("plain"), r=16, **options_of(criteria)), pixels)
        expected = [F.cosine_similarity(one, other).mean().item() for one, other in zip(fused, plain, strict=True)]
        assert found["cosine"][criteria] == pytest.approx(expected, abs=1e-5)
        assert found["cosine"][criteria][0] == pytest.approx(1)
        assert found["cosine"][criteria][-1] < 0.999
        last = F.cosine_similarity(fused[-1], plain[-1]).tolist()
        assert found["last"][criteria] == pytest.approx(last, abs=1e-5)


def test_the_model_is_left_unfused(tmp_path, subject) -> None:
    ClassToken().run(make_task(tmp_path, subject)[0])
    assert not hasattr(subject.model.blocks, "method")


def test_a_model_without_a_class_token_is_not_measured(tmp_path) -> None:
    assert ClassToken().unsuited(make_subject(tmp_path, make("mean_pool"))) == "the model has no class token"
    assert ClassToken().unsuited(make_subject(tmp_path)) is None


def test_tokens_of_every_block_are_seen(subject) -> None:
    model = mctf.fuse(make("plain"), r=8)
    pixels = next(iter(subject.batches)).pixels
    with torch.no_grad():
        assert class_tokens(model, pixels).shape == (3, 4, 48)


def test_the_order_is_by_the_last_block() -> None:
    assert order({"a": [1.0, 0.3], "b": [0.5, 0.9], "c": [0.7, 0.4]}) == ["b", "c", "a"]
    assert order(paper.class_token_cosine()) == ["sim+info+size", "sim+info", "sim", "info", "size"]


@pytest.mark.slow
@needs_shared(WEIGHTS, IMAGES)
def test_real_images_give_the_paper_s_order(tmp_path: Path) -> None:
    model = load_model("deit_tiny_patch16_224", weights=SHARED / WEIGHTS)
    preprocessing = Preprocessing.of(model, crop_pct=0.875)
    images = open_dataset(SHARED / IMAGES).spaced(64)
    subject = Subject("deit", model, EvalLoader(images, preprocessing.transform()), preprocessing)
    cosine = ClassToken().run(make_task(tmp_path, subject)[0])["cosine"]
    assert order(cosine) == order(paper.class_token_cosine())
