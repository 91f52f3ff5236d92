"""quantize and unquantize: the linear layers of a model's blocks in fp8 or int8, in place and reversible.

    mctf.quantize(model, "fp8", calibration=images)   # a GPU with fp8 tensor cores; images preprocessed, B 3 H W
    mctf.quantize(model, "int8")                       # a CPU
    mctf.unquantize(model)                             # bit for bit the model before

Queries, keys and values, the projection of attention and both layers of the MLP are quantized. Patch embedding, norms,
attention, matching and the head keep their dtype. Fusing and quantizing are independent: either may come first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._utils import plural
from .errors import MctfError, did_you_mean, shown
from .hosts import find_host
from .hosts._inspect import can_slice, has_hooks
from .kernels.quantized_linear import FP8_MULTIPLE, KINDS, QuantizedLinear
from .methods.base import check_number

# Linear layers that see no tokens: of tables of positions, and those of CaiT that mix the heads of attention maps.
_NO_TOKENS = ("rel_pos", "relative_position", "proj_l", "proj_w")
# The share of the range of fp8 that calibration leaves free: floating point loses no precision by it, and images that
# were not seen keep their outliers.
_HEADROOM = 2.0
_LARGEST_FP8 = 448.0
_RANKED_IMAGES = 32  # on which layers are compared; the bar is checked on all images
SENSITIVE, UNSEEN = "sensitive", "did not run in calibration"


@dataclass(frozen=True)
class Quantization:
    """What is quantized in a model.

    precision: "fp8" or "int8". layers: by name. scales: of the inputs by layer, in fp8: a `calibration` for another
    copy of the model. kept: linear layers of the blocks that keep their dtype, each with the reason.
    share: of the multiply-adds per token of all linear layers of the blocks. kl: added on the calibration images; None
    without `max_kl`. native: whether the device multiplies in this precision, so that it can be faster.
    """

    precision: str
    layers: tuple[str, ...]
    scales: Mapping[str, float]
    kept: Mapping[str, str]
    share: float
    kl: float | None
    native: bool

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The quantization of a model, None where it has none."""
        model = _uncompiled(model)
        found = dict(_quantized(model))
        if not found:
            return None
        first = next(iter(found.values()))
        every = linear_layers(model)
        macs = {name: layer.in_features * layer.out_features for name, layer in every.items()}
        return cls(
            precision=first.kind,
            layers=tuple(found),
            scales={name: layer.input_scale.item() for name, layer in found.items() if len(layer.input_scale)},
            kept={
                name: vars(layer).get("mctf_kept") or _why_kept(model, name, layer, first.kind) or UNSEEN
                for name, layer in every.items()
                if name not in found
            },
            share=sum(macs[name] for name in found) / sum(macs.values()),
            kl=vars(first).get("added_kl"),
            native=all(layer.native for layer in found.values()),
        )

    def __str__(self) -> str:
        total = len(self.layers) + len(self.kept)
        parts = [f"{self.precision}: {len(self.layers)} of {plural(total, 'linear layer')} in the blocks"]
        parts.append(f"{self.share:.0%} of their FLOPs")
        if self.kl is not None:
            parts.append(f"KL {self.kl:.4f} on the calibration images")
        reasons = list(self.kept.values())
        parts += [f"{reasons.count(each)} kept: {each}" for each in dict.fromkeys(reasons)]
        if not self.native:
            parts.append("emulated: this device has no such arithmetic, so it brings no speed")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class QuantizationRequest:
    """What `quantize` is asked for; see there."""

    precision: str
    calibration: Any = None
    max_kl: float | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        return quantize(model, self.precision, calibration=self.calibration, max_kl=self.max_kl)


