"""Class tokens, largest tokens and attention maps against a second computation, and on real images."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mctf
from helpers.models import equal_tokens, make, make_images
from helpers.shared_data import SHARED, needs_shared
from helpers.subjects import make_subject, make_task
from mctf.api import fused_stack
from mctf.core.assignment import Assignment
from mctf.data import EvalLoader, Preprocessing, open_dataset
from mctf.hosts import find_host
from mctf.models.loading import load_model
from mctf.reproduce import paper
from mctf.reproduce.analyses import (
    CRITERIA,
    AttentionPair,
    ClassToken,
    LargestToken,
    approximate_attention,
    attention_pair,
    class_tokens,
    largest_token,
    rank_criteria,
    recorded_attention,
)
from mctf.reproduce.runner import Subject
from mctf.reproduce.studies import criteria_options

WEIGHTS, IMAGES = "data/deit_tiny_patch16_224.safetensors", "data/imagenet-sample-500.zip"


@torch.no_grad()
def block_by_block(model, subject: Subject) -> list[torch.Tensor]:
    """The class tokens of all images after each block, in a loop over the blocks."""
    by_batch = []
    for batch in subject.batches:
        x = model._pos_embed(model.patch_embed(batch.pixels))
        tokens = []
        for block in model.blocks:
            x = block(x)
            tokens.append(x[:, 0])
        by_batch.append(tokens)
    return [torch.cat(parts) for parts in zip(*by_batch, strict=True)]


class TestClassToken:
    def test_cosines_are_those_of_the_tokens_after_each_block(self, tmp_path, subject) -> None:
        task, steps = make_task(tmp_path, subject)
        result = ClassToken().run(task)
        assert sum(steps) == ClassToken().steps(task)
        assert not hasattr(subject.model.blocks, "method"), "the model stays unfused"
        baseline = block_by_block(subject.model, subject)
        for criteria in CRITERIA:
            fused = block_by_block(mctf.fuse(make("plain"), r=16, **criteria_options(criteria)), subject)
            expected = [F.cosine_similarity(a, b).mean().item() for a, b in zip(fused, baseline, strict=True)]
            assert result.cosine[criteria] == pytest.approx(expected, abs=1e-5)
            assert result.cosine[criteria][0] == pytest.approx(1)
            assert result.cosine[criteria][-1] < 0.999
            last = F.cosine_similarity(fused[-1], baseline[-1]).tolist()
            assert result.last[criteria] == pytest.approx(last, abs=1e-5)

    def test_a_model_without_a_class_token_is_unsupported(self, tmp_path) -> None:
        assert ClassToken().unsupported(make_subject(tmp_path, make("mean_pool"))) == "the model has no class token"
        assert ClassToken().unsupported(make_subject(tmp_path)) is None

    def test_every_block_is_recorded(self, subject) -> None:
        model = mctf.fuse(make("plain"), r=8)
        pixels = next(iter(subject.batches)).pixels
        with torch.no_grad():
            assert class_tokens(model, pixels).shape == (3, 4, 48)

    def test_criteria_are_ranked_by_the_last_block(self) -> None:
        assert rank_criteria({"a": [1.0, 0.3], "b": [0.5, 0.9], "c": [0.7, 0.4]}) == ["b", "c", "a"]
        assert rank_criteria(paper.class_token_cosine()) == ["sim+info+size", "sim+info", "sim", "info", "size"]

    @pytest.mark.slow
    @needs_shared(WEIGHTS, IMAGES)
    def test_real_images_give_the_paper_s_order(self, tmp_path: Path) -> None:
        model = load_model("deit_tiny_patch16_224", weights=SHARED / WEIGHTS)
        preprocessing = Preprocessing.of(model, crop_pct=0.875)
        images = open_dataset(SHARED / IMAGES).spaced(64)
        subject = Subject("deit", model, EvalLoader(images, preprocessing.transform()), preprocessing)
        cosine = ClassToken().run(make_task(tmp_path, subject)[0]).cosine
        assert rank_criteria(cosine) == rank_criteria(paper.class_token_cosine())


class TestLargestToken:
    def test_sizes_are_those_of_the_source_map(self, tmp_path, subject) -> None:
        task, steps = make_task(tmp_path, subject)
        result = LargestToken().run(task)
        assert sum(steps) == LargestToken().steps(task)
        for case, options in (("with_size", {}), ("without_size", {"tau_size": 0.0})):
            model = mctf.fuse(make("plain"), r=16, **options)
            expected: list[int] = []
            for batch in subject.batches:
                with torch.no_grad(), mctf.trace(model) as trace:
                    model(batch.pixels)
                expected += [torch.bincount(slots).max().item() for slots in trace.source_map()]
            assert list(result.sizes[case]) == expected

    @pytest.mark.parametrize("r", [0, 4])
    def test_a_small_r_keeps_tokens_small(self, r: int, subject) -> None:
        model = mctf.fuse(make("plain"), r=r)
        with torch.no_grad():
            sizes = largest_token(model, next(iter(subject.batches)).pixels)
        assert (sizes <= 1 + 3 * r).all()
        assert (sizes == 1).all() == (r == 0)


class TestAttentionPair:
    def test_the_approximation_equals_loops(self) -> None:
        full = torch.rand(1, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(dim=3)
        slots, weights = [0, 1, 1, 2, 1], torch.tensor([[0.5, 1.0, 3.0, 2.0, 0.25]], dtype=torch.float64)
        approximated = approximate_attention(full, Assignment(torch.tensor([slots]), 3), weights)
        for head in range(2):
            for p in range(3):
                members = [i for i in range(5) if slots[i] == p]
                for u in range(3):
                    sums = [sum(full[0, head, i, j] for j in range(5) if slots[j] == u) for i in members]
                    total = sum(weights[0, i] for i in members)
                    expected = sum(weights[0, i] * each for i, each in zip(members, sums, strict=True)) / total
                    assert approximated[0, head, p, u] == pytest.approx(expected.item())

    @pytest.mark.parametrize("name", ["plain", "registers", "eva_dinov3"])
    @torch.no_grad()
    def test_recording_gives_attention_maps_and_does_not_change_the_output(self, name: str) -> None:
        model = make(name)
        counts = mctf.plan(model, r=9).token_counts
        images = make_images(mctf.fuse(model, r=9), 2)
        before, method = model(images), fused_stack(model).method
        with recorded_attention(model) as maps:
            assert torch.equal(model(images), before)
        assert fused_stack(model).method is method
        assert sorted(maps) == [1, 2, 3]
        for block, pair in maps.items():
            for each in (pair.approximated, pair.precise):
                assert each.shape[2:] == (counts[block], counts[block])
                torch.testing.assert_close(each.sum(dim=3), torch.ones(each.shape[:3]))
            assert ((pair.distance() > 0) & (pair.distance() < 1)).all()

    @torch.no_grad()
    def test_for_equal_tokens_both_maps_are_the_same(self) -> None:
        """A token of size 2 counts twice, so fusing pairs of equal tokens changes nothing."""
        model = make("plain").double()
        x = equal_tokens(model, 2)  # the class token, then 24 pairs
        slots = torch.tensor([0, *(1 + pair for pair in range(24) for _ in range(2))]).expand(2, -1)
        block = find_host(model).ops(model.blocks[1], {}, None)
        weights = torch.rand(2, 49, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
        maps = attention_pair(block, x, None, Assignment(slots, 25), weights)
        torch.testing.assert_close(maps.approximated, maps.precise)
        assert maps.precise.std() > 1e-3

    def test_the_distance_is_between_0_and_1(self) -> None:
        maps = AttentionPair(torch.eye(3)[None, None], torch.eye(3)[None, None].roll(1, dims=3))
        assert maps.distance().tolist() == [1.0]
        assert AttentionPair(maps.precise, maps.precise).distance().tolist() == [0.0]
