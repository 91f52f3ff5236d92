"""docs/images/methods.svg, KL over FLOPs of all methods, from benchmarks/results/deit_tiny_methods.json.

    mctf compare deit_tiny_patch16_224 --weights FILE --data imagenet-sample-500.zip --classes TSV --crop-pct 0.875 \
        --flops 0.48,0.56,0.67,0.78,0.88 --methods ward,diffrate,pitome,atc,mctf_exact,mctf,tome,evit,ats,bat \
        --output benchmarks/results/deit_tiny_methods.json
    mctf eval deit_tiny_patch16_224 … -m diffrate --option prune=false --flops 0.48,0.56,0.67,0.78,0.88 --output FILE
    python benchmarks/methods_plot.py

`other_runs` in the file names the methods whose rows come from the second command.
"""

import json
from pathlib import Path

from mctf.viz.plots import Line, Panel, draw, write_plot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/deit_tiny_methods.json"

if __name__ == "__main__":
    facts = json.loads(RESULTS.read_text())
    names = list(dict.fromkeys(row["method"] for row in facts["rows"]))
    points = {name: [(row["gflops"], row["kl"]) for row in facts["rows"] if row["method"] == name] for name in names}
    lines = tuple(Line(name, tuple(sorted(points[name])), strong=name == "ward") for name in names)
    panel = Panel(lines, "GFLOPs", "KL to the unfused model, nats", logarithmic=True)
    title = f"DeiT-Tiny, {facts['images']} images of ImageNet, no training"
    write_plot(draw([panel], title=title), ROOT / "docs/images/methods.svg")
