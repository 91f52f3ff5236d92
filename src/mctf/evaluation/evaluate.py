"""Accuracy, fidelity and throughput of one model under several settings, measured side by side in one pass.

Every batch goes through the baseline, the unfused model, and then through each setting. All rows see the same images,
and machine noise affects every row equally. Under torchrun every rank evaluates its own batches; rows cover all ranks.

A quantized copy of a setting is a row of its own, compared with the baseline like any other, and with its setting too.

Axes: B images, 3 H W.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import format_blocks
from ..api import find_stack, fuse, fused_stack
from ..core.schedule import ReductionSpec
from ..data import Batch
from ..distributed import all_gather_object
from ..errors import MctfError
from ..hosts import Architecture, find_host
from ..hosts.base import Host
from ..methods import make_method
from ..methods._layers import UntrainedWarning, stashed_layers
from ..models.loading import copy_sharing_weights
from ..planning import FusionRequest, Plan, plan
from ..quantization import Quantization, QuantizationRequest
from ..stack import RESTORES
from .adaptive_flops import MeasuredCost, count_tokens, measured_cost
from .fidelity import Output, Scores, average, concatenate, kl_divergence, run_model, score
from .significance import standard_error
from .timing import ThroughputMeter

BASELINE = "baseline"  # the method of the row that is added where no setting has r = 0


@dataclass(frozen=True)
class Setting:
    """One way to fuse the model, as `mctf.fuse` takes it. r = 0 is the baseline.

    options: of the method, as pairs of name and value. label: in place of the method's name in tables.
    dense, trim_last, restore: as for `mctf.fuse`.
    """

    method: str = "mctf"
    r: ReductionSpec = 16
    blocks: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    label: str | None = None
    dense: bool = False
    trim_last: bool | None = None
    restore: str = RESTORES[0]

    @classmethod
    def of(
        cls,
        request: FusionRequest,
        model: nn.Module,
        *,
        options: Mapping[str, Any],
        label: str = "",
        dense: bool = False,
        trim_last: bool | None = None,
        restore: str = RESTORES[0],
    ) -> "Setting":
        """What a request for a budget or a schedule comes to on a model, at the model's own image size."""
        setting = request.resolve(find_host(model), dense=dense, trim_last=trim_last)
        per_block = isinstance(setting.r, (tuple, list))
        blocks = None if per_block else setting.blocks
        name, pairs = setting.method.name, tuple(options.items())
        return cls(name, setting.r, blocks, pairs, label or None, dense, trim_last, restore)

    @property
    def is_baseline(self) -> bool:
        return self.r == 0 and not self.trim_last


