"""Tokens that stay, packed to the front, in batches of images that keep different numbers of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mctf.core.selection import fill_padding, pack_ragged

STAYS = torch.tensor(
    [
        [True, True, False, True, False, True],
        [True, False, False, False, False, True],
        [True, False, False, False, False, False],
    ]
)


def test_what_stays_moves_up_in_its_order() -> None:
    packing = pack_ragged(STAYS, protected=1)
    assert packing is not None
    x = torch.arange(1, 19).view(3, 6)
    assert packing.gather(x).tolist() == [[1, 2, 4, 6], [7, 12, 0, 0], [13, 0, 0, 0]]
    assert packing.sizes is not None
    assert packing.sizes.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert packing.weights.tolist() == STAYS.float().tolist()


def test_what_goes_has_a_place_all_the_same() -> None:
    packing = pack_ragged(STAYS, protected=1)
    assert packing is not None
    assert packing.assignment.count == 4
    assert packing.assignment.slots.tolist() == [
        [0, 1, 1, 2, 2, 3],
        [0, 1, 1, 1, 1, 1],  # before the first patch that stays: with it, not with the class token
        [0, 0, 0, 0, 0, 0],  # no patch stays
    ]


def test_where_all_stay_there_is_nothing_to_do() -> None:
    assert pack_ragged(torch.ones(2, 5).bool(), protected=1) is None


def test_images_that_keep_as_many_are_not_padded() -> None:
    packing = pack_ragged(torch.tensor([[True, False, True], [True, True, False]]), protected=1)
    assert packing is not None
    assert packing.sizes is None
    assert packing.gather(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[1, 3], [4, 5]]


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(0, 3))
def test_the_assignment_and_the_packing_agree(rows: list[list[bool]], protected: int) -> None:
    stays = torch.tensor(rows)
    stays[:, : max(1, protected)] = True
    packing = pack_ragged(stays, protected=protected)
    if packing is None:
        assert stays.all()
        return
    x = torch.randn(len(rows), 7, 3)
    slots, packed = packing.assignment.slots, packing.gather(x)
    assert torch.equal(packing.assignment.unpool(packed)[stays], x[stays])
    sums = packing.assignment.total(packing.weights)
    sizes = torch.ones_like(sums) if packing.sizes is None else packing.sizes
    assert torch.equal(sums, sizes)  # each place has one token that counts, and padding none
    assert (slots[:, :protected] == torch.arange(protected)).all()
    assert (slots[stays.sum(dim=1) > protected, protected:] >= protected).all()
    torch.testing.assert_close(packing.assignment.pool(x, packing.weights)[sizes > 0], packed[sizes > 0])


def test_a_gradient_flows_through_what_stays_alone() -> None:
    x = torch.ones(3, 6, 2, requires_grad=True)
    packing = pack_ragged(STAYS, protected=1)
    assert packing is not None
    packing.gather(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[..., 0], STAYS.float())


def test_picking_from_spread_tokens_minds_no_padding() -> None:
    packing = pack_ragged(STAYS, protected=1)
    assert packing is not None
    packed = packing.gather(torch.randn(3, 6, 2))
    picked = packing.assignment.first_of_slot(packing.assignment.unpool(packed))
    assert packing.present is not None
    assert torch.equal(picked[packing.present], packed[packing.present])
    assert picked.shape == packed.shape


@pytest.mark.parametrize("sizes", [None, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])])
def test_padding_is_filled_with_the_last_token(sizes: Tensor | None) -> None:
    x = torch.arange(9).view(3, 3, 1)
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8]] if sizes is None else [[0, 1, 2], [3, 4, 4], [6, 6, 6]]
    assert fill_padding(x, sizes)[..., 0].tolist() == expected
