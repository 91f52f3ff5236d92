"""The model as it was before training, for methods that learn from it.

The copy is made when a run is put together, before the model is fused and before a checkpoint is put back: a run that
goes on has the same original as one that never stopped.

Axes: B images, 3 H W.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Preprocessing
from ..errors import MctfError
from .two_branch import TeacherOutput, run_branch


class Original:
    """A frozen copy of a plain model, in evaluation mode.

    knows_classes: whether its classifier was trained for the classes of the data; if not, only its tokens teach.
    """

    def __init__(self, model: nn.Module, *, knows_classes: bool = True) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.knows_classes = knows_classes

    @torch.no_grad()
    def __call__(self, images: Tensor) -> TeacherOutput:
        """What it says of images B 3 H W."""
        branch = run_branch(self.model, images)
        return TeacherOutput(branch.tokens, branch.logits if self.knows_classes else None)


# MERGED from mctf.train.teachers:
# Learning from a teacher's answers (Hinton et al., 2015).
#
# Axes: B images, K classes, 3 H W.


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """weight: the teacher's share of the loss, the labels have the rest. temperature: softens both answers."""

    weight: float = 0.5
    temperature: float = 2.0

    def __call__(self, logits: Tensor, taught: Tensor) -> Tensor:
        """T^2 KL(teacher || student) of the answers softened by T, from logits B K: mean over images."""
        student = F.log_softmax(logits / self.temperature, dim=1)
        teacher = F.log_softmax(taught / self.temperature, dim=1)
        return self.temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


class Teacher:
    """A frozen model that sees the student's images in its own size and normalisation."""

    def __init__(self, model: nn.Module, *, seen_by: Preprocessing, classes: int) -> None:
        """seen_by: how the images it is given were prepared, for the student. classes: of the student."""
        known = getattr(model, "num_classes", None)
        if known != classes:
            raise MctfError(
                f"the teacher knows {known} classes, but the data has {classes}: train the teacher on it first"
            )
        self.model = model.eval().requires_grad_(False)
        own, device = Preprocessing.of(model), next(model.parameters()).device
        self.size, self.interpolation = own.image_size, own.interpolation
        # (x * std + mean - own mean) / own std, as one multiplication and one addition
        mean, std, own_mean, own_std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1)
            for values in (seen_by.mean, seen_by.std, own.mean, own.std)
        )
        self.scale, self.shift = std / own_std, (mean - own_mean) / own_std

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits B K in float32 for the student's images B 3 H W."""
        images = images * self.scale + self.shift
        if images.shape[-2:] != self.size:
            mode = self.interpolation if self.interpolation in ("bilinear", "bicubic") else "bicubic"
            images = F.interpolate(images, self.size, mode=mode, antialias=True)
        return self.model(images).float()
