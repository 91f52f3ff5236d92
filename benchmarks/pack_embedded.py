"""Write the weights that come with the package from a run: `python benchmarks/pack_embedded.py RUN/model.safetensors`.

RUN is the output of `mctf finetune --config recipes/tiny_imagenet/RECIPE --validation … --output RUN`.

| model | RECIPE | packed as |
|---|---|---|
| `embedded` | consistency_ward.toml | int8 matrices, one scale per output channel |
| `embedded_small` | embedded_small_consistency.toml | float16 |

Before the file is written, the logits of both for the same random images are compared. The same run gives the same
file byte for byte.

Axes: B images, 3 H W.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from mctf._utils import atomic_write
from mctf.errors import MctfError
from mctf.models.class_names import TINY_IMAGENET_CLASSES as CLASSES
from mctf.models.embedded import SMALL_WEIGHTS, WEIGHTS, pack_int8, unpack_int8
from mctf.models.loading import create, load_model

DATA = "Tiny-ImageNet-200, research data: images of ImageNet, whose owners keep their rights"
SMALL = "embedded_small"
IMAGES = 64
# of the largest logit: float16 moved those of a trained DeiT-Tiny by 0.0025 of it, int8 matrices by 0.08
TOLERANCE = {"embedded": 0.1, SMALL: 0.02}
MOST_BYTES = {"embedded": 6_000_000, SMALL: 4_000_000}


def pack(path: Path) -> tuple[str, bytes, str]:
    """The name of the model, the contents of its file, and how far its logits are from those of the run's weights."""
    about = read_evaluation(path.parent / "evaluation.json")
    name = SMALL if about["model"] == SMALL else "embedded"
    model: Any = load_model(name, weights=path)
    if model.num_classes != CLASSES:
        raise MctfError(f"{path} has {model.num_classes} classes: expected weights for the {CLASSES} of Tiny-ImageNet")
    state = model.state_dict()
    if name == SMALL:
        packed = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    else:
        packed = pack_int8(state)
    lost = [key for key, value in packed.items() if not value.isfinite().all()]
    if lost:
        raise MctfError(f"{lost[0]} of {path} does not fit into float16: pack the weights of another run")
    unpacked: Any = create(name)
    unpacked.load_state_dict(unpack_int8(packed))
    # all facts in one entry: safetensors writes several in random order
    content = save({key: value.contiguous() for key, value in packed.items()}, {"about": json.dumps(about)})
    if len(content) > MOST_BYTES[name]:
        raise MctfError(f"the file would have {len(content):,} bytes: the limit is {MOST_BYTES[name]:,}")
    return name, content, compare(unpacked, model, tolerance=TOLERANCE[name])


def read_evaluation(path: Path) -> dict[str, Any]:
    """The metadata of the file, from the evaluation that `mctf finetune --validation` writes."""
    if not path.is_file():
        raise MctfError(f"there is no {path}: it holds the accuracy, so train with --validation")
    facts = json.loads(path.read_text())
    return {
        "model": facts["model"],
        "command": without_folders(facts["command"]),
        "commit": facts["commit"],
        "data": DATA,
        "images": facts["images"],
        "top1": {str(row["r"]): row["top1"] for row in facts["rows"]},
        "method": facts["rows"][-1]["method"],
    }


def without_folders(command: str) -> str:
    """A command line without the folders of the machine it ran on: paths begin at recipes or runs, or are names."""
    words = [",".join(map(_shortened, word.split(","))) for word in shlex.split(command)]
    return shlex.join(words)


def _shortened(word: str) -> str:
    for folder in ("recipes/", "runs/"):
        if folder in word:
            return folder + word.rpartition(folder)[2]
    return word.rpartition("/")[2] if word.startswith(("/", ".", "~")) else word


@torch.inference_mode()
def compare(packed: nn.Module, original: nn.Module, *, tolerance: float) -> str:
    """A line on the largest difference of a logit on random images; raises MctfError where it exceeds `tolerance`."""
    size = getattr(original, "pretrained_cfg", {}).get("input_size", (3, 64, 64))
    images = torch.randn(IMAGES, *size, generator=torch.Generator().manual_seed(0))
    ours: Tensor = packed(images)
    theirs: Tensor = original(images)
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if difference > tolerance * largest:
        raise MctfError(f"packing moves a logit by {difference:.3g} of {largest:.3g}: pack the weights of another run")
    same = int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    return (
        f"largest difference of a logit {difference:.2g} of {largest:.3g}, "
        f"same top-1 class for {same} of {IMAGES} random images"
    )


def main(path: Path, output: Path | None = None) -> None:
    name, content, verdict = pack(path)
    output = output or (SMALL_WEIGHTS if name == SMALL else WEIGHTS)
    atomic_write(output, content)
    print(f"{output}: {len(content):,} bytes, {verdict}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
