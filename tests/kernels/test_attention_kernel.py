"""Attention and attention received by Triton: as close to float64 as PyTorch's own attention in the same dtype."""

import pytest
import torch

from helpers.kernels import FLOATS, FLOOR, distance, inputs, poisoned, record_launches
from mctf import kernels
from mctf.core import attention
from mctf.core.assignment import Assignment
from mctf.kernels import attention as attention_ops


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(attention_ops, "_allocate_outputs", poisoned(attention_ops._allocate_outputs))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("proportional", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 197, 64), (2, 2, 31, 32), (1, 1, 1, 16), (1, 2, 100, 24), (1, 1, 150, 80)])
def test_context_and_attention_received(shape, proportional, dtype, device):
    q, k, v, sizes = inputs(*shape, dtype=dtype, device=device)
    options = {"sizes": sizes if proportional else None, "scale": shape[3] ** -0.5}
    context, received = kernels.attend_with_received(q, k, v, rows="mean", **options)

    exact = attention.attend(q.double(), k.double(), v.double(), **options)
    own = distance(attention.attend(q, k, v, **options), exact)
    assert distance(context, exact) <= 2 * own + FLOOR[dtype]
    exact = attention.informativeness(q.double(), k.double(), **options)
    assert distance(received.sum(dim=1), exact) <= FLOOR[dtype]


@pytest.mark.parametrize("tokens", [300, 257])
def test_long_sequences(tokens, device):
    q, k, v, sizes = inputs(1, 2, tokens, 32, dtype=torch.float32, device=device)
    context, received = kernels.attend_with_received(q, k, v, sizes=sizes, scale=0.2, rows="both")
    assert distance(context, attention.attend(q, k, v, sizes=sizes, scale=0.2)) < 1e-5
    expected = attention.informativeness(q, k, sizes=sizes, scale=0.2, rows="both")
    assert distance(received.sum(dim=1), expected) < 1e-5


@pytest.mark.parametrize("rows", ["mean", "class", "both"])
def test_averaged_rows(rows, device):
    q, k, _, sizes = inputs(2, 2, 40, 16, dtype=torch.float32, device=device)
    received = kernels.attention_received(q, k, sizes=sizes, scale=0.3, rows=rows).partial.sum(dim=1)
    assert distance(received, attention.informativeness(q, k, sizes=sizes, scale=0.3, rows=rows)) < 1e-5


def test_unpooled_values(device):
    q, k, v, sizes = inputs(2, 2, 40, 16, dtype=torch.float32, device=device)
    slots = torch.stack([torch.randperm(40) % 25 for _ in range(2)]).to(device)
    options = {"sizes": sizes, "scale": 0.25, "unpool": Assignment(slots, 25)}
    values = v[:, :, :25]
    assert distance(kernels.attend(q, k, values, **options), attention.attend(q, k, values, **options)) < 1e-5


def test_a_row_whose_logits_are_all_far_below_zero_is_still_a_mean(device):
    q, k, v, _ = inputs(1, 1, 20, 16, dtype=torch.float32, device=device)
    q, k = torch.full_like(q, -30.0), torch.full_like(k, 30.0)
    context, _ = kernels.attend_with_received(q, k, v, sizes=None, scale=1.0, rows="mean")
    assert distance(context, v.mean(dim=2, keepdim=True).expand_as(v).transpose(1, 2).flatten(2)) < 1e-5


@pytest.mark.parametrize("dtype", FLOATS)
def test_few_heads_take_the_long_kernels(dtype, device, monkeypatch):
    q, k, v, sizes = inputs(1, 2, 100, 32, dtype=dtype, device=device)
    options = {"sizes": sizes, "scale": 32**-0.5, "rows": "both"}
    short = kernels.attend_with_received(q, k, v, **options)
    monkeypatch.setattr(attention_ops, "MIN_SHORT_HEADS", 3)
    launches = record_launches(monkeypatch, attention_ops)
    long = kernels.attend_with_received(q, k, v, **options)
    assert launches == ["long_attention_kernel", "long_received_kernel"]
    for one, other in zip(short, long, strict=True):
        assert distance(one, other) < (1e-5 if dtype == torch.float32 else 1e-2)


