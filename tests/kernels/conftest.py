"""Which tests of the kernels run where.

| command                                   | machine      | collected                                                 |
| ----------------------------------------- | ------------ | --------------------------------------------------------- |
| pytest tests/kernels                      | without GPU  | WITHOUT_RUNNING: kernels are compiled and traced, not run |
| TRITON_INTERPRET=1 pytest tests/kernels   | any          | RUNNING: Triton's interpreter runs the kernels on the CPU |
| pytest tests/kernels                      | with a GPU   | all: kernels run on the GPU                               |

The interpreter cannot multiply bfloat16 matrices: that dtype is tested on a GPU only. The compiler rejects code that
the interpreter accepts: so every kernel is compiled for a GPU, which needs no GPU.
"""

import os

import pytest
import torch

from mctf.kernels import attention as attention_ops

WITHOUT_RUNNING = [
    "test_compiled_code.py",
    "test_cpu.py",
    "test_graph_count.py",
    "test_launch.py",
    "test_quantized_linear.py",
]
RUNNING = [
    "test_attention_gradient.py",
    "test_attention_kernel.py",
    "test_clustering_kernel.py",
    "test_fused_model.py",
    "test_matching_kernel.py",
    "test_pooling_kernel.py",
]

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = WITHOUT_RUNNING
elif not torch.cuda.is_available():
    collect_ignore = RUNNING


@pytest.fixture(autouse=True)
def short_kernel_for_few_heads(monkeypatch):
    """Tests have few heads; the short attention kernel otherwise serves many heads only."""
    monkeypatch.setattr(attention_ops, "MIN_SHORT_HEADS", 0)


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
