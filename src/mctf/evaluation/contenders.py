"""Contenders of a benchmark: one model unfused, fused by each method, and with tokens dropped at no cost.

They share the weights:

    baseline         the unfused model
    baseline_matmul  the unfused model, patch embedding as a matrix product
    mctf, tome, ...  fused by this method
    free_drop        the free-drop upper bound: in each block as many tokens dropped as the first method removes,
                     without choosing them; with a budget, as many as keep the same share of the FLOPs
    free_drop_conv   the same with the patch embedding as a convolution

On a GPU in reduced precision a fused model embeds patches by a matrix product, which is faster than the convolution.
The speed-up over `baseline` includes that gain; the speed-up over `baseline_matmul` is due to fewer tokens alone. In
other cases the product is not used, and `baseline_matmul` and `free_drop_conv` are left out.

Quantized contenders follow: baseline and methods, calibrated on the images that are timed. Their speed-ups are over
the same baselines, which are not quantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..errors import MctfError, did_you_mean
from ..hosts import find_host
from ..hosts.patch_embed import MatmulPatchEmbed
from ..models.loading import copy_sharing_weights
from ..planning import FusionRequest, plan
from ..quantization import quantize
from ..schedule_file import Schedule

BASELINE, BASELINE_MATMUL = "baseline", "baseline_matmul"
FREE_DROP, FREE_DROP_CONV = "free_drop", "free_drop_conv"
LABELS = {
    BASELINE_MATMUL: "baseline, matmul patch embedding",
    FREE_DROP: "free-drop upper bound",
    FREE_DROP_CONV: "free-drop upper bound, conv patch embedding",
}
_CALIBRATED_IMAGES = 8


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is timed: methods with one r, at one batch and image size.

    flops, schedule: in place of r, a share of the baseline's FLOPs, or a schedule with its method.
    blocks: that fuse, by default those of the method.
    trim_last: as for `mctf.fuse`, for all methods; the free-drop upper bound, too, where its last block drops nothing.
    precisions: in which baseline and methods are timed as well, see `mctf.quantize`.
    """

    methods: tuple[str, ...]
    r: ReductionSpec | None
    batch: int
    image_size: tuple[int, int]
    compiled: str | None = None  # None for eager, else the mode of torch.compile
    rounds: int = 7
    training: torch.dtype | None = None  # forward and backward under autocast to this dtype; None for forward alone
    flops: float | None = None
    blocks: tuple[int, ...] | None = None
    schedule: Schedule | None = None
    trim_last: bool | None = None
    precisions: tuple[str, ...] = ()
    bounds: bool = True  # whether the upper bounds and the baseline with a matrix product are contenders

    def __post_init__(self) -> None:
        if self.precisions and self.training is not None:
            raise MctfError("a quantized model is not trained: leave out --training, or --precision")
        if self.compiled is not None and self.compiled not in (modes := torch._inductor.list_mode_options()):
            raise MctfError(f"{self.compiled!r} is no mode of torch.compile: {did_you_mean(self.compiled, modes)}")

    @property
    def amount(self) -> str:
        """How much is fused, for a title."""
        if self.schedule is not None:
            return f"a schedule of {self.schedule.method}"
        amount = f"r={self.r}" if self.flops is None else f"flops={self.flops:g}"
        return amount if self.blocks is None else f"{amount} in blocks {','.join(map(str, self.blocks))}"

    def reduction(self, model: nn.Module, method: str) -> dict[str, Any]:
        """r, trim_last and the options of a method, as `fuse` and `plan` take them."""
        if method == FREE_DROP and self.flops is None and (dropped := self._dropped(model)) is not None:
            return dropped
        if self.schedule is not None:
            options = self.schedule.options if method == self.schedule.method else {}
            return {"r": self.schedule.r, "trim_last": self.trim_last, **options}
        request = FusionRequest.of(method, r=self.r, flops=self.flops, blocks=self.blocks, schedule=None, options={})
        host = find_host(model)
        setting = request.resolve(host, host.architecture(self.image_size), trim_last=self.trim_last)
        blocks = None if isinstance(setting.r, tuple) else setting.blocks  # a solved r may name every block itself
        return {"r": setting.r, "blocks": blocks, "trim_last": self.trim_last}

    def _dropped(self, model: nn.Module) -> dict[str, Any] | None:
        """What the upper bound drops: as many tokens per block as the first method whose plan removes any.

        One r means other blocks for each method. None where the number of tokens depends on the image.
        """
        architecture = find_host(model).architecture(self.image_size)
        for method in self.methods:
            if method == FREE_DROP:
                continue
            planned = plan(model, method=method, architecture=architecture, **self.reduction(model, method))
            if any(planned.removed):
                trim_last = planned.trimmed if self.trim_last is None else self.trim_last
                return {"r": planned.removed, "trim_last": trim_last}
        return None

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a pass is the replay of a CUDA graph."""
        return self.compiled is not None and "triton.cudagraphs" in torch._inductor.list_mode_options(self.compiled)


def make_contenders(model: nn.Module, config: BenchmarkConfig, *, matmul: bool) -> dict[str, nn.Module]:
    """Copies of the model by name, in the order of the table, all around the same weights.

    matmul: whether fused models embed patches by a matrix product; `baseline_matmul` and `free_drop_conv` are
    contenders only then, and only where the patch embedding is a bare convolution.
    """
    if not config.bounds:
        fused = {
            name: fuse(copy_sharing_weights(model), name, **config.reduction(model, name)) for name in config.methods
        }
        return {name: each.eval() for name, each in {BASELINE: copy_sharing_weights(model), **fused}.items()}
    convolutions = copy_sharing_weights(model)
    dropped = config.reduction(model, FREE_DROP)
    free_drop, free_drop_conv = (fuse(copy_sharing_weights(model), FREE_DROP, **dropped) for _ in range(2))
    paths = [path for path, part in free_drop.named_modules() if isinstance(part, MatmulPatchEmbed)]
    contenders = {BASELINE: copy_sharing_weights(model)}
    if matmul and paths:
        contenders[BASELINE_MATMUL] = copy_sharing_weights(model)
        for path in paths:
            convolution: Any = convolutions.get_submodule(path)
            contenders[BASELINE_MATMUL].set_submodule(path, MatmulPatchEmbed.of(convolution, _always))
            free_drop_conv.set_submodule(path, convolution)
    for method in config.methods:
        contenders[method] = fuse(copy_sharing_weights(model), method, **config.reduction(model, method))
    contenders[FREE_DROP] = free_drop
    if BASELINE_MATMUL in contenders:
        contenders[FREE_DROP_CONV] = free_drop_conv
    return {name: each.eval() for name, each in contenders.items()}


def make_quantized(contenders: Mapping[str, nn.Module], precision: str, images: Tensor) -> dict[str, nn.Module]:
    """Quantized copies of the baseline and of the methods, around the same unquantized weights."""
    few = images[:_CALIBRATED_IMAGES]
    left_out = (BASELINE_MATMUL, FREE_DROP, FREE_DROP_CONV)
    return {
        name: quantize(copy_sharing_weights(model), precision, calibration=few)
        for name, model in contenders.items()
        if name not in left_out
    }


def _always() -> bool:
    return True
