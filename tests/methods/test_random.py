"""Random dropping: the tokens that go follow from the seed alone, and the others go on as if they had been alone."""

import pytest
import torch

import mctf
from helpers.models import ONE_PER_OPS, make, make_images, run
from helpers.naive import NaiveBlock, NaiveContext, assert_as_naive, plain_block
from helpers.reference import Groups, Tokens
from helpers.reference_blocks import Pieces
from mctf import MctfError

PRIME = 67_108_859
SCHEDULE = [5, 16, 0, 60]


def hashed(place: int, seed: int, block: int) -> int:
    """The number that places are sorted by."""
    key = (seed * 1_000_003 + block) * 10_007 % PRIME
    once = (place + key) ** 3 + key
    return (once**3 + key) % PRIME


def naive_random(seed: int) -> NaiveBlock:
    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        first, count = ctx.protected, len(tokens.x)
        r = max(0, min(int(ctx.amount), count - 10))  # dropping is not capped at half
        if r == 0:
            return plain_block(pieces, tokens)
        order = sorted(range(count - first), key=lambda place: hashed(place, seed, ctx.index))
        gone = {first + place for place in order[:r]}
        kept = [i for i in range(count) if i not in gone]
        groups = [[i] for i in kept]
        for i in sorted(gone):
            before = [slot for slot, (member, *_) in enumerate(groups) if member < i and slot >= first]
            groups[before[-1] if before else first].append(i)
        weights = [0.0 if i in gone else 1.0 for i in range(count)]
        fused, _ = plain_block(pieces, tokens.fused(groups, weights, tokens.x[kept]))
        return fused, groups

    return block


def assert_as_described(name: str, seed: int, *, described: int) -> None:
    model = make(name).double()
    block, images = naive_random(described), make_images(model, 2)
    assert_as_naive(model, images, block, method="random", schedule=SCHEDULE, with_sizes=False, seed=seed)


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described(name: str) -> None:
    assert_as_described(name, 0, described=0)


@pytest.mark.parametrize("seed", [1, 2**32 - 1])
@torch.no_grad()
def test_every_seed_is_as_described(seed: int) -> None:
    assert_as_described("registers", seed, described=seed)
    with pytest.raises(AssertionError):
        assert_as_described("registers", seed, described=2)


@torch.no_grad()
def dropped(seed: int, *, batch: int = 1, images_seed: int = 0) -> list[list[int]]:
    """The slots of every token after each block."""
    model = make("plain")
    mctf.fuse(model, "random", r=SCHEDULE, seed=seed)
    with mctf.trace(model) as trace:
        run(model, make_images(model, batch, seed=images_seed))
    slots = [block.assignment.slots for block in trace.blocks]
    assert all((each == each[:1]).all() for each in slots)
    return [each[0].tolist() for each in slots]


def test_the_seed_alone_decides() -> None:
    assert dropped(3) == dropped(3, batch=4, images_seed=7)
    assert dropped(3) != dropped(4)


def test_every_place_goes_about_equally_often() -> None:
    """20 of 64 places by 400 seeds: 125 times each, with a standard deviation of about 9."""
    times = torch.zeros(64)
    for seed in range(400):
        order = sorted(range(64), key=lambda place: hashed(place, seed, 1))
        times[order[:20]] += 1
    assert 125 - 45 < times.min() <= times.max() < 125 + 45
    assert 6 < times.std() < 13


def test_blocks_do_not_drop_the_same_places() -> None:
    orders = [sorted(range(64), key=lambda place: hashed(place, 0, block)) for block in range(12)]
    shared = [len(set(a[:16]) & set(b[:16])) for a in orders for b in orders if a is not b]
    assert max(shared) < 12
    assert sum(shared) / len(shared) == pytest.approx(16 * 16 / 64, abs=1)


def test_the_plan_is_that_of_free_dropping() -> None:
    random, free = (mctf.plan("deit_tiny_patch16_224", method=name) for name in ("random", "free_drop"))
    assert random.token_counts == free.token_counts
    assert (random.gflops, random.gflops_run) == (free.gflops, free.gflops_run)


def test_a_seed_that_is_none_is_refused() -> None:
    for seed in (-1, 0.5, True, 2**32, "a"):
        with pytest.raises(MctfError, match="must be a whole number from 0"):
            mctf.fuse(make("plain"), "random", seed=seed)
