"""Sizes of the largest token, against a count of where every patch went."""

import pytest
import torch

import mctf
from helpers.models import make
from helpers.subjects import make_task
from mctf.reproduce.analyses import LargestToken, largest


def test_sizes_are_those_of_the_source_map(tmp_path, subject) -> None:
    task, steps = make_task(tmp_path, subject)
    found = LargestToken().run(task)
    assert sum(steps) == LargestToken().steps(task)
    pixels = torch.cat([batch.pixels for batch in subject.batches])
    for case, options in (("with_size", {}), ("without_size", {"tau_size": 0.0})):
        model = mctf.fuse(make("plain"), r=16, **options)
        with torch.no_grad(), mctf.trace(model) as trace:
            model(pixels)
        expected = [torch.bincount(slots).max().item() for slots in trace.source_map()]
        assert found["sizes"][case] == expected
    assert found["sizes"]["with_size"] != found["sizes"]["without_size"]


@pytest.mark.parametrize("r", [0, 4])
def test_with_little_fused_tokens_stay_small(r: int, subject) -> None:
    model = mctf.fuse(make("plain"), r=r)
    with torch.no_grad():
        sizes = largest(model, next(iter(subject.batches)).pixels)
    assert (sizes <= 1 + 3 * r).all()
    assert (sizes == 1).all() == (r == 0)
