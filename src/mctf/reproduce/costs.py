"""GFLOPs and parameters of the paper's tables, counted from shapes: nothing is downloaded or run.

Tables 1 and 2 compare methods and backbones; Tables C, D and E list MCTF at every r. Models that mctf can fuse are
counted by `mctf.plan`, in the paper's convention. The others (PVT, CoaT, Swin, PoolFormer) run on the meta device under
torch's FLOP counter: its two FLOPs per multiply-add are halved, and normalization is added as fvcore counts it. PVT is
that of transformers; timm has only PVT v2.
"""

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..hosts._inspect import count_on_meta
from ..methods import methods
from ..methods._layers import UntrainedWarning
from ..models.loading import create_empty
from ..planning import plan
from . import paper
from .paper import Published
from .records import Result
from .runner import Experiment, Task

# The paper's backbones and their model names here.
FUSIBLE = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "t2t_vit_t_14": "t2t_vit_t_14",
    "t2t_vit_t_19": "t2t_vit_t_19",
    "lv_vit_s": "lvvit_s",
}
NOT_FUSIBLE = {
    "coat_mini": "coat_mini",
    "coat_lite_small": "coat_lite_small",
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swin_small": "swin_small_patch4_window7_224",
    "poolformer_s36": "poolformer_s36",
    "poolformer_m48": "poolformer_m48",
}
_PVT_DEPTHS = {"pvt_small": (3, 4, 6, 3), "pvt_medium": (3, 4, 18, 3)}
_PUBLISHED_R: dict[str, ReductionSpec] = {"tome": 13}  # ToMe's published r; the other methods use their default
_UNPUBLISHED_SETTING = {("deit_tiny", "spvit")}
_IMAGE_SIZE = 224
_CLASSES = 1000

_GFLOPS_TOLERANCE = 0.1  # Tables 1 and 2 print tenths
_MILLIONS_TOLERANCE = 0.5
_BY_R_TOLERANCE = 0.02  # Tables C, D and E print hundredths, and those of LV-ViT differ by one more


@dataclass(frozen=True)
class Counted:
    """The counted cost of one row; None where it cannot be counted, with the reason in `note`.

    at_most: whether the method keeps a different number of tokens per image, so that gflops is an upper bound.
    other_setting: whether the published setting is unknown and another one is counted. with_second_head: GFLOPs with
    the second classifier of LV-ViT, which the paper counts in Table 2 and not in Table E.
    """

    r: ReductionSpec | None = None
    gflops: float | None = None
    params_m: float | None = None
    at_most: bool = False
    other_setting: bool = False
    with_second_head: float | None = None
    note: str = ""


@dataclass(frozen=True)
class CostRow:
    """One row of Table 1 or 2: the printed figures and the counted cost."""

    paper: Published
    counted: Counted

    @property
    def agrees(self) -> bool | None:
        """Whether GFLOPs and parameters agree to the printed digits; None where they cannot be compared."""
        counted = self.counted
        if counted.gflops is None or counted.params_m is None or counted.at_most or counted.other_setting:
            return None
        candidates = [counted.gflops] + ([] if counted.with_second_head is None else [counted.with_second_head])
        gflops_error = min(abs(value - self.paper.gflops) for value in candidates)
        params_error = abs(counted.params_m - self.paper.params_m)
        whole = float(self.paper.params_m).is_integer()  # Table 1 and half of Table 2 print whole millions
        return gflops_error < _GFLOPS_TOLERANCE and params_error <= (1 if whole else _MILLIONS_TOLERANCE)


@dataclass(frozen=True)
class CostTableResult(Result):
    """The rows of Table 1 or 2, in the paper's order."""

    rows: tuple[CostRow, ...]


@dataclass(frozen=True)
class CostTable(Experiment):
    """One of the tables that compare methods or backbones."""

    table: str
    name: str
    title: str
    measures: str
    sources: tuple[str, ...]
    needs_images: bool = False

    result_type: ClassVar[type[Result]] = CostTableResult

    def steps(self, task: Task) -> int:
        return len(paper.methods(self.table))

    def run(self, task: Task) -> CostTableResult:
        rows = []
        for row in paper.methods(self.table):
            rows.append(CostRow(row, count(row)))
            task.advance(1)
        return CostTableResult(tuple(rows))


