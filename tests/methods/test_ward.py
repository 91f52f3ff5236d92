"""Ward: what a block computes, when it fuses, what it costs."""

import pytest
import timm
import torch
from torch import Tensor, nn

import mctf
from mctf.core.schedule import ReductionSpec, reductions
from mctf.hosts import find_host
from mctf.methods import make_method
from mctf.methods.base import BlockOutput
from mctf.stack import features_for_head


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=96, depth=4).eval()


@pytest.mark.parametrize(("depth", "blocks"), [(12, range(3, 11)), (24, range(6, 23)), (4, range(1, 3)), (1, range(1))])
def test_blocks_that_fuse_by_default(depth: int, blocks: range) -> None:
    assert make_method("ward", {}).default_blocks(depth) == blocks


@pytest.mark.parametrize(("size", "spacing"), [(96, 1), (224, 1), (512, 1), (640, 2), (1024, 2)])
def test_every_second_block_fuses_where_comparing_all_tokens_costs_much(size: int, spacing: int) -> None:
    """1,025 tokens of 192 channels take 19 % of a fusing block, 1,601 take 23 %."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=size, depth=8).eval()
    mctf.fuse(model, "ward", r=0.2)
    assert model.blocks.method.spacing == spacing
    assert [index for index, amount in enumerate(model.blocks.schedule) if amount] == list(range(2, 7, spacing))
    mctf.unfuse(model)
    mctf.fuse(model, "ward", r=0.2, spacing=3)
    assert model.blocks.schedule == (0, 0, 0.2, 0, 0, 0.2, 0, 0)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("r", "amounts"),
    [
        (0.2, [0] * 3 + [0.2] * 8 + [0]),
        (0.25, [0] * 3 + [0.25] * 8 + [0]),
        (0.1, [0] * 5 + [0.1] * 6 + [0]),
        (0.125, [0] * 4 + [0.0625] + [0.125] * 6 + [0]),
        (0.4, [0] * 2 + [0.4] * 9 + [0]),
        (8, [0] * 3 + [8] * 8 + [0]),
        ([0] * 6 + [0.1] * 6, [0] * 6 + [0.1] * 6),
    ],
    ids=str,
)
def test_small_ratios_begin_later(r: ReductionSpec, amounts: list[float]) -> None:
    schedule = make_method("ward", {}).make_schedule(r, depth=12, blocks=None)
    assert list(schedule) == pytest.approx(amounts)


def test_named_blocks_fuse_the_whole_ratio() -> None:
    assert make_method("ward", {}).make_schedule(0.1, depth=4, blocks=[0, 2]) == (0.1, 0, 0.1, 0)


@pytest.mark.parametrize("depth", [1, 2, 5, 12, 24])
def test_a_larger_ratio_costs_less_on_every_depth(depth: int) -> None:
    method = make_method("ward", {})
    kept = [
        sum(step.num_remaining for step in reductions(schedule, 1001, protected=1, method=method))
        for schedule in (method.make_schedule(r / 100, depth=depth, blocks=None) for r in range(1, 60))
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] < 1001 * depth


def test_a_block_is_exact_attention_then_fusion(model: nn.Module) -> None:
    """One fusing block, composed by hand from the trace's assignment and weights."""
    images = torch.randn(2, 3, 96, 96)
    mctf.fuse(model, "ward", r=[0, 9, 0, 0], dense=False, trim_last=False)
    block, inputs = model.blocks[1], {}
    with mctf.trace(model) as trace:
        fused = model.forward_features(images)
    assignment = trace.blocks[1].assignment
    mctf.unfuse(model)
    hook = model.blocks[1].register_forward_pre_hook(lambda _, args: inputs.setdefault("x", args[0]))
    model(images)
    hook.remove()
    x = inputs["x"]
    host_block = model.blocks[1]
    h = host_block.norm1(x)
    attn = host_block.attn
    q, k, v = attn.qkv(h).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    attention = (q * attn.scale @ k.transpose(2, 3)).softmax(3)
    a = (attention.mean((1, 2)) + attention[:, :, 0].mean(1)) / 2
    context = (attention @ v).transpose(1, 2).flatten(2)
    mean = assignment.pool(x, a)
    norms = assignment.pool(x.norm(dim=2, keepdim=True), a)
    mean = mean * norms / mean.norm(dim=2, keepdim=True)
    y = mean + attn.proj(assignment.pool(context, a))
    y = y + host_block.mlp(host_block.norm2(y))
    sizes = trace.blocks[1].sizes
    for index in (2, 3):
        later = model.blocks[index]
        attn, h = later.attn, later.norm1(y)
        q, k, v = attn.qkv(h).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q * attn.scale @ k.transpose(2, 3) + sizes.log()[:, None, None]
        y = y + attn.proj((logits.softmax(3) @ v).transpose(1, 2).flatten(2))
        y = y + later.mlp(later.norm2(y))
    torch.testing.assert_close(model.norm(y), fused, rtol=1e-4, atol=1e-4)
    assert block is not None


@torch.no_grad()
def test_a_dense_model_weighs_tokens_by_their_size(model: nn.Module) -> None:
    outputs = []

    class Recorder:
        def record(self, index: int, x: Tensor, output: BlockOutput) -> None:
            outputs.append(output)

    mctf.fuse(model, "ward", r=0.3, dense=True)
    with model.blocks.observed_by(Recorder()):
        model(torch.randn(2, 3, 96, 96))
    first, second = outputs[1:3]
    assert torch.equal(first.weights, torch.ones(2, 37))
    assert torch.equal(second.weights, first.sizes)
    assert first.informativeness is None


def test_cost_counts_the_whole_matching(model: nn.Module) -> None:
    shape = find_host(model).architecture(None).blocks[0]
    method = make_method("ward", {})
    fewer = make_method("mctf_exact", {})
    difference = method.run_macs(shape, 37, 9, protected=1) - fewer.run_macs(shape, 37, 9, protected=1)
    assert difference == 36 * 36 * 192 - 18 * 18 * 192
    assert method.run_macs(shape, 37, 0, protected=1) == shape.plain(37)


def test_the_last_block_is_trimmed(model: nn.Module) -> None:
    images = torch.randn(2, 3, 96, 96)
    plan = mctf.plan(model, method="ward", r=0.3)
    assert plan.trimmed
    assert plan.gflops < mctf.plan(model, method="ward", r=0.3, trim_last=False).gflops
    mctf.fuse(model, "ward", r=0.3)
    assert features_for_head(model, images).shape[1] == 1


def test_gradients_reach_every_weight(model: nn.Module) -> None:
    mctf.fuse(model, "ward", r=0.3).train()
    model(torch.randn(2, 3, 96, 96)).square().mean().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"rounds": 2.5}, "rounds=2.5"),
        ({"candidates": 0.5}, "candidates=0.5"),
        ({"spacing": 0}, "spacing=0"),
        ({"candidates": float("nan")}, "candidates=nan"),
        ({"norm": "no"}, "norm"),
        ({"informativeness": "none"}, "informativeness='none' is unknown"),
    ],
)
def test_bad_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(mctf.MctfError, match=says.replace("'", ".")):
        make_method("ward", options)
