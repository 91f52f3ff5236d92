"""Which images each process sees when, and the seeds behind it."""

import contextlib
import random

import numpy as np
import pytest
import torch

from mctf import MctfError
from mctf.data.sampler import Order, drawing_from, generator_for, seed_of


def entries(order: Order, epoch: int = 0) -> list[tuple[int, int]]:
    return [entry for batch in order.batches(epoch) for entry in batch]


class TestOrder:
    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_processes_share_an_epoch_without_overlap(self, world: int) -> None:
        orders = [Order(24, 4, rank=rank, world=world) for rank in range(world)]
        seen = [image for order in orders for image, _ in entries(order)]
        assert sorted(seen) == list(range(24))

    def test_what_fills_no_batch_everywhere_is_left_out(self) -> None:
        orders = [Order(27, 4, rank=rank, world=2) for rank in range(2)]
        assert [order.steps for order in orders] == [3, 3]
        seen = [image for order in orders for image, _ in entries(order)]
        assert len(seen) == len(set(seen)) == 24

    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_repeats_show_fewer_images_so_often(self, world: int) -> None:
        orders = [Order(48, 4, repeated=3, rank=rank, world=world) for rank in range(world)]
        assert {order.steps for order in orders} == {48 // 4 // world}  # as long as an epoch without repeats
        seen = [entry for order in orders for entry in entries(order)]
        shown = sorted({image for image, _ in seen})
        assert len(shown) == len(seen) // 3
        assert sorted(seen) == [(image, repeat) for image in shown for repeat in range(3)]

    def test_repeats_show_other_images_in_other_epochs(self) -> None:
        order = Order(36, 4, repeated=3)
        assert {image for image, _ in entries(order, 0)} != {image for image, _ in entries(order, 1)}

    def test_repeats_of_an_image_go_to_different_processes_of_one_step(self) -> None:
        steps = zip(*(Order(12, 4, repeated=3, rank=rank, world=3).batches(0) for rank in range(3)), strict=True)
        for step in steps:
            assert [{image for image, _ in batch} for batch in step] == [{image for image, _ in step[0]}] * 3

    def test_is_another_in_another_epoch_and_for_another_seed(self) -> None:
        order = Order(40, 4)
        assert entries(order, 0) == entries(order, 0)
        assert entries(order, 0) != entries(order, 1)
        assert entries(order, 0) != entries(Order(40, 4, seed=1), 0)
        assert entries(order, 0) != [(image, 0) for image in range(40)]

    @pytest.mark.parametrize("start", [0, 1, 9, 10, 11])
    def test_goes_on_from_any_step(self, start: int) -> None:
        order = Order(40, 4, repeated=2, world=2, rank=1)
        assert list(order.batches(5, start)) == list(order.batches(5))[start:]

    def test_refuses_more_than_there_is(self) -> None:
        with pytest.raises(MctfError, match=r"7 images do not fill one batch of 4 in each of 2 processes: lower"):
            Order(7, 4, world=2)

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_refuses_a_process_that_is_none(self, rank: int) -> None:
        with pytest.raises(MctfError, match=rf"process {rank} of 2 cannot be: expected a rank from 0 to 1"):
            Order(8, 4, rank=rank, world=2)


class TestSeeds:
    def test_differ_wherever_their_place_differs(self) -> None:
        places = [("a", 0), ("a", 1), ("a", 0, 0), ("b", 0), ("a", 2**32), ("a", 0, 1), ("a", 1, 0)]
        assert len({seed_of(*place) for place in places}) == len(places)

    def test_are_the_same_in_every_process_for_ever(self) -> None:
        assert seed_of("order", 3, 14) == 1085431531534954196
        assert torch.rand(1, generator=generator_for("order", 3, 14)) == torch.rand(
            1, generator=torch.Generator().manual_seed(1085431531534954196)
        )

    def test_leave_the_generators_of_training_as_they_were(self) -> None:
        def draws() -> list[float]:
            return [random.random(), np.random.rand(), torch.rand(1).item()]

        with drawing_from(7):
            first = draws()
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        with contextlib.suppress(KeyError), drawing_from(7):
            assert draws() == first
            raise KeyError
        expected = draws()
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        assert draws() == expected != first
