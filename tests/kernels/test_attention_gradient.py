"""Gradients of attention by Triton: as close to float64 as PyTorch's own in the same dtype."""

import os

import pytest
import timm
import torch
from torch.library import opcheck

import mctf
from helpers.kernels import FLOATS, FLOOR, distance, inputs, poisoned
from mctf import MctfError, kernels
from mctf.core import attention
from mctf.core.assignment import Assignment
from mctf.kernels import attention as attention_ops
from mctf.kernels import clustering as clustering_ops
from mctf.kernels import disable_kernels
from mctf.kernels import pooling as pooling_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [(1, 1, 197, 64), (2, 2, 31, 32), (1, 2, 100, 24), (1, 1, 150, 80), (1, 1, 300, 16)]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    for name in ("_allocate_outputs", "_allocate_gradients"):
        monkeypatch.setattr(attention_ops, name, poisoned(getattr(attention_ops, name)))


def fusion(batch, tokens, device):
    """An assignment of all tokens to three quarters as many slots."""
    generator = torch.Generator().manual_seed(1)
    count = -(-3 * tokens // 4)
    slots = torch.stack([torch.randperm(tokens, generator=generator) % count for _ in range(batch)])
    return Assignment(slots.to(device), count)


def gradients(attend, tensors, out_grad, **options):
    """Gradients of q, k and v, given that of the context."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    context = attend(*tensors, **options)
    return torch.autograd.grad(context, tensors, out_grad.to(context.dtype))


def assert_as_near_as_pytorch(tensors, out_grad, *, floor=None, **options):
    """Each gradient errs at most twice as much as PyTorch's own in the same dtype, and a floor."""
    exact = gradients(attention.attend, [tensor.double() for tensor in tensors], out_grad, **options)
    own = gradients(attention.attend, tensors, out_grad, **options)
    actual = gradients(kernels.attend, tensors, out_grad, **options)
    for name, ours, theirs, true in zip("qkv", actual, own, exact, strict=True):
        allowed = 2 * distance(theirs, true) + (floor or FLOOR[ours.dtype])
        assert distance(ours, true) <= allowed, f"gradient of {name}"


MODES = ["sizes", "unpool", "sizes and unpool"]
# every shape in every dtype, every mode in every dtype
PAIRS = [(shape, MODES[(i + j) % 3], dtype) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(FLOATS)]
PAIRS += [(SHAPES[1], "sizes", torch.float16), (SHAPES[4], "sizes", torch.float32)]


@pytest.mark.parametrize(("shape", "mode", "dtype"), PAIRS, ids=str)
def test_gradients(shape, mode, dtype, device):
    batch, _, tokens, channels = shape
    q, k, v, sizes = inputs(*shape, dtype=dtype, device=device)
    assignment = fusion(batch, tokens, device) if "unpool" in mode else None
    out_grad = torch.randn_like(q).transpose(1, 2).flatten(2)
    assert_as_near_as_pytorch(
        (q, k, v if assignment is None else v[:, :, : assignment.count]),
        out_grad,
        sizes=sizes if "sizes" in mode else None,
        unpool=assignment,
        scale=channels**-0.5,
    )


def test_a_wrong_gradient_is_noticed(monkeypatch, device):
    q, k, v, sizes = inputs(1, 1, 31, 16, dtype=torch.float32, device=device)
    honest = attention_ops.attention_backward
    monkeypatch.setattr(attention_ops, "attention_backward", lambda *args: [1.0001 * grad for grad in honest(*args)])
    with pytest.raises(AssertionError, match="gradient of q"):
        assert_as_near_as_pytorch((q, k, v), torch.randn(1, 31, 16, device=device), sizes=sizes, scale=0.25)


@pytest.mark.parametrize("tokens", [100, 257])
def test_attention_received_and_gradients_come_from_one_launch(tokens, device):
    q, k, v, sizes = inputs(1, 1, tokens, 16, dtype=torch.float32, device=device)
    options = {"sizes": sizes, "scale": 0.25}
    expected = kernels.attend_with_received(q, k, v, rows="both", **options)
    out_grad = torch.randn_like(expected[0])
    expected_gradients = gradients(attention.attend, (q, k, v), out_grad, **options)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    context, received = kernels.attend_with_received(*leaves, rows="both", **options)
    assert torch.equal(context, expected[0])
    assert torch.equal(received, expected[1])
    assert not received.requires_grad
    for actual, true in zip(torch.autograd.grad(context, leaves, out_grad), expected_gradients, strict=True):
        assert distance(actual, true) < 1e-5


def test_gradients_of_a_single_token(device):
    q, k, v, _ = inputs(1, 2, 1, 16, dtype=torch.float32, device=device)
    out_grad = torch.randn(1, 1, 32, device=device)
    to_q, to_k, to_v = gradients(kernels.attend, (q, k, v), out_grad, sizes=torch.ones(1, 1, device=device), scale=1.0)
    # 0 but for rounding: float32 by three products of 11 bits each keeps about 21 bits of sums as large as 4
    assert max(to_q.abs().max(), to_k.abs().max()) < 4 * 2**-20
    # its weight is exp2 of a logit less the same logit, rounded otherwise
    assert torch.allclose(to_v.transpose(1, 2).flatten(2), out_grad, rtol=2**-17, atol=0)


def test_logits_far_below_zero(device):
    """Gradients nearly cancel here, so that single draws differ: medians over draws are compared."""
    errors = {"ours": [], "theirs": []}
    for seed in range(9):
        q, k, v, sizes = inputs(1, 1, 20, 16, dtype=torch.float32, device=device, seed=seed)
        tensors = (q / 10 - 30, k / 10 + 30, v)  # logits of about -14,400
        out_grad = torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(seed)).to(device)
        options = {"sizes": sizes, "scale": 1.0}
        exact = gradients(attention.attend, [tensor.double() for tensor in tensors], out_grad, **options)
        for name, attend in (("ours", kernels.attend), ("theirs", attention.attend)):
            pairs = zip(gradients(attend, tensors, out_grad, **options), exact, strict=True)
            errors[name].append([distance(*pair) for pair in pairs])
    ours, theirs = (torch.tensor(errors[name]).median(dim=0).values for name in errors)
    # rounding a logit of 14,400 to float32 changes its exponential by that times 2 ** -24
    assert (ours <= 2 * theirs + 14_400 * 2**-24).all()


