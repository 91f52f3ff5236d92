"""Kernels are tested for real on a GPU, and on a CPU by Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels.

The interpreter cannot multiply bfloat16 matrices, so that dtype is left to the GPU.
"""

import os

import pytest
import torch

from mctf.kernels import attention as attention_ops

if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    collect_ignore = [
        f"test_{name}.py"
        for name in ("attention_gradient", "attention_kernel", "fused_model", "matching_kernel", "pooling_kernel")
    ]
if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = ["test_compiled_code.py", "test_launch.py"]


@pytest.fixture(autouse=True)
def many_heads(monkeypatch):
    """Tests have few heads and would never see the kernel for many."""
    monkeypatch.setattr(attention_ops, "_FEW_HEADS", 0)


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
