"""What restored tokens are like: `python benchmarks/restored_tokens.py MODEL --data IMAGES.zip [--weights FILE]`.

Cosine to the unfused model, the mean over images, for tokens restored by a copy of their fused token and by their
residual (copy / residual), per method at an equal share of the FLOPs:

    patches       final normalized patches of `forward_features`, the mean over patches
    block i       patches after block i of `forward_intermediates`, the mean over patches
    mean, normed  mean of the final normalized patches, as of a head that pools after the norm
    normed mean   norm of the mean of the final patches, as of a head that pools before the norm (timm's `fc_norm`)

The means are those of a model that was trained with its own pooling. Prints a Markdown table; `--output` adds the run
to a JSON file.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mctf
from mctf.evaluation.setup import RunOptions, open_run
from mctf.models.loading import copy_sharing_weights
from mctf.stack import RESTORES


def features(model: Any, pixels: Tensor, block: int) -> dict[str, Tensor]:
    """What is compared, each B … C."""
    final, maps = model.forward_intermediates(
        pixels, indices=[block, len(model.blocks) - 1], output_fmt="NLC", norm=False
    )
    middle, last = maps
    patches = final[:, -last.shape[1] :]  # timm normalizes the final tokens
    return {
        "patches": patches,
        f"block {block}": middle,
        "mean, normed": patches.mean(dim=1),
        "normed mean": model.norm(last.mean(dim=1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--crop-pct", type=float)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--methods", default="ward,mctf,mctf_exact,tome")
    parser.add_argument("--flops", type=float, default=0.58)
    parser.add_argument("--block", type=int, default=6)
    parser.add_argument("--output", type=Path)
    given = vars(parser.parse_args())
    methods, share, block = given.pop("methods").split(","), given.pop("flops"), given.pop("block")
    output: Path | None = given.pop("output")

    sums: dict[tuple[str, str], dict[str, float]] = {}
    images = 0
    with open_run(RunOptions(**given)) as run, torch.inference_mode():
        baseline = copy_sharing_weights(run.model).eval()
        fused = {
            (method, restore): mctf.fuse(
                copy_sharing_weights(run.model), method, flops=share, dense=True, restore=restore
            ).eval()
            for method in methods
            for restore in reversed(RESTORES)
        }
        for batch in run.batches:
            reference = features(baseline, batch.pixels, block)
            images += len(batch.pixels)
            for key, model in fused.items():
                row = sums.setdefault(key, dict.fromkeys(reference, 0.0))
                for name, value in features(model, batch.pixels, block).items():
                    cosine = F.cosine_similarity(value, reference[name], dim=-1)
                    row[name] += cosine.reshape(len(batch.pixels), -1).mean(dim=1).sum().item()

        facts = run.facts(images=images)
        facts["command"] = shlex.join(["python", "benchmarks/restored_tokens.py", *sys.argv[1:]])

    means = {key: {name: total / images for name, total in row.items()} for key, row in sums.items()}
    names = list(next(iter(means.values())))
    if output is not None:
        runs = json.loads(output.read_text())["runs"] if output.exists() else []
        cosines = [{"method": method, "restore": restore, **row} for (method, restore), row in means.items()]
        output.write_text(json.dumps({"runs": [*runs, {**facts, "flops": share, "cosine": cosines}]}, indent=2) + "\n")
    print(f"{given['model']}, {images} images, {share:.0%} of the FLOPs\n")
    print("| copy / residual | " + " | ".join(names) + " |")
    print("|---|" + "---:|" * len(names))
    for method in methods:
        rows = [means[method, restore] for restore in ("copy", "residual")]
        cells = [" / ".join(f"{row[name]:.4f}" for row in rows) for name in names]
        print(f"| `{method}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
