"""Accuracy, fidelity and speed of one model under several settings, measured side by side in one pass.

Every batch goes through the plain model and then through each setting, so that all rows see the same images and
the same moods of the machine. Under torchrun every process brings batches of its own; the rows are over all of them.

Axes: B images, 3 H W.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import format_blocks
from ..api import fuse, fused_stack
from ..core.schedule import ReductionSpec
from ..data import Batch
from ..distributed import all_gather_object
from ..errors import MctfError
from ..methods._layers import UntrainedWarning, stashed_layers
from ..models.loading import copy_sharing_weights
from ..planning import Plan, plan
from .adaptive_flops import Measured, count_tokens, summarise
from .fidelity import Output, Scores, average, concatenate, score
from .significance import standard_error
from .timing import Pace

BASE = "base"  # the method of a row that shows the plain model without having been asked for r = 0


@dataclass(frozen=True)
class Setting:
    """One way to fuse the model, as `mctf.fuse` takes it. r = 0 stands for the plain model.

    options: of the method, as pairs of name and value.
    """

    method: str = "mctf"
    r: ReductionSpec = 16
    blocks: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_plain(self) -> bool:
        return self.r == 0


@dataclass(frozen=True)
class Row:
    """One setting measured: percentages from 0 to 100, None where unknown. `Fidelity` says what they mean.

    kl_error: standard error of kl over the images. A difference between rows has a smaller one as a rule, as they saw
    the same images: `Difference` gives it from the scores.
    mean_tokens: tokens leaving each block, in the mean over the images, where each image decides for itself; gflops is
    then a mean over the images as well. None where both follow from the setting.
    """

    r: ReductionSpec
    method: str
    top1: float | None
    top5: float | None
    agreement: float | None
    kl: float | None
    kl_error: float | None
    class_cosine: float | None
    gflops: float
    images_per_second: float
    mean_tokens: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Evaluation:
    """One row a setting; the plain model's comes before them unless r = 0 shows it. notes: what to know of them.

    scores: of every row image by image, all rows in the same order of images; of all processes under torchrun.
    """

    images: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    scores: tuple[Scores, ...] = field(compare=False, repr=False)


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Iterable[Batch], settings: Sequence[Setting]) -> Evaluation:
    """Run an unfused model plain and under every setting over all batches, on the device and in the dtype it has.

    The model is not changed: each setting has a copy of its own that shares the weights.
    """
    plain, *contenders = [_Contender.of(model, setting) for setting in (Setting(r=0), *settings)]
    contenders = [plain if setting.is_plain else each for setting, each in zip(settings, contenders, strict=True)]
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        raise MctfError("there are no images to evaluate: give at least one batch")
    size = (first.pixels.shape[2], first.pixels.shape[3])
    plans = [
        plan(model, r=each.r, blocks=each.blocks, method=each.method, image_size=size, **dict(each.options))
        for each in settings
    ]

    weight = next(model.parameters())
    classifies = getattr(model, "num_classes", 0) > 0
    everyone = list(dict.fromkeys([plain, *contenders]))
    for batch in chain([first], remaining):
        pixels = batch.pixels.to(weight.device, weight.dtype)
        _measure(everyone, pixels, batch.labels, classifies)
    for each in everyone:
        each.gather()
    shown = [(setting.method, each, made) for setting, each, made in zip(settings, contenders, plans, strict=True)]
    if plain not in contenders:
        shown.insert(0, (BASE, plain, plan(model, r=0, image_size=size)))
    rows = tuple(_row(method, each, made, each.measured(size)) for method, each, made in shown)
    scores = tuple(concatenate(each.seen) for _, each, _ in shown)
    untrained = [setting.method for setting, each in zip(settings, contenders, strict=True) if each.untrained]
    notes = (*_notes(plans, rows, classifies), *_untrained_notes(untrained))
    return Evaluation(plain.images, rows, notes, scores)


@dataclass(eq=False)
class _Contender:
    """A model under one setting, with what was seen of it. counts: tokens of each image, where images decide.

    untrained: whether the method has layers that nobody has trained.
    """

    model: nn.Module
    adaptive: bool = False
    untrained: bool = False
    counts: list[Tensor] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)
    seen: list[Scores] = field(default_factory=list)
    images_per_second: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, setting: Setting) -> "_Contender":
        """Every setting is fused, so that all of them are checked; r = 0 is then run as the plain model itself."""
        options = dict(setting.options)
        with warnings.catch_warnings(action="ignore", category=UntrainedWarning):  # a note says it
            fused = fuse(copy_sharing_weights(model), setting.method, r=setting.r, blocks=setting.blocks, **options)
        if setting.is_plain:
            return cls(copy_sharing_weights(model).eval())
        stack = fused_stack(fused)
        return cls(fused.eval(), stack.method.adaptive, untrained=bool(stack.layers) and not stashed_layers(model))

    @property
    def images(self) -> int:
        return sum(len(scores.class_cosine) for scores in self.seen)

    def gather(self) -> None:
        """Add what the other processes have seen; together they are as fast as their sum."""
        parts = all_gather_object((self.seen, self.counts, self.pace.images_per_second))
        self.seen = [scores for seen, _, _ in parts for scores in seen]
        self.counts = [counted for _, counts, _ in parts for counted in counts]
        self.images_per_second = sum(pace for _, _, pace in parts)

    def measured(self, image_size: tuple[int, int]) -> Measured | None:
        """What the images cost; None where that follows from the setting."""
        return summarise(self.model, torch.cat(self.counts), image_size=image_size) if self.adaptive else None

    def run(self, pixels: Tensor) -> Output:
        """The model's forward pass, timed, and then what its classifier has read."""
        model = self.model

        def forward() -> tuple[Tensor, Tensor]:
            tokens = model.forward_features(pixels)  # type: ignore[operator]
            return tokens, model.forward_head(tokens)  # type: ignore[operator]

        tokens, logits = self.pace.run(forward, images=len(pixels), device=pixels.device)
        if not logits.isfinite().all():
            raise MctfError(f"the model gives infinite or undefined numbers in {pixels.dtype}: use float32 or bfloat16")
        if self.adaptive:  # in a pass of its own: watching takes time
            self.counts.append(count_tokens(model, pixels))
        return Output(logits, model.forward_head(tokens, pre_logits=True))  # type: ignore[operator]


