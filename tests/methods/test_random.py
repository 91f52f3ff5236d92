"""Random dropping: the tokens that go follow from the seed alone, and the others go on as if they had been alone."""

import pytest
import torch

import mctf
from mctf import MctfError
from methods.naive import NaiveBlock, NaiveTurn, assert_as_naive, plain_block
from models import make, make_images, run
from reference import Groups, Tokens, allowed
from reference_blocks import Pieces

FACTOR = 6364136223846793005
SCHEDULE = [5, 16, 0, 60]


def wrapped(value: int) -> int:
    """As a 64-bit register holds it."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def hashed(place: int, seed: int, block: int) -> int:
    value = place + (((seed << 8) + block) << 20)
    for shift in (29, 32):
        value = wrapped(value * FACTOR)
        value ^= value >> shift
    return wrapped(value * FACTOR)


def naive_random(seed: int) -> NaiveBlock:
    def block(pieces: Pieces, tokens: Tokens, turn: NaiveTurn) -> tuple[Tokens, Groups]:
        first, count = turn.protected, len(tokens.x)
        r = allowed(int(turn.entry), count, first, floor=10)
        if r == 0:
            return plain_block(pieces, tokens)
        order = sorted(range(count - first), key=lambda place: hashed(place, seed, turn.index))
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


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
@pytest.mark.parametrize("name", ["plain", "registers", "mean_pool", "eva02", "beit_both", "cait"])
@torch.no_grad()
def test_every_kind_of_model_is_as_described(name: str, seed: int) -> None:
    model = make(name).double()
    images = make_images(model, 2)
    assert_as_naive(model, images, naive_random(seed), method="random", schedule=SCHEDULE, with_sizes=False, seed=seed)


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
