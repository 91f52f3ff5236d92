"""Random numbers that follow from where training stands, and from nothing that ran before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_BITS = 63  # what a torch generator takes without a sign
_NUMPY_BITS = 32


def seed_of(*parts: int | str) -> int:
    """One seed for a list of numbers and words. Lists that differ anywhere have unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**_BITS


def generator_for(*parts: int | str) -> torch.Generator:
    """A generator on the CPU for this place, so that every device is given the same numbers."""
    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seeds the global generators of Python, numpy and torch (CPU), and puts their old states back at the end.

    timm's and torchvision's transforms draw from all three. CUDA's generators are left alone: seeding them by
    `torch.manual_seed` would disturb drop-path and dropout on the GPU.
    """
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**_NUMPY_BITS)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