def with_dead_keys(tokens, dead, gap, dtype, device):
    """q, k, v and sizes, where keys of size 0 have logits `gap` nats above those of all others."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (0.1 * torch.randn(1, 1, tokens, 16, generator=generator) for _ in range(3))
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, dead, 0] = gap
    sizes = torch.randint(1, 4, (1, tokens), generator=generator).float()
    sizes[:, dead] = 0
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), sizes.to(device)


DEAD = {
    "first key": lambda tokens: [0],
    "middle key": lambda tokens: [7],
    "last key": lambda tokens: [tokens - 1],
    "first tile": lambda tokens: list(range(130)),
    "all but the last key": lambda tokens: list(range(tokens - 1)),
}


@pytest.mark.parametrize("tokens", [150, 300], ids=["short", "long"])
@pytest.mark.parametrize("dead", DEAD)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_of_size_0_are_absent_however_large_their_logits(tokens, dead, dtype, device):
    dead = DEAD[dead](tokens)
    gap = 18.0 if dtype == torch.float16 else 110.0  # nats beyond which the exponential underflows
    q, k, v, sizes = with_dead_keys(tokens, dead, gap, dtype, device)
    context, received = kernels.attend_with_received(q, k, v, sizes=sizes, scale=1.0, rows="mean")
    live = [key for key in range(tokens) if key not in dead]
    exact = attention.attend(
        q.double(), k.double()[:, :, live], v.double()[:, :, live], sizes=sizes.double()[:, live], scale=1.0
    )
    coarse = 10 if dtype == torch.bfloat16 else 1
    torch.testing.assert_close(context.double(), exact, rtol=2e-3 * coarse, atol=2e-4 * coarse)
    assert (received[0, :, dead] == 0).all()
    torch.testing.assert_close(received.sum(), torch.tensor(1.0, device=device), rtol=1e-3 * coarse, atol=0)


@pytest.mark.parametrize("tokens", [40, 257], ids=["short", "long"])
def test_an_image_without_live_keys_gives_0(tokens, device):
    """As the context of `core.attention.attend`; the attention received is 0 as well."""
    q, k, v, _ = inputs(2, 1, tokens, 16, dtype=torch.float32, device=device)
    sizes = torch.ones(2, tokens, device=device)
    sizes[0] = 0
    tensors = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    context, received = kernels.attend_with_received(*tensors, sizes=sizes, scale=1.0, rows="both")
    assert not context[0].any()
    assert not received[0].any()
    assert distance(context, attention.attend(q, k, v, sizes=sizes, scale=1.0)) < 1e-5
    for gradient in torch.autograd.grad(context.square().sum(), tensors):
        assert not gradient[0].any()
        assert gradient[1].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 197), (1, 577), (99, 577)])
@pytest.mark.parametrize("channels", [32, 64, 128])
def test_tiles_of_long_sequences_fit_every_gpu(batch, tokens, channels, dtype):
    q = torch.empty(batch, 12, tokens, channels, dtype=dtype, device="meta")
    rows, keys, stages = attention_ops.long_tile(q)
    elements = channels * (rows + 2 * keys * stages)
    assert elements * q.element_size() <= 99 << 10 or dtype == torch.float32


@pytest.mark.parametrize(("tokens", "tiles"), [(1, (16, 0)), (100, (128, 0)), (129, (128, 64)), (256, (128, 128))])
def test_key_tiles_cover_the_tokens(tokens, tiles):
    assert attention_ops.key_tiles(tokens) == tiles
    assert sum(tiles) >= tokens


@pytest.mark.parametrize(
    ("shape", "dtype", "shared", "is_short", "fits"),
    [
        ((1, 1, 197, 64), torch.bfloat16, 227 << 10, True, True),
        ((1, 1, 257, 64), torch.bfloat16, 227 << 10, False, True),
        ((1, 1, 197, 64), torch.float32, 99 << 10, False, True),
        ((1, 1, 100, 64), torch.bfloat16, 99 << 10, True, True),
        ((1, 1, 100, 128), torch.float32, 99 << 10, False, False),
        ((1, 1, 150, 80), torch.float32, 227 << 10, False, True),
        ((1, 1, 100, 160), torch.bfloat16, 227 << 10, False, False),
    ],
    ids=str,
)
def test_what_a_gpu_can_hold(monkeypatch, shape, dtype, shared, is_short, fits):
    monkeypatch.setattr(attention_ops, "_shared_memory", lambda _: shared)
    q = torch.empty(shape, dtype=dtype)
    assert attention_ops.fits(q) == fits
    assert not fits or attention_ops._is_short(q) == is_short