TABLE_1 = CostTable(
    "1",
    "costs_methods",
    "Cost of the methods",
    "GFLOPs and parameters of DeiT-T and DeiT-S under each method.",
    ("Table 1", "Figure 1"),
)
TABLE_2 = CostTable(
    "2",
    "costs_backbones",
    "Cost of other backbones",
    "GFLOPs and parameters of other Vision Transformers, baseline and fused.",
    ("Table 2",),
)


@dataclass(frozen=True)
class CostsByRResult(Result):
    """GFLOPs per backbone; entry r is for r, from 0 (the baseline) to 20."""

    gflops: dict[str, tuple[float, ...]]

    def disagreements(self) -> list[tuple[str, str, int]]:
        """Table, backbone and r of every figure that differs from the paper's by more than its printed digits."""
        return [
            (published.table, published.backbone, r)
            for published in paper.by_r()
            for r, (counted, printed) in enumerate(zip(self.gflops[published.backbone], published.gflops, strict=True))
            if abs(counted - printed) > _BY_R_TOLERANCE
        ]


class CostsByR(Experiment):
    """GFLOPs of MCTF at every r the paper lists."""

    name = "costs_by_r"
    title = "Cost of every r"
    measures = "GFLOPs of MCTF on five backbones, for r from 0 to 20."
    sources = ("Table C", "Table D", "Table E")
    needs_images = False
    result_type = CostsByRResult

    def steps(self, task: Task) -> int:
        return len(FUSIBLE)

    def run(self, task: Task) -> CostsByRResult:
        gflops = {}
        for backbone, name in FUSIBLE.items():
            model = create_empty(name)
            gflops[backbone] = tuple(plan(model, r=r).gflops for r in range(21))
            task.advance(1)
        return CostsByRResult(gflops)


def count(row: Published) -> Counted:
    """GFLOPs and parameters of one row of Table 1 or 2."""
    if row.backbone in NOT_FUSIBLE:
        return _count_operations(create_empty(NOT_FUSIBLE[row.backbone]))
    if row.backbone in _PVT_DEPTHS:
        return _count_pvt(_PVT_DEPTHS[row.backbone])
    model = create_empty(FUSIBLE[row.backbone])
    if row.method == "base":
        baseline = plan(model, r=0)
        second = None if baseline.gflops_run == baseline.gflops else baseline.gflops_run
        note = "" if second is None else f"{second:.2f} with its second classifier, as in Table 2"
        return Counted(0, baseline.gflops, _millions(model), with_second_head=second, note=note)
    if row.method not in methods():
        return Counted(note=f"the method {row.method} is not registered")
    r = _PUBLISHED_R.get(row.method) if row.r is None else row.r
    planned = plan(model, method=row.method, r=r)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        fused = fuse(model, row.method, r=r)
    note = "upper bound: the count depends on the image" if planned.adaptive else ""
    counted = Counted(planned.r, planned.gflops, _millions(fused), at_most=planned.adaptive, note=note)
    if (row.backbone, row.method) in _UNPUBLISHED_SETTING:
        return replace(counted, other_setting=True, note="at the setting for DeiT-S; its own is not published")
    return counted


def _count_pvt(depths: tuple[int, ...]) -> Counted:
    """All but the depths is the default of transformers."""
    try:
        from transformers import PvtConfig, PvtForImageClassification
    except ImportError:
        return Counted(note='counting needs transformers: pip install "mctf[hf]"')
    with torch.device("meta"):
        return _count_operations(PvtForImageClassification(PvtConfig(depths=list(depths), num_labels=_CLASSES)).eval())


@torch.no_grad()
def _count_operations(model: nn.Module) -> Counted:
    images = torch.empty(1, 3, _IMAGE_SIZE, _IMAGE_SIZE, dtype=torch.float32, device="meta")
    _, multiply_adds = count_on_meta(model, lambda empty: empty(images))
    return Counted(0, multiply_adds / 1e9, _millions(model))


def _millions(model: nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6
