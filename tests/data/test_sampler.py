"""Order of images per rank and epoch, and the seeds behind it."""

import contextlib
import random

import numpy as np
import pytest
import torch

from mctf import MctfError
from mctf.data.sampler import ResumableSampler, generator_for, seed_of, seeded


def entries(sampler: ResumableSampler, epoch: int = 0) -> list[tuple[int, int]]:
    return [entry for batch in sampler.batches(epoch) for entry in batch]


class TestSampler:
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_ranks_split_an_epoch_without_overlap(self, world_size: int) -> None:
        samplers = [ResumableSampler(24, 4, rank=rank, world_size=world_size) for rank in range(world_size)]
        seen = [image for sampler in samplers for image, _ in entries(sampler)]
        assert sorted(seen) == list(range(24))

    def test_incomplete_batches_are_dropped(self) -> None:
        samplers = [ResumableSampler(27, 4, rank=rank, world_size=2) for rank in range(2)]
        assert [sampler.steps for sampler in samplers] == [3, 3]
        seen = [image for sampler in samplers for image, _ in entries(sampler)]
        assert len(seen) == len(set(seen)) == 24

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_repeats_show_fewer_images(self, world_size: int) -> None:
        samplers = [ResumableSampler(48, 4, repeats=3, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert {sampler.steps for sampler in samplers} == {48 // 4 // world_size}  # as long as an epoch without repeats
        seen = [entry for sampler in samplers for entry in entries(sampler)]
        shown = sorted({image for image, _ in seen})
        assert len(shown) == len(seen) // 3
        assert sorted(seen) == [(image, repeat) for image in shown for repeat in range(3)]

    def test_repeats_show_other_images_in_other_epochs(self) -> None:
        sampler = ResumableSampler(36, 4, repeats=3)
        assert {image for image, _ in entries(sampler, 0)} != {image for image, _ in entries(sampler, 1)}

    def test_repeats_of_an_image_go_to_different_ranks_of_one_step(self) -> None:
        steps = zip(
            *(ResumableSampler(12, 4, repeats=3, rank=rank, world_size=3).batches(0) for rank in range(3)), strict=True
        )
        for step in steps:
            assert [{image for image, _ in batch} for batch in step] == [{image for image, _ in step[0]}] * 3

    def test_differs_between_epochs_and_seeds(self) -> None:
        sampler = ResumableSampler(40, 4)
        assert entries(sampler, 0) == entries(sampler, 0)
        assert entries(sampler, 0) != entries(sampler, 1)
        assert entries(sampler, 0) != entries(ResumableSampler(40, 4, seed=1), 0)
        assert entries(sampler, 0) != [(image, 0) for image in range(40)]

    @pytest.mark.parametrize("start", [0, 1, 9, 10, 11])
    def test_resumes_from_any_step(self, start: int) -> None:
        sampler = ResumableSampler(40, 4, repeats=2, world_size=2, rank=1)
        assert list(sampler.batches(5, start)) == list(sampler.batches(5))[start:]

    def test_refuses_batches_that_cannot_be_filled(self) -> None:
        with pytest.raises(MctfError, match=r"7 images cannot fill one batch of 4 in each of 2 processes: lower"):
            ResumableSampler(7, 4, world_size=2)

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_refuses_a_rank_out_of_range(self, rank: int) -> None:
        with pytest.raises(MctfError, match=rf"rank {rank} is out of range: expected 0 to 1"):
            ResumableSampler(8, 4, rank=rank, world_size=2)


class TestSeeds:
    def test_differ_for_different_parts(self) -> None:
        parts = [("a", 0), ("a", 1), ("a", 0, 0), ("b", 0), ("a", 2**32), ("a", 0, 1), ("a", 1, 0)]
        assert len({seed_of(*part) for part in parts}) == len(parts)

    def test_are_the_same_in_every_process_and_version(self) -> None:
        assert seed_of("order", 3, 14) == 1085431531534954196
        assert torch.rand(1, generator=generator_for("order", 3, 14)) == torch.rand(
            1, generator=torch.Generator().manual_seed(1085431531534954196)
        )

    def test_restore_the_global_generators(self) -> None:
        def draws() -> list[float]:
            return [random.random(), np.random.rand(), torch.rand(1).item()]

        with seeded(7):
            first = draws()
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        with contextlib.suppress(KeyError), seeded(7):
            assert draws() == first
            raise KeyError
        expected = draws()
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        assert draws() == expected != first
