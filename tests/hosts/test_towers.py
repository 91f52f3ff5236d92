"""Towers of transformers beyond ViT's relatives: images, videos, spectrograms, one tiny model per family of layers."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import mctf
from helpers.families.hf_towers import HfTowers
from helpers.models import drawn
from helpers.refusals import assert_refused
from hosts.test_conformance import check_block
from mctf.hosts import find_host
from mctf.hosts.hf_towers import FAMILIES
from mctf.methods.base import BlockOps, BlockOutput
from mctf.methods.mctf import MCTF

pytest.importorskip("transformers", reason="the extra hf is not installed")

FAMILY = HfTowers()
every_tower = pytest.mark.parametrize("name", FAMILY.builders)


def make(name: str, **features: Any) -> Any:
    return drawn(FAMILY.builders[name](**features), FAMILY)


def inputs(model: Any, batch: int = 2) -> dict[str, Any]:
    images = torch.randn(batch, 3, *FAMILY.image_size(model), generator=torch.Generator().manual_seed(1))
    given = FAMILY.given(model, images.to(next(model.parameters()).dtype))
    dtype = next(model.parameters()).dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor of a model's output."""
    for value in output.values() if hasattr(output, "values") else output:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


def run(model: Any, given: dict[str, Any], **more: Any) -> list[Tensor]:
    return list(tensors(model(**given, **more)))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@every_tower
@torch.no_grad()
def test_a_tower_is_fused_and_every_token_restored(name: str) -> None:
    model = make(name)
    given, size = inputs(model), FAMILY.image_size(model)
    plain = run(model, given, output_hidden_states=True)
    mctf.fuse(model, r=0)
    assert equal(run(model, given, output_hidden_states=True), plain)
    mctf.set_r(model, 6)
    with mctf.trace(model) as trace:
        fused = run(model, given, output_hidden_states=True)
    assert [each.shape for each in fused] == [each.shape for each in plain]
    assert not any(map(torch.equal, fused[:1], plain[:1]))
    assert all(each.isfinite().all() for each in fused)
    plan = mctf.plan(model, r=6, image_size=size)
    assert trace.token_counts == plan.token_counts
    assert trace.token_counts[-1] == trace.token_counts[0] - 18
    assert plan.gflops < plan.gflops_base
    mctf.unfuse(model)
    assert equal(run(model, given, output_hidden_states=True), plain)


def capture(name: str) -> tuple[BlockOps, Tensor, int]:
    """The pieces of one layer in a pass, its input tokens, and the number of protected tokens."""
    model = make(name).double()
    calls: list[tuple[BlockOps, Tensor]] = []

    def record(method: MCTF, block: BlockOps, x: Tensor, *_: object) -> BlockOutput:
        calls.append((block, x))
        return BlockOutput(block.plain(x), None)

    with patch.object(MCTF, "run", record), torch.no_grad():
        model(**inputs(mctf.fuse(model, r=6)))
    return *calls[2], find_host(mctf.unfuse(model)).protected


