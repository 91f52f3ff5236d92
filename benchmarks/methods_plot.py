"""docs/images/methods.svg, KL over FLOPs of all methods, and speed_and_fidelity.svg, KL over images/s of some.

    mctf compare deit_tiny_patch16_224 --weights FILE --data imagenet-sample-500.zip --classes TSV --crop-pct 0.875 \
        --flops 0.48,0.56,0.67,0.78,0.88 --methods ward,diffrate,pitome,atc,mctf_exact,mctf,tome,evit,ats,bat \
        --output benchmarks/results/deit_tiny_methods.json
    mctf eval deit_tiny_patch16_224 … -m diffrate --option prune=false --flops 0.48,0.56,0.67,0.78,0.88 --output FILE
    python benchmarks/run_tables.py benchmarks/results h200_deit_tiny_ward_48_graphs …_56_graphs …_78_graphs
    python benchmarks/methods_plot.py

KL is from benchmarks/results/deit_tiny_methods.json, in float32; `other_runs` in the file names the rows that come from
other commands. Speeds are from h200_deit_tiny_ward_*_graphs.json.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from mctf.viz.plots import Line, Panel, draw, write_plot

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
TIMED = (0.48, 0.56, 0.78)  # budgets of the tables of speeds
Point = tuple[str, float, float]  # a method, x, and its KL


def write(points: Iterable[Point], x_label: str, title: str, name: str) -> None:
    """One line per method through its points."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for method, x, kl in points:
        lines.setdefault(method, []).append((x, kl))
    drawn = tuple(Line(each, tuple(sorted(of)), strong=each == "ward") for each, of in lines.items())
    panel = Panel(drawn, x_label, "KL to the unfused model, nats", logarithmic=True)
    write_plot(draw([panel], title=title), IMAGES / name)


def timed(facts: dict) -> Iterable[Point]:
    """KL at each speed: of the methods and budgets whose speed was measured."""
    for budget in TIMED:
        (table,) = json.loads((RESULTS / f"h200_deit_tiny_ward_{budget * 100:.0f}_graphs.json").read_text())["tables"]
        speeds = {row["name"]: row["images_per_second"] for row in table["rows"]}
        for row in facts["rows"]:
            at_budget = abs(row["target_gflops"] / facts["baseline"]["gflops"] - budget) < 1e-3
            if at_budget and row["method"] in speeds:
                yield row["method"], speeds[row["method"]], row["kl"]


if __name__ == "__main__":
    facts = json.loads((RESULTS / "deit_tiny_methods.json").read_text())
    facts["rows"] = [row | {"target_gflops": row.get("target_gflops") or row["gflops"]} for row in facts["rows"]]
    costs = [(row["method"], row["gflops"], row["kl"]) for row in facts["rows"]]
    write(costs, "GFLOPs", f"DeiT-Tiny, {facts['images']} images of ImageNet, no training", "methods.svg")
    title = "DeiT-Tiny on an H200, batch 256, bfloat16, CUDA graphs"
    write(timed(facts), "images/s", title, "speed_and_fidelity.svg")