@pytest.mark.parametrize(
    ("tokens", "dead", "gap", "dtype"),
    [
        (40, "first key", 18.0, torch.float16),
        (40, "first key", 200.0, torch.float32),
        (40, "middle key", 18.0, torch.float16),
        (40, "first tile", 200.0, torch.float32),
        (300, "first key", 200.0, torch.float32),
        (300, "first tile", 18.0, torch.float16),
    ],
)
def test_keys_of_size_0_have_no_gradient_however_large_their_logits(tokens, dead, gap, dtype, device):
    dead = {"first key": [0], "middle key": [7], "first tile": list(range(min(130, tokens - 5)))}[dead]
    q, k, v, sizes = inputs(1, 1, tokens, 16, dtype=dtype, device=device)
    q, k = q / 10, k / 10
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, dead, 0] = gap
    sizes[:, dead] = 0
    out_grad = torch.randn(1, tokens, 16, device=device)
    assert_as_near_as_pytorch((q, k, v), out_grad, sizes=sizes, scale=1.0)
    _, *to_keys_and_values = gradients(kernels.attend, (q, k, v), out_grad, sizes=sizes, scale=1.0)
    assert not any(grad[:, :, dead].any() for grad in to_keys_and_values)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_gradients_of_the_context_in_any_layout(layout, device):
    q, k, v, sizes = inputs(2, 2, 40, 16, dtype=torch.float32, device=device)
    out_grad = torch.randn(2, 32, 40, device=device).transpose(1, 2)
    if layout == "expanded":
        out_grad = torch.ones(1, device=device).expand(2, 40, 32)
    assert_as_near_as_pytorch((q, k, v), out_grad, sizes=sizes, scale=0.25)


