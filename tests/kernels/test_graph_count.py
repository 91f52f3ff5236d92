"""A handful of graphs serves all r' where the blocks are compiled with Triton kernels in them.

A kernel chosen by the number of tokens would give one graph per number. Tracing shows it, without a GPU.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

import mctf
from helpers.models import make, make_images
from helpers.train_tracing import Graphs, pretend_gpu
from mctf import kernels
from mctf.core.matching import Criteria
from mctf.kernels import attention as attention_ops
from mctf.kernels import launch
from mctf.kernels import matching as matching_ops
from mctf.train.compile import compile_blocks
from mctf.train.two_branch import run_branches

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: there are no kernels to trace"),
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter's kernels cannot be traced"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),  # how a kernel rounds: none is run
]

HANDFUL = 8
REDUCTIONS = [0, 8, 8, 8]  # r differs between blocks, so the compiler takes it for a variable early
LIGHTER = (5, 8, 0, 3, 1, 2, 7)
ATTENTION = {"long_attention_kernel", "query_gradient_kernel", "key_value_gradient_kernel"}
KERNELS = {
    "mctf": ATTENTION | {"matching_kernel", "pooling_kernel", "segment_sum_kernel"},
    "mctf_exact": ATTENTION | {"matching_kernel", "pooling_kernel"},
    "tome": ATTENTION | {"pooling_kernel"},
    "evit": ATTENTION | {"pooling_kernel"},
}


@pytest.fixture(autouse=True)
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend_gpu(monkeypatch)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(method: str, steps: tuple[int, ...]) -> tuple[Graphs, list[int]]:
    """A model trained with each r' in turn: its graphs, and how many there were after each step."""
    model = mctf.fuse(make("plain").train(), method, r=REDUCTIONS)
    images, graphs, seen = make_images(model, 2), Graphs(), []
    compile_blocks(model, backend=graphs.backend)
    for lighter in steps:
        with torch.autocast("cpu", torch.bfloat16):
            heavy, light = run_branches(model, images, lighter)
        (heavy.logits + light.logits).sum().backward()
        seen.append(graphs.forward)
    return graphs, seen


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mctf", pytest.param("tome", marks=pytest.mark.nightly)])
def test_a_handful_of_graphs_serves_all_r(method: str) -> None:
    graphs, seen = train(method, LIGHTER)
    assert 1 < graphs.forward == graphs.backward <= HANDFUL
    assert len(set(seen[3:])) == 1  # the later r compile nothing
    assert graphs.kernels >= KERNELS[method]


def match(x: Tensor) -> Tensor:
    return kernels.match(x, x[:, None, :, 0], None, Criteria(), r=4, protected=1, bidirectional=True)[0].slots


def attend(x: Tensor) -> Tensor:
    q = x.bfloat16()[:, None]  # in float32 the number of tokens chooses nothing
    return kernels.attend_with_received(q, q, q, sizes=None, scale=1.0, rows="mean")[0]


def graphs_for_five_lengths(operation: Callable[[Tensor], Tensor]) -> int:
    graphs = Graphs()
    run = torch.compile(operation, backend=graphs.backend)
    for tokens in (82, 74, 66, 58, 50):
        run(torch.randn(2, tokens, 16))
    return graphs.forward


@pytest.mark.parametrize("operation", [attend, match])
def test_an_operator_is_compiled_for_the_first_length_and_for_all_others(
    operation: Callable[[Tensor], Tensor],
) -> None:
    assert graphs_for_five_lengths(operation) == 2


def never(_: int) -> bool:
    """In place of `is_symbolic`: operators then choose by the number of tokens."""
    return False


@pytest.mark.parametrize(("operation", "operator"), [(attend, attention_ops), (match, matching_ops)])
def test_an_operator_that_chooses_by_length_is_compiled_for_each(
    operation: Callable[[Tensor], Tensor], operator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "is_symbolic", never)
    assert graphs_for_five_lengths(operation) == 5