def quantize(
    model: nn.Module,
    precision: str,
    *,
    calibration: Any = None,
    max_kl: float | None = None,
) -> nn.Module:
    """Quantize the linear layers of a model's blocks, fused or not, in place; `unquantize` takes it back.

    precision: "fp8", for GPUs with such tensor cores (Ada, Hopper and later), or "int8", for CPUs. On other devices
        the arithmetic is emulated: same results, no speed.
    calibration: what fp8 takes the ranges of its inputs from: preprocessed images (B 3 H W), batches of them, a
        function that runs the model, or `Quantization.of` another copy. int8 measures each token as it runs.
    max_kl: the KL to the unquantized model that quantizing may add on the calibration images. Where all layers together
        add more, the most sensitive ones per FLOP keep their dtype. By default all layers are quantized.

    Layers whose sizes are no multiple of 16 keep their dtype in fp8, as do layers that are adapted, hooked or quantized
    by others. `Quantization.of(model)` says what became of each. The state_dict does not change; loading one quantizes
    it again. The weights stay in memory beside their quantized copies. A quantized model has no gradients.
    Everything is checked before the model is touched. Returns the same model.
    """
    whole, model = model, _uncompiled(model)
    if not isinstance(precision, str) or precision not in KINDS:
        hint = did_you_mean(precision, KINDS) if isinstance(precision, str) else f"choose from {', '.join(KINDS)}"
        raise MctfError(f"precision {shown(precision)} is unknown: {hint}")
    if max_kl is not None:
        check_number(max_kl=max_kl)
    find_host(model)
    if next(_quantized(model), None) is not None:
        raise MctfError("the model is quantized already: run mctf.unquantize(model) first")
    layers = linear_layers(model)
    chosen = {name: layer for name, layer in layers.items() if not _why_kept(model, name, layer, precision)}
    if not chosen:
        why = next((_why_kept(model, name, layer, precision) for name, layer in layers.items()), "it has none")
        raise MctfError(f"no linear layer of the blocks can be {precision} ({why}): leave the model as it is")
    batches = _batches(calibration, needed=precision == "fp8" or max_kl is not None, precision=precision)
    if max_kl is not None and not isinstance(batches, list):
        raise MctfError("max_kl compares outputs on images: give calibration images, not scales or a function")
    with torch.inference_mode(False), torch.no_grad():
        scales = _input_scales(model, chosen, batches) if precision == "fp8" else dict.fromkeys(chosen)
        made = {name: QuantizedLinear.of(chosen[name], precision, scale) for name, scale in scales.items()}
        kept, kl = (set(), None) if max_kl is None else _within(model, made, batches, max_kl)
        for name, layer in layers.items():
            vars(layer).pop("mctf_kept", None)
            if name in kept:
                vars(layer)["mctf_kept"] = SENSITIVE
        for name in made.keys() - kept:
            vars(made[name])["added_kl"] = kl
            model.set_submodule(name, made[name])
    return whole


def unquantize(model: nn.Module) -> nn.Module:
    """Restore the linear layers in place; the model computes bit for bit what it did before `quantize`."""
    inner = _uncompiled(model)
    layers = dict(_quantized(inner))
    if not layers:
        raise MctfError("the model is not quantized: there is nothing to undo")
    for name, layer in layers.items():
        inner.set_submodule(name, layer.restored())
    return model


def _uncompiled(model: Any) -> Any:
    """The model behind torch.compile; raises MctfError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise MctfError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    return getattr(model, "_orig_mod", model)


def _quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the blocks that tokens go through, by their names in the model."""
    container = find_host(model).container
    prefix = next(name for name, module in model.named_modules() if module is container)
    return {
        f"{prefix}.{name}" if prefix else name: module
        for name, module in container.named_modules()
        if isinstance(module, nn.Linear) and not any(part in name for part in _NO_TOKENS)
    }


def _why_kept(model: nn.Module, name: str, layer: nn.Linear, precision: str) -> str | None:
    """Why a layer cannot be quantized; None where it can."""
    if type(layer) is not nn.Linear or not can_slice(layer.weight):
        return "of another library"
    if has_hooks(layer) or "forward" in vars(layer):
        return "with hooks"
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    if getattr(owner, "q_bias", None) is not None and not owner.qkv_bias_separate and layer is owner.qkv:
        return "its weight is read by the layer around it"
    if precision == "fp8" and (layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE):
        return f"a size is no multiple of {FP8_MULTIPLE}"
    return None


def _batches(calibration: Any, *, needed: bool, precision: str) -> Any:
    """Calibration in one form: a list of batches of images, a function, or scales by name; None where not used."""
    if calibration is None:
        if needed:
            raise MctfError(
                f"{precision} needs calibration images: pass calibration=images, preprocessed, B x 3 x H x W"
            )
        return None
    if isinstance(calibration, Quantization):
        return calibration.scales
    if isinstance(calibration, Mapping) or callable(calibration):
        return calibration
    try:
        batches = list(calibration.split(32)) if isinstance(calibration, Tensor) and calibration.dim() else calibration
        batches = [batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches]
    except TypeError:
        batches = [None]
    if not all(isinstance(batch, Tensor) and batch.dim() == 4 for batch in batches):
        raise MctfError(
            "calibration should be images of B x 3 x H x W, batches of them, a function, or scales by layer"
        )
    if not any(len(batch) for batch in batches):
        raise MctfError("calibration holds no images: give at least one, better a hundred")
    return batches