def test_no_tensor_as_large_as_the_map_is_saved(device):
    q, k, v, sizes = inputs(2, 2, 100, 16, dtype=torch.float32, device=device)
    saved = []
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda _: None):
        context = kernels.attend(*leaves, sizes=sizes, scale=0.25)
    assert "mctf_attention" in context.grad_fn.name()
    assert max(saved) == q.numel()


def test_dropout_is_left_to_pytorch(device):
    q, k, v, sizes = inputs(1, 1, 20, 16, dtype=torch.float32, device=device)
    context = kernels.attend(q.requires_grad_(), k, v, sizes=sizes, scale=0.25, dropout=0.5)
    assert "mctf" not in context.grad_fn.name()


def test_queries_in_float32_under_autocast(device):
    q, k, v, sizes = inputs(1, 1, 20, 16, dtype=torch.float32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        context = kernels.attend(q, k, v.bfloat16(), sizes=sizes, scale=0.25)
    assert context.dtype == torch.bfloat16
    assert distance(context, attention.attend(q, k, v, sizes=sizes, scale=0.25)) < 2e-2


def test_gradients_need_train(device):
    q, k, v, _ = inputs(1, 1, 20, 16, dtype=torch.float32, device=device)
    with pytest.raises(MctfError, match="train=True"):
        attention_ops.attention(q.requires_grad_(), k, v, None, None, None, None, 0.25, 0.0, 0.0, False, False)


def test_sums_over_slots(device):
    assignment = fusion(2, 50, device)
    for dtype in FLOATS:
        x = torch.randn(2, 50, 24, device=device).to(dtype)
        actual = pooling_ops.segment_sum(x, *assignment.members())
        torch.testing.assert_close(actual, assignment.sum(x.double()).to(dtype))


def test_operators_pass_opcheck(device):
    """The interpreter's kernels cannot be traced: only the schema and the registration are checked there."""
    checks = {"test_utils": ("test_schema", "test_autograd_registration")} if INTERPRETED else {}
    q, k, v, sizes = (tensor.contiguous() for tensor in inputs(1, 2, 40, 16, dtype=torch.float32, device=device))
    assignment = fusion(1, 40, device)
    order, start = assignment.members()
    values = v[:, :, : assignment.count].contiguous()
    leaves = [tensor.requires_grad_() for tensor in (q, k, values)]
    arguments = (sizes, assignment.slots, order, start, 0.25, 1.0, 0.0, True, True)
    opcheck(attention_ops.attention, (*leaves, *arguments), **checks)
    constants = [tensor.detach() for tensor in leaves]
    out, _, lse = attention_ops.attention(*constants, *arguments)
    operands = (*constants, sizes, assignment.slots, out, lse, torch.randn_like(out), 0.25)
    opcheck(attention_ops.attention_backward, operands, **checks)
    opcheck(pooling_ops.segment_sum, (out, order, start), **checks)
    pooled = (out.requires_grad_(), None, None, sizes, True, False, assignment.slots, order, start, True)
    opcheck(pooling_ops.pool, pooled, **checks)
    opcheck(clustering_ops.cluster, (out.detach(), sizes, 6, 1, 2, 9), **checks)


def model_gradients(model, images):
    model.zero_grad()
    model(images).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("method", ["mctf", "mctf_exact"])
def test_gradients_of_a_whole_model(method, device):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, depth=2, img_size=96).to(device)
    images = torch.randn(1, 3, 96, 96, device=device)
    mctf.fuse(model, method, r=8)
    actual = model_gradients(model, images)
    with disable_kernels():
        expected = model_gradients(model, images)
    assert {name: distance(actual[name], expected[name]) < 1e-4 for name in actual} == dict.fromkeys(actual, True)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's kernels cannot be compiled")
@pytest.mark.parametrize("method", ["mctf", "mctf_exact"])
def test_gradients_of_a_compiled_model(method, device):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, depth=3).to(device)
    images = torch.randn(2, 3, 160, 160, device=device)
    mctf.fuse(model, method, r=20)
    expected = model_gradients(model, images)
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    compiled(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, expected[name]) < 1e-3, name
