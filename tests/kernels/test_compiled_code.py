"""Every kernel is compiled for a GPU, without having one: the compiler rejects code that the interpreter accepts."""

import importlib
from importlib.util import find_spec

import pytest
import torch

from mctf import kernels
from mctf.core.assignment import Assignment
from mctf.core.matching import Criteria
from mctf.kernels import attention as attention_ops
from mctf.kernels import clustering as clustering_ops
from mctf.kernels import launch
from mctf.kernels import matching as matching_ops
from mctf.kernels import pooling as pooling_ops

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or launch.INTERPRETED or not launch.enabled,
    reason="needs kernels, and Triton's compiler, not its interpreter",
)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.float16: "*fp16",
}


class CompiledOnly:
    """Stands for a kernel: a launch compiles it as torch.compile would, which passes floats as float64."""

    def __init__(self, kernel, names):
        self.kernel, self.names = kernel, names

    def __getitem__(self, grid):
        def compile_kernel(*args, **options):
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource, compile

            self.names.append(self.kernel.__name__)
            settings = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
            names = self.kernel.arg_names
            values = dict(zip(names, args, strict=False)) | options
            constants = {(names.index(name),): value for name, value in options.items()}
            types = {name: "constexpr" if name in options else _type(values[name]) for name in names}
            source = ASTSource(fn=self.kernel, signature=types, constexprs=constants)
            assert compile(source, target=GPUTarget("cuda", 90, 32), options=settings).asm["ptx"]

        return compile_kernel


