"""The cost model: every published figure, and fvcore's count of what a fused model really runs."""

import csv
from typing import Any

import pytest
import timm
import torch

import mctf
from helpers.flops import EXACT, counted
from helpers.models import METHODS, NAMES, ONE_PER_OPS, PAIRS_BY_OPS, make, make_images
from helpers.shared_data import SHARED, needs_shared

TABLE = "paper/flops_accuracy_by_r.csv"
# What the table calls a model: its name, and how near its figures are, in GFLOPs.
MODELS = {
    "deit_tiny": ("deit_tiny_patch16_224", 0.01),
    "deit_small": ("deit_small_patch16_224", 0.01),
    "t2t_vit_t_14": ("t2t_vit_t_14", 0.01),
    "t2t_vit_t_19": ("t2t_vit_t_19", 0.01),
    "lv_vit_s": ("lvvit_s", 0.02),
}


def published() -> list[tuple[str, int, float]]:
    """Model, r and GFLOPs of every row; empty where the table is absent."""
    if not (SHARED / TABLE).exists():
        return []
    with (SHARED / TABLE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return sorted({(row["model"], int(row["r"]), float(row["gflops"])) for row in rows})


@needs_shared(TABLE)
def test_the_published_table_has_every_r_of_every_model() -> None:
    assert [row[:2] for row in published()] == [(model, r) for model in sorted(MODELS) for r in range(21)]


@needs_shared(TABLE)
@pytest.mark.parametrize("model", MODELS)
def test_every_published_figure(model: str) -> None:
    rows = [row for row in published() if row[0] == model]
    name, near = MODELS[model]
    with torch.device("meta"):
        host = timm.create_model(name)
    assert [row for row in rows if abs(mctf.plan(host, r=row[1]).gflops - row[2]) > near] == []
    assert mctf.plan(host).gflops_base == mctf.plan(host, r=0).gflops


# fvcore traces a model, which takes time: one model per class of BlockOps, the others as slow tests
BY_OPS = [pytest.param(name, marks=() if name in ONE_PER_OPS else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", BY_OPS)
@torch.no_grad()
def test_fvcore_counts_the_plain_model_alike(name: str) -> None:
    model = make(name)
    plan = mctf.plan(model, r=0)
    second_head = 64 * 48 * 10 / 1e9 if name == "lvvit" else 0  # patches, channels, classes
    assert counted(model, make_images(model, 1)) == pytest.approx(plan.gflops_run, rel=EXACT)
    assert plan.gflops == plan.gflops_base == pytest.approx(plan.gflops_run - second_head, rel=EXACT)


@pytest.mark.parametrize(("name", "method"), PAIRS_BY_OPS)
@torch.no_grad()
def test_fvcore_counts_the_fused_model_alike(name: str, method: str) -> None:
    model, r = make(name), [3, 20, 0, 0.3]
    plan = mctf.plan(model, method=method, r=r)
    mctf.fuse(model, method, r=r)
    assert counted(model, make_images(model, 1)) == pytest.approx(plan.gflops_run, rel=EXACT)
    assert plan.gflops_run < plan.gflops_base * 1.2


VARIANTS: list[dict[str, Any]] = [
    {"attention": "precise"},
    {"attention": "previous"},
    {"attention": "exact"},
    {"bidirectional": False},
    {"pooling": "max"},
    {"tau_info": 0, "tau_size": 0},
    {"informativeness": "class"},
    {"informativeness": "both", "attention": "previous"},
    {"attention": "exact", "informativeness": "class"},
]
VARIED = [
    "registers",
    *(
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.nightly])
        for name in ("gated", "post_norm", "eva_dinov3", "cait")
    ),
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("name", VARIED)
@torch.no_grad()
def test_fvcore_counts_every_variant_alike(name: str, options: dict[str, Any]) -> None:
    if name == "cait" and "informativeness" in options:
        pytest.skip("no class token in CaiT's blocks")
    model = make(name)
    plan = mctf.plan(model, r=9, **options)
    mctf.fuse(model, r=9, **options)
    assert counted(model, make_images(model, 1)) == pytest.approx(plan.gflops_run, rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [("deit_tiny_patch16_224", method) for method in METHODS]
    + [(name, "mctf") for name in ("t2t_vit_t_14", "t2t_vit_t_19", "lvvit_s")],
)
@torch.no_grad()
def test_fvcore_counts_the_paper_s_models_alike(name: str, method: str) -> None:
    model = timm.create_model(name).eval()
    images = torch.zeros(1, 3, 224, 224)
    assert counted(model, images) == pytest.approx(mctf.plan(model, r=0).gflops_run, rel=EXACT)
    plan = mctf.plan(model, method=method, r=16)
    mctf.fuse(model, method, r=16)
    assert counted(model, images) == pytest.approx(plan.gflops_run, rel=EXACT)


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"global_pool": ""}),
    ("plain", {"global_pool": "avgmax"}),
    ("plain", {"global_pool": "prr"}),
    ("plain", {"global_pool": "prr", "reg_tokens": 2}),
    ("plain", {"num_classes": 0}),
    ("plain", {"final_norm": False}),
    ("eva02", {"global_pool": ""}),
    ("eva_pe", {"num_classes": 0}),
    ("beit", {"global_pool": ""}),
    ("cait", {"global_pool": "avg"}),
    ("cait", {"global_pool": ""}),
    ("naflex", {"global_pool": "avg", "pre_norm": True}),
    ("relpos", {"rel_pos_type": "mlp", "fc_norm": True, "global_pool": "avg"}),
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), HEADS, ids=str)
@torch.no_grad()
def test_fvcore_counts_every_head_alike(name: str, head: dict[str, Any]) -> None:
    model = make(name, **head)
    plan = mctf.plan(model, r=8)
    assert counted(model, make_images(model, 1)) == pytest.approx(plan.gflops_base, rel=EXACT)
    mctf.fuse(model, r=8)
    assert counted(model, make_images(model, 1)) == pytest.approx(plan.gflops_run, rel=EXACT)


@torch.no_grad()
def test_the_count_can_differ() -> None:
    model = make("plain")
    assert counted(model, make_images(model, 1)) != pytest.approx(mctf.plan(model, r=8).gflops_run, rel=EXACT)
