"""The model as it was before training, for methods that learn from it.

The copy is made when a run is put together, before the model is fused and before a checkpoint is put back: a run that
goes on has the same original as one that never stopped.

Axes: B images, 3 H W.
"""

import copy

import torch
from torch import Tensor, nn

from .branches import Lesson, run_branch


class Original:
    """A frozen copy of a plain model, in evaluation mode.

    knows_classes: whether its classifier was trained for the classes of the data; if not, only its tokens teach.
    """

    def __init__(self, model: nn.Module, *, knows_classes: bool = True) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.knows_classes = knows_classes

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Lesson:
        """What it says of images B 3 H W."""
        branch = run_branch(self.model, images)
        return Lesson(branch.tokens, branch.logits if self.knows_classes else None)
