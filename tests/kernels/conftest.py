"""Kernels are tested for real on a GPU, and on a CPU by Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels.

The interpreter cannot multiply bfloat16 matrices, so that dtype is left to the GPU.
"""

import os

import pytest
import torch

from mctf.kernels import attention_op

if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    collect_ignore_glob = ["test_*.py"]

FLOATS = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.fixture(autouse=True)
def many_heads(monkeypatch):
    """Tests have few heads and would never see the kernel for many."""
    monkeypatch.setattr(attention_op, "_FEW_HEADS", 0)


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def distance(found, expected):
    """Relative distance of two tensors, judged in float64; NaN counts as infinitely far."""
    found, expected = found.double(), expected.double()
    far = ((found - expected).norm() / expected.norm()).item()
    return far if far == far else float("inf")


def poisoned(outputs):
    """The same outputs function, whose tensors come full of NaN (or nonsense) instead of unwritten."""

    def make(*args):
        made = outputs(*args)
        for tensor in made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 30))
        return made

    return make
