"""GFLOPs and parameters of the rows of the paper's tables, worked out from shapes: nothing is downloaded or run.

Models that mctf can fuse are counted by `mctf.plan`, in the paper's account. The others (PVT, CoaT, Swin, PoolFormer)
are run on the meta device under torch's counter of operations, whose multiply-adds are two FLOPs each and are halved,
and normalisation is added at fvcore's price. PVT is transformers', as timm has only its second version.
"""

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..hosts._inspect import run_on_shapes
from ..methods import methods
from ..methods._layers import UntrainedWarning
from ..models.loading import create_empty
from ..planning import plan
from . import paper
from .paper import Published
from .runner import Experiment, Result, Task

# What the paper calls a backbone: its name here.
FUSIBLE = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "t2t_vit_t_14": "t2t_vit_t_14",
    "t2t_vit_t_19": "t2t_vit_t_19",
    "lv_vit_s": "lvvit_s",
}
COUNTED = {
    "coat_mini": "coat_mini",
    "coat_lite_small": "coat_lite_small",
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swin_small": "swin_small_patch4_window7_224",
    "poolformer_s36": "poolformer_s36",
    "poolformer_m48": "poolformer_m48",
}
_PVT_DEPTHS = {"pvt_small": (3, 4, 6, 3), "pvt_medium": (3, 4, 18, 3)}
_PUBLISHED_R: dict[str, ReductionSpec] = {"tome": 13}  # its authors' r; the other methods' is their default
_UNKNOWN_SETTING = {("deit_tiny", "spvit")}
_SIDE = 224
_CLASSES = 1000


@dataclass(frozen=True)
class Counted:
    """What was counted for one row; None where nothing could be, and `note` says why.

    at_most: whether each image decides how many tokens remain, so that gflops is an upper bound. other_setting: whether
    the published setting is unknown and another one was counted. with_second_head: GFLOPs with the second classifier of
    LV-ViT, which the paper counts in Table 2 and not in Table E.
    """

    r: ReductionSpec | None = None
    gflops: float | None = None
    params_m: float | None = None
    at_most: bool = False
    other_setting: bool = False
    with_second_head: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def count(row: Published) -> Counted:
    """GFLOPs and parameters of one row of Table 1 or 2."""
    if row.backbone in COUNTED:
        return _count_whole(create_empty(COUNTED[row.backbone]))
    if row.backbone in _PVT_DEPTHS:
        return _count_pvt(_PVT_DEPTHS[row.backbone])
    name = FUSIBLE[row.backbone]
    if row.method == "base":
        return _count_plain(name)
    if row.method not in methods():
        return Counted(note=f"the method {row.method} is not registered")
    counted = _count_reduced(name, row.method, _PUBLISHED_R.get(row.method) if row.r is None else row.r)
    if (row.backbone, row.method) in _UNKNOWN_SETTING:
        note = "at the setting for DeiT-S; its own is not published"
        return replace(counted, other_setting=True, note=note)
    return counted


def _count_plain(name: str) -> Counted:
    model = create_empty(name)
    made = plan(model, r=0)
    second = None if made.gflops_run == made.gflops else made.gflops_run
    note = "" if second is None else f"{second:.2f} with its second classifier, as in Table 2"
    return Counted(0, made.gflops, _millions(model), with_second_head=second, note=note)


def _count_reduced(name: str, method: str, r: ReductionSpec | None) -> Counted:
    model = create_empty(name)
    made = plan(model, method=method, r=r)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        fused = fuse(model, method, r=r)
    note = "at most: each image decides" if made.adaptive else ""
    return Counted(made.r, made.gflops, _millions(fused), at_most=made.adaptive, note=note)


def _count_pvt(depths: tuple[int, ...]) -> Counted:
    """The rest of its shape is what transformers takes by default."""
    try:
        from transformers import PvtConfig, PvtForImageClassification
    except ImportError:
        return Counted(note='it is counted with transformers: pip install "mctf[hf]"')
    with torch.device("meta"):
        return _count_whole(PvtForImageClassification(PvtConfig(depths=list(depths), num_labels=_CLASSES)).eval())


@torch.no_grad()
def _count_whole(model: nn.Module) -> Counted:
    images = torch.empty(1, 3, _SIDE, _SIDE, device="meta")
    _, multiply_adds = run_on_shapes(model, lambda empty: empty(images))
    return Counted(0, multiply_adds / 1e9, _millions(model))


def _millions(model: nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


# MERGED from mctf.reproduce.costs:
# The cost of every row of Tables 1 and 2, and of every r in Tables C, D and E, beside the paper's.

_NEAR_GFLOPS = 0.1  # Tables 1 and 2 give tenths
_NEAR_MILLIONS = 0.5
_NEAR_BY_R = 0.02  # Tables C, D and E give hundredths, and those of LV-ViT are off by one more


@dataclass(frozen=True)
class Costs(Experiment):
    """One of the tables that compare methods or backbones."""

    table: str
    name: str
    title: str
    measures: str
    sources: tuple[str, ...]
    needs_images: bool = False

    def steps(self, task: Task) -> int:
        return len(paper.methods(self.table))

    def run(self, task: Task) -> Result:
        rows = []
        for row in paper.methods(self.table):
            rows.append({"paper": asdict(row), "counted": count(row).as_dict()})
            task.advance(1)
        return {"rows": rows}


def agrees(row: paper.Published, counted: Counted) -> bool | None:
    """Whether a row has the paper's GFLOPs and parameters as far as printed; None where that cannot be said."""
    if counted.gflops is None or counted.params_m is None or counted.at_most or counted.other_setting:
        return None
    candidates = [counted.gflops] + ([] if counted.with_second_head is None else [counted.with_second_head])
    gflops_off = min(abs(value - row.gflops) for value in candidates)
    params_off = abs(counted.params_m - row.params_m)
    whole = float(row.params_m).is_integer()  # Table 1 and half of Table 2 give whole millions
    return gflops_off < _NEAR_GFLOPS and params_off <= (1 if whole else _NEAR_MILLIONS)


TABLE_1 = Costs(
    "1",
    "costs_methods",
    "What the methods cost",
    "GFLOPs and parameters of DeiT-T and DeiT-S under each method.",
    ("Table 1", "Figure 1"),
)
TABLE_2 = Costs(
    "2",
    "costs_backbones",
    "What other backbones cost",
    "GFLOPs and parameters of other Vision Transformers, plain and reduced.",
    ("Table 2",),
)


class CostsByR(Experiment):
    """GFLOPs of MCTF at every r the paper lists."""

    name = "costs_by_r"
    title = "What every r costs"
    measures = "GFLOPs of MCTF on five backbones, for r from 0 to 20."
    sources = ("Table C", "Table D", "Table E")
    needs_images = False

    def steps(self, task: Task) -> int:
        return len(FUSIBLE)

    def run(self, task: Task) -> Result:
        gflops = {}
        for backbone, name in FUSIBLE.items():
            model = create_empty(name)
            gflops[backbone] = [plan(model, r=r).gflops for r in range(21)]
            task.advance(1)
        return {"gflops": gflops}


def far_off(gflops: dict[str, list[float]]) -> list[tuple[str, str, int]]:
    """Table, backbone and r of every figure that differs from the paper's by more than its last digits."""
    return [
        (published.table, published.backbone, r)
        for published in paper.by_r()
        for r, (ours, theirs) in enumerate(zip(gflops[published.backbone], published.gflops, strict=True))
        if abs(ours - theirs) > _NEAR_BY_R
    ]
