"""Write the weights that come with the package from a run: `python benchmarks/pack_embedded.py RUN/model.safetensors`.

RUN is the output of `mctf finetune --config recipes/tiny_imagenet/embedded_consistency.toml --validation … -o RUN`.
Weights become float16, which halves the file; loading converts them to float32. Before the file is written, the logits
of both for the same random images are compared. The same run gives the same file byte for byte.

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
from mctf.models.embedded import WEIGHTS
from mctf.models.loading import create, load_model

DATA = "Tiny-ImageNet-200, research data: images of ImageNet, whose owners keep their rights"
IMAGES = 64
TOLERANCE = 0.02  # of the largest logit; rounding to float16 moved those of a trained DeiT-Tiny by 0.0025 of it
MOST_BYTES = 4_000_000


def pack(path: Path) -> tuple[bytes, str]:
    """The contents of the file, and how far its logits are from those of the run's weights."""
    about = read_evaluation(path.parent / "evaluation.json")
    model: Any = load_model("embedded", weights=path)
    if model.num_classes != CLASSES:
        raise MctfError(f"{path} has {model.num_classes} classes: expected weights for the {CLASSES} of Tiny-ImageNet")
    halved = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    lost = [name for name, value in halved.items() if not value.isfinite().all()]
    if lost:
        raise MctfError(f"{lost[0]} of {path} does not fit into float16: pack the weights of another run")
    packed: Any = create("embedded")
    packed.load_state_dict(halved)
    # all facts in one entry: safetensors writes several in random order
    content = save({name: value.contiguous() for name, value in halved.items()}, {"about": json.dumps(about)})
    if len(content) > MOST_BYTES:
        raise MctfError(f"the file would have {len(content):,} bytes: the limit is {MOST_BYTES:,}")
    return content, compare(packed, model)


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
def compare(packed: nn.Module, original: nn.Module) -> str:
    """A line on the largest difference of a logit on random images; raises MctfError where it exceeds rounding."""
    images = torch.randn(IMAGES, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ours: Tensor = packed(images)
    theirs: Tensor = original(images)
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if difference > TOLERANCE * largest:
        raise MctfError(f"float16 moves a logit by {difference:.3g} of {largest:.3g}: pack the weights of another run")
    same = int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    return (
        f"largest difference of a logit {difference:.2g} of {largest:.3g}, "
        f"same top-1 class for {same} of {IMAGES} random images"
    )


def main(path: Path, output: Path = WEIGHTS) -> None:
    content, verdict = pack(path)
    atomic_write(output, content)
    print(f"{output}: {len(content):,} bytes, {verdict}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