@dataclass(frozen=True)
class Row:
    """Metrics of one setting: percentages from 0 to 100, None where unknown; `Fidelity` defines them.

    kl_error: standard error of kl over the images. The error of a difference between rows is usually smaller, as all
    rows see the same images: `Difference` computes it from the scores.
    mean_tokens: tokens after each block, averaged over the images, where each image decides how many remain; gflops is
    then averaged over the images too. None where both follow from the setting.
    precision: of a quantized row. kl_added: its kl above that of the unquantized row. kl_unquantized: KL(unquantized ||
    quantized), which is larger where fused models choose other tokens. quantized_share: of the linear layers' FLOPs.
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
    patch_cosine: float | None = None
    precision: str | None = None
    kl_added: float | None = None
    kl_unquantized: float | None = None
    quantized_share: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """One row per setting, preceded by the baseline's unless a setting has r = 0.

    notes: remarks on the rows. scores: per image for every row, all rows in the same order of images, all ranks.
    """

    images: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    scores: tuple[Scores, ...] = field(compare=False, repr=False)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    settings: Sequence[Setting],
    *,
    quantizations: Sequence[QuantizationRequest] = (),
    tick: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Run the baseline and every setting over all batches, on the device and in the dtype of the unfused model.

    The model is not changed: each fused setting is a copy that shares the weights, and all settings with r = 0 share
    one copy. Settings are checked before the first batch is read. `tick` is called `passes(settings)` times per batch.
    quantizations: of every row, in rows that follow it.
    """
    if find_stack(model) is not None:
        raise MctfError("the model is fused already: evaluate the unfused model, or run mctf.unfuse(model) first")
    host = find_host(model)
    for setting in settings:
        _check(setting, host)
    every = host.reads_every_token
    baseline = _Measured(copy_sharing_weights(model).eval(), every_token=every or any(each.dense for each in settings))
    measured = [
        baseline if setting.is_baseline else _Measured.fused(model, setting, every_token=every or setting.dense)
        for setting in settings
    ]
    shown = list(zip(settings, measured, strict=True))
    if baseline not in measured:
        shown.insert(0, (Setting(BASELINE, 0), baseline))
    shown = [
        (setting, row)
        for setting, each in shown
        for row in (each, *(each.quantized(request) for request in quantizations))
    ]
    unique = list(dict.fromkeys([baseline, *(each for _, each in shown)]))

    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise MctfError("there are no images to evaluate: give at least one batch")
    architecture = host.architecture((first.pixels.shape[2], first.pixels.shape[3]))
    weight = next(model.parameters())
    classifies = getattr(model, "num_classes", 0) > 0
    for batch in chain([first], batches):
        pixels = batch.pixels.to(weight.device, weight.dtype)
        reference = baseline.run(pixels)
        outputs: dict[_Measured, Output] = {}
        for each in unique:
            output = outputs[each] = reference if each is baseline else each.run(pixels)
            if each.unquantized is not None and classifies:
                before, after = (one.logits.cpu().double() for one in (outputs[each.unquantized], output))
                each.drift.append(kl_divergence(before, after))
            each.scores.append(score(output, reference, batch.labels, classifies=classifies, protected=host.protected))
            tick()
    for each in unique:
        each.gather()

    rows, notes = [], []
    for setting, each in shown:
        planned = _plan(model, setting, architecture)
        rows.append(each.row(setting, planned, architecture))
        if planned.capped and each.quantization is None:
            notes.append(
                f"{setting.method} r={setting.r} is capped (too few tokens) in {format_blocks(planned.capped)}"
            )
        if each.quantization is not None:
            notes.append(_note(rows[-1], each.quantization))
    for row in rows:
        if row.mean_tokens is not None:
            counts = " ".join(f"{count:.1f}" for count in row.mean_tokens)
            notes.append(f"{row.method} r={row.r} depends on the image (~): tokens after each block {counts}")
    if not classifies:
        notes.append("the model has no classifier: agreement, KL and accuracy are unknown")
    untrained = dict.fromkeys(setting.method for setting, each in shown if each.untrained)
    notes.extend(f"the layers of {name} are untrained: fine-tune the model with it" for name in untrained)
    scores = tuple(concatenate(each.scores) for _, each in shown)
    return Evaluation(len(scores[0].class_cosine), tuple(rows), tuple(notes), scores)


def passes(settings: Sequence[Setting], quantizations: int = 0) -> int:
    """Number of models that `evaluate` runs on every batch: one per setting that fuses, and the baseline.

    quantizations: of every row, also of each with r = 0.
    """
    fused = sum(not setting.is_baseline for setting in settings)
    return 1 + fused + quantizations * max(fused + 1, len(settings))


def _note(row: Row, quantization: Quantization) -> str:
    """What quantizing a row costs, and what of it is quantized."""
    cost = f"{row.method} r={row.r}"
    if row.kl_added is not None:
        cost += (
            f": {row.precision} adds KL {row.kl_added:.4f}, and is at KL {row.kl_unquantized:.4f} from it unquantized"
        )
    return f"{cost}; {quantization}"


def _check(setting: Setting, host: Host) -> None:
    """Raise MctfError for a setting that this model cannot be fused with; r = 0 is checked like any other r."""
    method = make_method(setting.method, dict(setting.options)).resolve(class_token=host.class_token)
    method.make_schedule(setting.r, depth=host.depth, blocks=setting.blocks)