@every_tower
def test_the_pieces_of_a_layer_keep_their_contract(name: str) -> None:
    block, x, protected = capture(name)
    check_block(block, x, prefix=protected)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("internvl", {"hidden_dropout_prob": 0.4}),
        ("internvl", {"projection_dropout": 0.4}),
        ("blip", {"attention_dropout": 0.4}),
        ("videomae", {"hidden_dropout_prob": 0.4}),
    ],
    ids=str,
)
@torch.no_grad()
def test_dropout_is_where_the_layer_has_it(name: str, rate: dict[str, float]) -> None:
    """The pieces draw as many random numbers as the layer, in the same order."""
    model = make(name, **rate)
    block, x = find_host(model), torch.randn(2, 20, 32)
    layer = next(block.container.children()).train()
    ops = block.ops(layer, {}, None)
    torch.manual_seed(0)
    whole = ops.plain(x)
    h = ops.norm1(x)
    q, k, v = ops.queries_keys_values(h)
    torch.manual_seed(0)
    context = (q @ k.mT * ops.scale).softmax(dim=-1)
    context = torch.dropout(context, ops.attention_dropout, train=True) if ops.attention_dropout else context
    pieces = ops.add_mlp(ops.add_attention(x, (context @ v).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("name", ["videomae", "vivit", "ast"])
@torch.no_grad()
def test_frames_and_spectrograms_are_restored_where_tokens_are_read(name: str) -> None:
    """Copies repeat a token in its slot; residuals add what fusing took, so that their pooled mean is the same."""
    states = {}
    for restore in ("copy", "residual"):
        model = mctf.fuse(make(name), "tome", r=6, restore=restore)
        with mctf.trace(model) as trace:
            states[restore] = model(**inputs(model), output_hidden_states=True).hidden_states[-1]
        slots = trace.source_map()
        first = [int((slots[0] == slot).nonzero()[0]) for slot in slots[0]]
        same = torch.isclose(states[restore][0, first], states[restore][0]).all(dim=1)
        fused = torch.bincount(slots[0])[slots[0]] > 1
        assert fused.sum() >= 12
        assert bool(same[fused].all()) == (restore == "copy")
    sums = [torch.zeros(2, slots.max() + 1, 32).scatter_add_(1, slots[..., None].expand(-1, -1, 32), each)
            for each in states.values()]  # fmt: skip
    torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-4)  # ToMe's mean weighs all parts alike


def test_pretraining_models_are_planned_by_their_tower() -> None:
    import transformers

    sizes = {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_hidden_size": 16}
    config = make("videomae").config
    config.update({**sizes, "decoder_intermediate_size": 16})
    model = transformers.VideoMAEForPreTraining(config)
    masked = (torch.arange(32) % 4 == 0).expand(1, -1)
    mctf.fuse(model, r=4)
    with mctf.trace(model) as trace:
        assert model(torch.randn(1, 4, 3, 32, 32), masked).loss.isfinite()
    assert trace.token_counts == [24, 20, 16, 12]
    assert mctf.plan(model, r=4).token_counts == [32, 28, 24, 20]


MODULES = (
    *("vit", "deit", "beit", "dinov2", "dinov2_with_registers", "dinov3_vit", "clip", "siglip", "siglip2", "vit_mae"),
    *("ijepa", "vit_msn", "aimv2", "blip", "blip_2", "owlvit", "owlv2", "clipseg", "dpt", "vitpose_backbone"),
    *("videomae", "vivit", "audio_spectrogram_transformer", "internvl", "idefics3", "smolvlm", "pixtral"),
    *("qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
)


def test_every_family_of_the_table_exists() -> None:
    """Names of classes are text, so a typing error would be a refusal."""
    paths = [f"transformers.models.{name}.modeling_{name}" for name in MODULES]
    paths.append("transformers.models.data2vec.modeling_data2vec_vision")
    found = {name for path in paths for name in vars(import_module(path))}
    for family in FAMILIES:
        assert set(family.layers) <= found, family.title
        assert set(family.towers) & found, family.title  # a second one may be of another version


@pytest.mark.parametrize(
    ("module", "kind", "config", "features", "reason"),
    [
        (
            "mllama", "MllamaVisionModel", "MllamaVisionConfig",
            {"num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0],
             "image_size": 28}, "it attends between tiles",
        ),
        (
            "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig",
            {"depth": 1, "num_heads": 2, "out_hidden_size": 8}, "it attends inside windows of fixed shape",
        ),
    ],
)  # fmt: skip
def test_other_towers_are_refused_by_module_and_class(
    module: str, kind: str, config: str, features: dict[str, Any], reason: str
) -> None:
    file = import_module(f"transformers.models.{module}.modeling_{module}")
    settings = getattr(import_module(f"transformers.models.{module}.configuration_{module}"), config)
    tower = getattr(file, kind)(settings(**{"hidden_size": 32, "intermediate_size": 32, **features}))
    name = f"transformers.models.{module}.modeling_{module}.{kind}"
    assert_refused(tower, f"{name} cannot be fused, {reason}", lambda: mctf.fuse(tower))
    around = torch.nn.ModuleDict({"visual": tower})
    assert_refused(around, f"(visual is a {name})", lambda: mctf.fuse(around))
