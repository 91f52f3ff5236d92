"""The cost of every row of Tables 1 and 2, and of every r in Tables C, D and E, beside the paper's."""

from dataclasses import asdict, dataclass

from ...models.loading import create_empty
from ..plan import plan
from . import paper
from .counting import FUSIBLE, Counted, count
from .experiment import Experiment, Result, Task

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
