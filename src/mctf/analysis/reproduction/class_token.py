"""How far the class token drifts, block by block, from what it is in the plain model (paper, appendix, Table B).

The cosine is between the class tokens of the residual stream after each block, fused and plain, in the mean over
images; near 1 means that little was lost. After the last block the cosine of single images is kept as well.

Axes: B images, L blocks, C channels.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...api import fuse, fused_stack
from ...hosts import find_host
from ...methods.base import Step
from ...models.sharing import copy_sharing_weights
from .criteria import ALL, options_of
from .experiment import Experiment, Result, Subject, Task
from .studies import R

CRITERIA = ("sim", "info", "size", "sim+info", ALL)


class ClassToken(Experiment):
    """Under every set of criteria that the paper lists."""

    name = "class_token"
    title = "What the class token loses"
    measures = f"Cosine between the class tokens of the fused and the plain model after each block, r = {R}."
    sources = ("Table B",)
    form: ClassVar[int] = 2

    def steps(self, task: Task) -> int:
        return len(task.seen.batches) * (1 + len(CRITERIA))

    def unsuited(self, subject: Subject) -> str | None:
        return None if find_host(subject.model).class_token else "the model has no class token"

    @torch.inference_mode()
    def run(self, task: Task) -> Result:
        model = task.seen.model
        plain = fuse(copy_sharing_weights(model), r=0).eval()
        fused = {name: fuse(copy_sharing_weights(model), r=R, **options_of(name)).eval() for name in CRITERIA}
        seen: dict[str, list[Tensor]] = {name: [] for name in CRITERIA}
        for batch in task.batches(1 + len(CRITERIA)):
            pixels = task.seen.to_model(batch.pixels)
            reference = class_tokens(plain, pixels)
            for name, each in fused.items():
                seen[name].append(F.cosine_similarity(class_tokens(each, pixels), reference, dim=2))
        whole = {name: torch.cat(parts) for name, parts in seen.items()}
        cosine = {name: found.mean(dim=0).tolist() for name, found in whole.items()}
        last = {name: found[:, -1].tolist() for name, found in whole.items()}
        return {"images": len(task.seen), "r": R, "cosine": cosine, "last": last}


def class_tokens(model: nn.Module, pixels: Tensor) -> Tensor:
    """The class token after each block of a fused model: B L C, float64 on the CPU."""
    watcher = _Watcher()
    with fused_stack(model).watched_by(watcher):
        model(pixels)
    return torch.stack(watcher.tokens, dim=1).cpu().double()


class _Watcher:
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def record(self, index: int, x: Tensor, step: Step) -> None:
        self.tokens.append(step.x[:, 0])


def order(cosine: Mapping[str, Sequence[float]]) -> list[str]:
    """Criteria from the one that loses least after the last block to the one that loses most."""
    return sorted(cosine, key=lambda name: -cosine[name][-1])
