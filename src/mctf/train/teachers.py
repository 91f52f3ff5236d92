"""Teachers: another model whose predictions are distilled, and the original model that some methods learn from.

Axes: B images, K classes, 3 H W.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Preprocessing
from ..errors import MctfError
from .two_branch import TeacherOutput, run_branch


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Knowledge distillation (Hinton et al., 2015).

    weight: the teacher's share of the loss; the labels have the rest. temperature: divides the logits of both models.
    """

    weight: float = 0.5
    temperature: float = 2.0

    def __call__(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """T^2 KL(teacher || student) at temperature T, from logits B K: mean over images."""
        student = F.log_softmax(logits / self.temperature, dim=1)
        teacher = F.log_softmax(teacher_logits / self.temperature, dim=1)
        return self.temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


class Teacher:
    """A frozen model that gets the student's images, resized and normalized for itself."""

    def __init__(self, model: nn.Module, *, student: Preprocessing, classes: int) -> None:
        """student: how the incoming images were prepared. classes: of the student."""
        own_classes = getattr(model, "num_classes", None)
        if own_classes != classes:
            raise MctfError(
                f"the teacher has {own_classes} classes, but the data has {classes}: train the teacher on it first"
            )
        self.model = model.eval().requires_grad_(False)
        own, device = Preprocessing.of(model), next(model.parameters()).device
        self.size, self.interpolation = own.image_size, own.interpolation
        # (x * std + mean - own mean) / own std, as one multiplication and one addition
        mean, std, own_mean, own_std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1)
            for values in (student.mean, student.std, own.mean, own.std)
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


class OriginalModel:
    """A frozen copy of the unfused model before training, in evaluation mode, for methods that learn from it.

    The copy is taken before the model is fused and before a checkpoint is loaded: a resumed run has the same original
    as an uninterrupted one.

    same_classes: whether its classifier has the classes of the data; if not, only its tokens are a target.
    """

    def __init__(self, model: nn.Module, *, same_classes: bool = True) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.same_classes = same_classes

    @torch.no_grad()
    def __call__(self, images: Tensor) -> TeacherOutput:
        """Its outputs on images B 3 H W."""
        branch = run_branch(self.model, images)
        return TeacherOutput(branch.tokens, branch.logits if self.same_classes else None)