def _type(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp64" if isinstance(value, float) else "i32"


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that were compiled."""
    names = []
    monkeypatch.setattr(launch, "INTERPRETED", True)  # kernels serve tensors on the CPU
    for module in (attention_ops, clustering_ops, matching_ops, pooling_ops):
        monkeypatch.setattr(module, "launchable", lambda kernel: CompiledOnly(kernel, names))
    return names


def heads(tokens, dtype, **options):
    return [torch.zeros(1, 2, tokens, 32, dtype=dtype, **options) for _ in range(3)]


def attention(tokens, *, proportional=True, train=False):
    def run(dtype):
        q, k, v = heads(tokens, dtype, requires_grad=train)
        sizes = torch.ones(1, tokens) if proportional else None
        kernels.attend_with_received(q, k, v, sizes=sizes, scale=0.2, rows="both")

    return run


def received(tokens):
    def run(dtype):
        q, k, _ = heads(tokens, dtype)
        kernels.attention_received(q, k, sizes=torch.ones(1, tokens), scale=0.2, rows="mean")

    return run


def unpooled(tokens):
    def run(dtype):
        q, k, v = heads(tokens, dtype)
        assignment = Assignment(torch.arange(tokens)[None] // 2, tokens // 2)
        kernels.attend(q, k, v[:, :, : tokens // 2], sizes=torch.ones(1, tokens), scale=0.2, unpool=assignment)

    return run


def attention_backward(*, unpool):
    def run(dtype):
        q, k, v = heads(40, dtype)
        sizes = torch.ones(1, 40) if unpool else None
        assignment = Assignment(torch.arange(40)[None] // 2, 20)
        out, lse = torch.zeros(1, 40, 64, dtype=dtype), torch.zeros(1, 2, 40)
        slots = assignment.slots if unpool else None
        *_, v_grad = attention_ops.attention_backward(q, k, v, sizes, slots, out, lse, out, 0.2)
        if unpool:
            pooling_ops.segment_sum(v_grad, *assignment.members())

    return run


def matching(batch, tokens, *, bidirectional):
    def run(dtype):
        x, received = torch.zeros(batch, tokens, 32, dtype=dtype), torch.zeros(batch, 2, tokens)
        sizes, criteria = (torch.ones(batch, tokens), Criteria()) if bidirectional else (None, Criteria(tau_sim=2.0))
        kernels.match(x, received, sizes, criteria, r=8, protected=1, bidirectional=bidirectional)

    return run


def clustering(tokens, r=8):
    def run(dtype):
        x, received = torch.zeros(2, tokens, 32, dtype=dtype), torch.zeros(2, 2, tokens)
        kernels.cluster(x, received, torch.ones(2, tokens), r=r, protected=1, rounds=2, candidates=1.5)

    return run


def pooling(*, train, also=False, **options):
    def run(dtype):
        x = torch.zeros(2, 40, 48, dtype=dtype, requires_grad=train)
        assignment = Assignment(torch.arange(40).expand(2, -1) // 2, 20)
        kernels.merge(x, assignment, also=x if also else None, **options)

    return run


ONES = torch.ones(2, 40)
LONG = ["long_attention_kernel", "long_received_kernel"]
BACKWARD = ["query_gradient_kernel", "key_value_gradient_kernel"]
MANY = ["scores_kernel", "alpha_merges_kernel", "beta_partners_kernel", "slots_kernel", "members_kernel"]
SEARCHES = [
    *("first_search_kernel", "select_kernel", "search_kernel", "centers_kernel"),
    *("search_kernel", "select_kernel", "search_kernel", "cluster_slots_kernel", "members_kernel"),
]
CLUSTERING = ["distances_kernel", "rounds_kernel"]

# the kernels of mctf, each once
EACH_KERNEL = {
    "attention, two key tiles": (attention(150, train=True), ["attention_kernel"]),
    "attention of long sequences": (attention(300), LONG),
    "gradients": (attention_backward(unpool=True), [*BACKWARD, "segment_sum_kernel"]),
    "matching": (matching(2, 40, bidirectional=True), ["matching_kernel"]),
    "matching of many tokens": (matching(2, 300, bidirectional=True), MANY),
    "clustering": (clustering(40), CLUSTERING),
    "clustering of many tokens": (clustering(300), SEARCHES),
    "pooling": (pooling(train=True, weights=ONES, sizes=ONES, by_size=True, also=True), ["pooling_kernel"]),
}
# other flags and tiles
VARIANTS = {
    "attention, one key tile": (attention(40), ["attention_kernel"]),
    "attention, two key tiles, no sizes": (attention(150, proportional=False), ["attention_kernel"]),
    "attention of long sequences, no sizes": (attention(300, proportional=False, train=True), LONG),
    "attention received alone": (received(150), ["attention_kernel"]),
    "attention received alone, long sequences": (received(300), LONG),
    "unpooled values": (unpooled(150), ["attention_kernel"]),
    "unpooled values, long sequences": (unpooled(300), LONG[:1]),
    "gradients, no sizes": (attention_backward(unpool=False), BACKWARD),
    "one-way matching": (matching(2, 40, bidirectional=False), ["matching_kernel"]),
    "one-way matching of many tokens": (matching(2, 300, bidirectional=False), [n for n in MANY if "beta" not in n]),
    "matching of a single image": (matching(1, 300, bidirectional=True), MANY),
    "clustering, many candidates": (clustering(257, r=80), CLUSTERING),
    "pooling with the norm": (pooling(train=False, weights=ONES, keep_norm=True), ["pooling_kernel"]),
    "pooling without weights": (pooling(train=False, sizes=ONES, by_size=True), ["pooling_kernel"]),
    "pooling without sizes": (pooling(train=False, weights=ONES, also=True), ["pooling_kernel"]),
}


@pytest.mark.parametrize("case", EACH_KERNEL)
def test_each_kernel(case, compiled):
    run, expected = EACH_KERNEL[case]
    run(torch.bfloat16)
    assert compiled == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", VARIANTS)
def test_variants(case, compiled):
    run, expected = VARIANTS[case]
    run(torch.bfloat16)
    assert compiled == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in EACH_KERNEL if "two key tiles" not in case])
def test_float32(case, compiled):
    """The short attention kernel is not used in float32."""
    run, expected = EACH_KERNEL[case]
    run(torch.float32)
    assert compiled == expected


@pytest.mark.slow
def test_pooling_of_many_slots(compiled, monkeypatch):
    monkeypatch.setattr(pooling_ops, "FEW_SLOTS", 0)
    run, expected = EACH_KERNEL["pooling"]
    run(torch.bfloat16)
    assert compiled == expected


def test_no_kernel_is_forgotten():
    files = ("attention", "clustering", "clustering_large", "matching", "matching_large", "pooling")
    modules = (f"mctf.kernels.triton.{name}" for name in files)
    defined = {name for module in modules for name in vars(importlib.import_module(module)) if name.endswith("_kernel")}
    assert defined == {name for _, names in EACH_KERNEL.values() for name in names}