def _input_scales(model: nn.Module, layers: Mapping[str, nn.Linear], calibration: Any) -> dict[str, float]:
    """What the inputs of each layer are divided by, for the layers that calibration covers."""
    if isinstance(calibration, Mapping):
        unknown = next((name for name in calibration if name not in layers), None)
        if unknown is not None or not calibration:
            what = "is empty" if unknown is None else f"names {shown(unknown)}, which the model cannot have in fp8"
            raise MctfError(f"the calibration {what}: give the scales of the same model")
        bad = next((name for name, scale in calibration.items() if not _is_scale(scale)), None)
        if bad is not None:
            raise MctfError(f"the scale of {bad} is {shown(calibration[bad])}: give numbers above 0")
        return {name: float(calibration[name]) for name in layers if name in calibration}
    largest: dict[str, Tensor] = {}

    def record(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        here = inputs[0].detach().abs().amax().float()
        largest[name] = torch.maximum(largest[name], here) if name in largest else here

    handles = [layer.register_forward_pre_hook(partial(record, name)) for name, layer in layers.items()]
    try:
        with _evaluating(model):
            if callable(calibration):
                calibration(model)
            else:
                for batch in calibration:
                    _outputs(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    scales = {name: _HEADROOM * largest[name].item() / _LARGEST_FP8 for name in layers if name in largest}
    bad = next((name for name, scale in scales.items() if not scale < float("inf")), None)
    if bad is not None:
        raise MctfError(f"the inputs of {bad} are not finite on the calibration images: check images and weights")
    if not scales:
        raise MctfError("no layer of the model ran in calibration: the function should call the model")
    return {name: scale or 1.0 for name, scale in scales.items()}


def _is_scale(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; modes of single modules are restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _outputs(model: nn.Module, images: Tensor) -> Any:
    """Logits, from images in whatever dtype and place; None where there are none."""
    weight = next(model.parameters())
    outputs: Any = model(images.to(weight.device, weight.dtype))
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)


def _within(
    model: nn.Module, made: Mapping[str, QuantizedLinear], batches: Sequence[Tensor], max_kl: float
) -> tuple[set[str], float]:
    """Names of the layers that keep their dtype so that the others add at most this KL, and the KL that they add.

    A layer is ranked by the KL that it adds alone per FLOP. As many of the first as it takes are kept, by bisection.
    """
    originals = {name: model.get_submodule(name) for name in made}
    few = list(torch.cat(list(batches))[:_RANKED_IMAGES].split(32))
    with _evaluating(model):
        references = [_outputs(model, batch) for batch in batches]
        if not all(isinstance(each, Tensor) and each.dim() == 2 for each in references):
            raise MctfError("max_kl needs logits, B x K, and this model gives none: leave it out")

        def added(names: Iterable[str], images: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
            names = list(names)
            for name in names:
                model.set_submodule(name, made[name])
            try:
                outputs = [_outputs(model, batch) for batch in images]
            finally:
                for name in names:
                    model.set_submodule(name, originals[name])
            return _mean_kl(torch.cat(list(expected)), torch.cat(outputs))

        whole = added(made, batches, references)
        if whole <= max_kl:
            return set(), whole
        some = [_outputs(model, batch) for batch in few]
        cost = {name: layer.in_features * layer.out_features for name, layer in made.items()}
        ranked = sorted(made, key=lambda name: -added([name], few, some) / cost[name])
        low, high, best = 0, len(ranked), 0.0  # `low` kept layers are too few, `high` are enough
        while high - low > 1:
            middle = (low + high) // 2
            kl = added(ranked[middle:], batches, references)
            low, high, best = (middle, high, best) if kl > max_kl else (low, middle, kl)
    if high == len(ranked):
        raise MctfError(
            f"every layer alone adds more than a KL of {max_kl:g}: raise max_kl, or leave the model as it is"
        )
    return set(ranked[:high]), best


def _mean_kl(reference: Tensor, logits: Tensor) -> float:
    log_p, log_q = F.log_softmax(reference.double(), dim=1), F.log_softmax(logits.double(), dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean().item()