def _measure(contenders: Sequence[_Contender], pixels: Tensor, labels: Tensor | None, classifies: bool) -> None:
    """One batch through all of them; the first is what the others are compared with."""
    reference = contenders[0].run(pixels)
    for contender in contenders:
        output = reference if contender is contenders[0] else contender.run(pixels)
        contender.seen.append(score(output, reference, labels, classifies=classifies))


def _row(method: str, contender: _Contender, made: Plan, measured: Measured | None) -> Row:
    kl = concatenate(contender.seen).kl
    return Row(
        r=made.r,
        method=method,
        **asdict(average(contender.seen)),
        kl_error=None if kl is None else standard_error(kl),
        gflops=made.gflops if measured is None else measured.gflops,
        images_per_second=contender.images_per_second,
        mean_tokens=None if measured is None else measured.token_counts,
    )


def _notes(plans: Sequence[Plan], rows: Sequence[Row], classifies: bool) -> tuple[str, ...]:
    notes = []
    for each in plans:
        if each.capped:
            notes.append(f"{each.method} r={each.r} is capped for want of tokens in {format_blocks(each.capped)}")
    for row in rows:
        if row.mean_tokens is not None:
            counts = " ".join(f"{count:.1f}" for count in row.mean_tokens)
            notes.append(f"{row.method} r={row.r} depends on the image (~): tokens leaving each block {counts}")
    if not classifies:
        notes.append("the model has no classifier: agreement, KL and accuracy are unknown")
    return tuple(notes)


def _untrained_notes(methods: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"the layers of {name} are untrained: fine-tune the model with it" for name in dict.fromkeys(methods))
