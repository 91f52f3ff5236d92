"""Sequences in a batch: every token is in one group, and joining undoes splitting."""

import pytest
import torch
from torch import Tensor

from mctf.core.sequences import Sequences, block_lengths, packed_sequences, padded_sequences


def check(sequences: Sequences, x: Tensor) -> None:
    parts = sequences.split(x)
    assert torch.equal(sequences.join(parts, like=x), x)
    places = [place for group in sequences.groups for place in (group.tokens, group.padding) if place is not None]
    assert torch.cat([each.flatten() for each in places]).sort().values.tolist() == list(range(x[..., 0].numel()))


@pytest.mark.parametrize("seed", range(3))
def test_padding_is_apart_and_tokens_keep_their_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    real = torch.rand(6, 9, generator=generator) < 0.6
    real[:, 4] = True
    real[3:5] = real[0]
    x = torch.arange(54.0).view(6, 9, 1)
    sequences = padded_sequences(real)
    check(sequences, x)
    assert len(sequences.groups) == len(set(real.sum(dim=1).tolist()))
    for group, (tokens, padding) in zip(sequences.groups, sequences.split(x), strict=True):
        for row, own, rest in zip(group.rows, tokens, padding if padding is not None else tokens[:, :0], strict=True):
            assert own.flatten().tolist() == x[row][real[row]].flatten().tolist()
            assert rest.flatten().tolist() == x[row][~real[row]].flatten().tolist()


def test_without_padding_all_rows_are_one_group() -> None:
    (group,) = padded_sequences(torch.ones(3, 5, dtype=torch.bool)).groups
    assert group.padding is None
    assert group.tokens.tolist() == torch.arange(15).view(3, 5).tolist()


def test_packed_sequences_are_grouped_by_length() -> None:
    sequences = packed_sequences([2, 3, 2], torch.device("cpu"))
    check(sequences, torch.randn(7, 4))
    assert [group.tokens.tolist() for group in sequences.groups] == [[[0, 1], [5, 6]], [[2, 3, 4]]]


def test_lengths_are_read_off_a_mask_of_blocks() -> None:
    number = torch.tensor([0, 0, 1, 2, 2, 2])
    blocks = number[:, None] == number
    assert block_lengths(blocks) == [2, 1, 3]
    assert block_lengths(torch.ones(4, 4, dtype=torch.bool)) == [4]
    assert block_lengths(torch.ones(4, 4, dtype=torch.bool).tril()) is None
    blocks[0, 5] = True
    assert block_lengths(blocks) is None
