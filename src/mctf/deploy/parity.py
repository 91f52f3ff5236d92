"""Whether an exported file computes what the model does, as far as rounding allows.

A fused model chooses tokens by comparing numbers. Where two nearly tie, another order of summation chooses the other:
float64 and float32 already differ so in eager PyTorch. Such an image is *flipped*: its outputs move by 0.01 to 0.5,
where rounding moves others by 1e-5. So an export is judged beside a control, eager PyTorch in another precision on the
same images: it may flip a few more images, and the median image may differ by rounding alone.

Axes: B images, K outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..data import Preprocessing
from ..errors import MctfError
from ..evaluation.fidelity import kl_divergence
from .metadata import ExportMetadata

FLIPPED = 1e-2  # a difference far above rounding in float32
MOST_MEDIAN = 1e-4
MOST_FLIPS = 3.0  # percentage points above the control
SAMPLE = 32  # generated images


@dataclass(frozen=True)
class Parity:
    """Differences of outputs from those of the model in eager PyTorch, float32, over images.

    median, largest: of the largest |difference| per image, relative to the standard deviation of the outputs where
    that is below 1, and always of embeddings: small logits would hide any error.
    flipped: percent of images above 0.01. kl, agreement: mean KL and percent of equal top classes; None for embeddings.
    cosine: mean cosine of the outputs.
    """

    images: int
    median: float
    largest: float
    flipped: float
    kl: float | None
    agreement: float | None
    cosine: float

    @classmethod
    def of(cls, outputs: Tensor, reference: Tensor, *, classifies: bool) -> Self:
        """outputs, reference: B K."""
        outputs, reference = outputs.double(), reference.double()
        scale = reference.std(correction=0).item() or 1.0
        differences = (outputs - reference).abs().amax(dim=1) / (min(scale, 1.0) if classifies else scale)
        return cls(
            images=len(outputs),
            median=differences.median().item(),
            largest=differences.max().item(),
            flipped=100 * (~(differences <= FLIPPED)).double().mean().item(),
            kl=kl_divergence(reference, outputs).mean().item() if classifies else None,
            agreement=100 * (outputs.argmax(1) == reference.argmax(1)).double().mean().item() if classifies else None,
            cosine=F.cosine_similarity(outputs, reference, dim=1).mean().item(),
        )

    def __str__(self) -> str:
        parts = [f"median |difference| {self.median:.1e}", f"flipped {self.flipped:.1f} %"]
        if self.kl is not None:
            parts += [f"KL {self.kl:.1e}", f"same top-1 {self.agreement:.1f} %"]
        else:
            parts.append(f"cosine {self.cosine:.6f}")
        return ", ".join(parts)


def judge(name: str, parity: Parity, control: Parity, *, exact: bool, slack: float = 2) -> None:
    """Raise MctfError where an export differs from the model by more than rounding, as the control shows it.

    exact: weights in float32; otherwise rounding itself is large, and `slack` times the control's figures are allowed.
    """
    causes = []
    allowed = MOST_MEDIAN if exact else slack * control.median + MOST_MEDIAN
    if not parity.median <= allowed:
        causes.append(f"the median image differs by {parity.median:.1e}, {allowed:.1e} is allowed")
    if exact and not parity.flipped <= control.flipped + MOST_FLIPS:
        causes.append(f"{parity.flipped:.1f} % of the images are flipped, {control.flipped:.1f} % by rounding alone")
    if parity.kl is not None and control.kl is not None and not parity.kl <= slack * control.kl + 3e-3:
        causes.append(f"KL is {parity.kl:.1e}, {control.kl:.1e} by rounding alone")
    if causes:
        raise MctfError(
            f"the {name} file does not compute what the model does ({'; '.join(causes)}): nothing was written, "
            "try another format or dtype, and please report it"
        )


def run_batches(run: Callable[[Tensor], Tensor], images: Tensor, batch: int, *, fixed: bool = False) -> Tensor:
    """Outputs for all images (B 3 H W), `batch` at a time; the last batch is smaller, or left out where it is fixed."""
    parts = [part for part in images.split(batch) if not fixed or len(part) == batch]
    return torch.cat([run(part.contiguous()) for part in parts])


def generated_images(metadata: ExportMetadata, count: int = SAMPLE) -> Tensor:
    """Images of smooth colours, textures and edges, as the model takes them: B 3 H W.

    Pixels lie between -1 and 1 where the model does not say how its images are prepared.
    """
    half, size = (0.5, 0.5, 0.5), metadata.image_size
    transform = (metadata.preprocessing or Preprocessing(size, 1.0, "center", "bicubic", half, half)).transform()
    return torch.stack([transform(_picture(seed, size)) for seed in range(count)])


def _picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Noise of several scales, parts of it in front of others."""
    generator, (height, width) = np.random.default_rng(seed), size

    def layer() -> np.ndarray:
        total = np.zeros((height, width, 3))
        for cells, amplitude in ((3, 90), (8, 40), (24, 25), (64, 15)):
            noise = generator.standard_normal((cells, cells, 3)).astype(np.float32)
            planes = [
                np.asarray(Image.fromarray(noise[..., each]).resize((width, height), Image.Resampling.BICUBIC))
                for each in range(3)
            ]
            total += amplitude * np.stack(planes, axis=2)
        return total + generator.uniform(60, 200, 3)

    picture = layer()
    rows, columns = np.mgrid[:height, :width] / max(size)
    for _ in range(3):
        (y, x), radius = generator.uniform(0.1, 0.9, 2), generator.uniform(0.1, 0.35, 2)
        inside = ((rows - y) / radius[0]) ** 2 + ((columns - x) / radius[1]) ** 2 < 1
        picture[inside] = layer()[inside]
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))