def _plan(model: nn.Module, setting: Setting, architecture: Architecture) -> Plan:
    if setting.method == BASELINE:
        return plan(model, r=0, architecture=architecture)
    return plan(
        model,
        r=setting.r,
        blocks=setting.blocks,
        method=setting.method,
        dense=setting.dense,
        trim_last=setting.trim_last,
        architecture=architecture,
        **dict(setting.options),
    )


@dataclass(eq=False)
class _Measured:
    """A model under one setting and what was measured with it.

    every_token: whether it returns one token per input token.
    untrained: whether the method has layers without trained weights. counts: tokens per image, for adaptive methods.
    unquantized: of a quantized model, the same setting in the model's dtype. drift: KL to it, per batch.
    """

    model: nn.Module
    every_token: bool
    adaptive: bool = False
    untrained: bool = False
    counts: list[Tensor] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    throughput: ThroughputMeter = field(default_factory=ThroughputMeter)
    images_per_second: float = 0.0
    unquantized: "_Measured | None" = None
    drift: list[Tensor] = field(default_factory=list)

    @property
    def quantization(self) -> Quantization | None:
        return None if self.unquantized is None else Quantization.of(self.model)

    def quantized(self, request: QuantizationRequest) -> "_Measured":
        """The same setting, quantized."""
        model = request.apply(copy_sharing_weights(self.model))
        return _Measured(model, self.every_token, self.adaptive, self.untrained, unquantized=self)

    @classmethod
    def fused(cls, model: nn.Module, setting: Setting, *, every_token: bool) -> "_Measured":
        with warnings.catch_warnings(action="ignore", category=UntrainedWarning):  # a note reports it
            fused = fuse(
                copy_sharing_weights(model),
                setting.method,
                r=setting.r,
                blocks=setting.blocks,
                dense=setting.dense,
                trim_last=setting.trim_last,
                restore=setting.restore,
                **dict(setting.options),
            )
        stack = fused_stack(fused)
        untrained = bool(stack.layers) and not stashed_layers(model)
        return cls(fused.eval(), every_token, stack.method.adaptive, untrained)

    def run(self, pixels: Tensor) -> Output:
        """Predictions for one batch; the forward pass is timed."""
        timer = partial(self.throughput.run, images=len(pixels), device=pixels.device)
        output = run_model(self.model, pixels, timer, every_token=self.every_token)
        if not output.logits.isfinite().all():
            raise MctfError(f"the model gives infinite or undefined numbers in {pixels.dtype}: use float32 or bfloat16")
        if self.adaptive:  # in a separate pass: tracing takes time
            self.counts.append(count_tokens(self.model, pixels))
        return output

    def gather(self) -> None:
        """Add the measurements of the other ranks; their throughputs add up."""
        ranks = all_gather_object((self.scores, self.counts, self.drift, self.throughput.images_per_second))
        self.scores = [scores for batches, *_ in ranks for scores in batches]
        self.counts = [counts for _, batches, *_ in ranks for counts in batches]
        self.drift = [drift for *_, batches, _ in ranks for drift in batches]
        self.images_per_second = sum(speed for *_, speed in ranks)

    def row(self, setting: Setting, planned: Plan, architecture: Architecture) -> Row:
        cost: MeasuredCost | Plan = planned
        if self.adaptive:
            cost = measured_cost(self.model, torch.cat(self.counts), architecture)
        scores = concatenate(self.scores)
        quantization, quantized = self.quantization, dict[str, Any]()
        if quantization is not None and self.unquantized is not None:
            before = concatenate(self.unquantized.scores).kl
            quantized = {
                "precision": quantization.precision,
                "kl_added": None if scores.kl is None or before is None else (scores.kl - before).mean().item(),
                "kl_unquantized": torch.cat(self.drift).mean().item() if self.drift else None,
                "quantized_share": quantization.share,
            }
        return Row(
            r=setting.r,
            method=setting.label or setting.method,
            **asdict(average(scores)),
            kl_error=None if scores.kl is None else standard_error(scores.kl),
            gflops=cost.gflops,
            images_per_second=self.images_per_second,
            mean_tokens=cost.token_counts if isinstance(cost, MeasuredCost) else None,
            **quantized,
        )
