"""Every kernel is compiled for a GPU, without having one: Triton's interpreter takes code that its compiler refuses."""

from importlib.util import find_spec

import pytest
import torch

from mctf import kernels
from mctf.core.assignment import Assignment
from mctf.core.matching import Criteria
from mctf.kernels import attention as attention_ops
from mctf.kernels import launch
from mctf.kernels import matching as matching_ops
from mctf.kernels import pooling as pooling_ops

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or launch.INTERPRETED or not launch.wanted,
    reason="needs kernels, and Triton's compiler, not its interpreter",
)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}


class Compiling:
    """Stands for a kernel: a launch compiles it as torch.compile would, which hands floats over as float64."""

    def __init__(self, kernel, names):
        self.kernel, self.names = kernel, names

    def __getitem__(self, grid):
        def compile_it(*args, **options):
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource, compile

            self.names.append(self.kernel.__name__)
            settings = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
            names = self.kernel.arg_names
            given = dict(zip(names, args, strict=False)) | options
            constants = {(names.index(name),): value for name, value in options.items()}
            types = {name: "constexpr" if name in options else _type(given[name]) for name in names}
            source = ASTSource(fn=self.kernel, signature=types, constexprs=constants)
            assert compile(source, target=GPUTarget("cuda", 90, 32), options=settings).asm["ptx"]

        return compile_it


def _type(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp64" if isinstance(value, float) else "i32"


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that were compiled."""
    names = []
    monkeypatch.setattr(launch, "INTERPRETED", True)  # so that kernels serve tensors on the CPU
    monkeypatch.setattr(attention_ops, "_FEW_HEADS", 0)
    for module in (attention_ops, matching_ops, pooling_ops):
        monkeypatch.setattr(module, "launchable", lambda kernel: Compiling(kernel, names))
    return names


def heads(tokens, dtype=torch.bfloat16, **options):
    return [torch.zeros(1, 2, tokens, 32, dtype=dtype, **options) for _ in range(3)]


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("tokens", [40, 150, 300])
def test_attention(tokens, proportional, compiled):
    q, k, v = heads(tokens)
    sizes = torch.ones(1, tokens) if proportional else None
    kernels.attend_with_received(q, k, v, sizes=sizes, scale=0.2, rows="both")
    long = ["long_attention_kernel", "long_received_kernel"]
    assert compiled == (long if tokens > 256 else ["attention_kernel"])


@pytest.mark.parametrize("tokens", [40, 150, 300])
def test_a_look_alone(tokens, compiled):
    q, k, _ = heads(tokens)
    kernels.attention_received(q, k, sizes=torch.ones(1, tokens), scale=0.2, rows="mean")
    assert len(compiled) == 1 + (tokens > 256)


@pytest.mark.parametrize("tokens", [40, 150, 300])
def test_attention_with_spread_values_and_gradients(tokens, compiled):
    q, k, v = heads(tokens, requires_grad=True)
    spread = Assignment(torch.arange(tokens)[None] // 2, tokens // 2)
    context = kernels.attend(q, k, v[:, :, : tokens // 2], sizes=torch.ones(1, tokens), scale=0.2, unpool=spread)
    context.sum().backward()
    assert {name for name in compiled if "backward" in name or "gradient" in name}
    assert "sum_kernel" in compiled


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 40), (2, 300), (1, 300)])
def test_matching(batch, tokens, dtype, proportional, compiled):
    x, received = torch.zeros(batch, tokens, 32, dtype=dtype), torch.zeros(batch, 2, tokens)
    sizes, taus = (torch.ones(batch, tokens), Criteria()) if proportional else (None, Criteria(tau_sim=2.0))
    kernels.match(x, received, sizes, taus, r=8, protected=1, bidirectional=proportional)
    many = ["scores_kernel", "leaving_kernel", "back_kernel", "slots_kernel", "members_kernel"]
    if not proportional:
        many.remove("back_kernel")
    assert compiled == (many if tokens > 256 else ["matching_kernel"])


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("few_slots", [0, 2000])
def test_pooling(few_slots, weighted, sized, by_size, compiled, monkeypatch):
    monkeypatch.setattr(pooling_ops, "_FEW_SLOTS", few_slots)
    x, ones = torch.zeros(2, 40, 48, dtype=torch.bfloat16), torch.ones(2, 40)
    assignment = Assignment(torch.arange(40).expand(2, -1) // 2, 20)
    given = (ones if weighted else None, ones if sized else None, assignment)
    kernels.fuse_both(x, x, *given, by_size=by_size)
    pooled, _ = kernels.fuse_tokens(x.requires_grad_(), *given, by_size=by_size)
    pooled.sum().backward()
    assert compiled == ["pooling_kernel", "pooling_kernel"]
