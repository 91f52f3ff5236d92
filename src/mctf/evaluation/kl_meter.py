"""KL to the unfused model under many schedules, measured on the same images and remembered between runs.

A pass repeats nothing that it shares with the pass before: blocks up to the first one with another amount return what
they returned then. Scores are kept per image in a file, so that a search that was interrupted goes on where it was, and
another search on the same images starts with what is known.

Axes: B images, 3 H W, K classes.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import atomic_write, first_line
from ..api import fuse, fused_stack
from ..errors import MctfError
from ..methods.base import BlockOutput
from ..models.loading import copy_sharing_weights
from ..stack import features_for_head
from .fidelity import kl_divergence

Schedule = tuple[int, ...]  # tokens to remove, one count per block
_FORMAT, _VERSION = "mctf tuning scores", 1
_MAX_BYTES = 500_000_000


@dataclass
class ScoreFile:
    """KL per image by schedule, in a file that is replaced as a whole. path: None to keep scores in memory alone.

    digest: of everything the scores depend on; a file with another one is refused.
    """

    path: Path | None
    digest: str
    scores: dict[Schedule, list[float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, digest: str) -> "ScoreFile":
        """The scores in the file, none where there is no file; raises MctfError for a file of anything else."""
        if path is None or not path.exists():
            return cls(path, digest)
        cure = "remove it, or name another file with --cache"
        if not path.is_file():
            raise MctfError(f"{path} is not a regular file: name another one with --cache")
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            facts = json.loads(content) if len(content) <= _MAX_BYTES else None
        except OSError as failure:
            raise MctfError(f"{path} cannot be read ({failure.strerror}): {cure}") from None
        except (ValueError, RecursionError) as failure:
            raise MctfError(f"{path} holds no scores ({first_line(failure):.80}): {cure}") from None
        if not isinstance(facts, dict) or (facts.get("format"), facts.get("version")) != (_FORMAT, _VERSION):
            raise MctfError(f"{path} holds no scores of mctf tune: {cure}")
        if facts.get("digest") != digest:
            raise MctfError(f"{path} holds scores of other images, weights or settings: {cure}")
        try:
            scores = {
                tuple(int(count) for count in name.split(",")): [float(value) for value in values]
                for name, values in facts["scores"].items()
            }
            if not all(math.isfinite(value) for values in scores.values() for value in values):
                raise ValueError("not finite")
        except (KeyError, AttributeError, TypeError, ValueError):
            raise MctfError(f"{path} is damaged: {cure}") from None
        return cls(path, digest, scores)

    def save(self) -> None:
        if self.path is not None:
            named = {",".join(map(str, schedule)): values for schedule, values in self.scores.items()}
            facts = {"format": _FORMAT, "version": _VERSION, "digest": self.digest, "scores": named}
            atomic_write(self.path, json.dumps(facts).encode())


def scores_digest(model: nn.Module, *, images: str, settings: Mapping[str, object]) -> str:
    """A checksum over weights, images (their own checksum) and settings."""
    checksum = hashlib.blake2b(digest_size=16)
    checksum.update(json.dumps([images, settings], sort_keys=True, default=str).encode())
    for name, value in model.state_dict().items():
        checksum.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        checksum.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


class KLMeter:
    """Measures the KL of an unfused model's fused copy, which shares its weights.

    batches: B 3 H W each, in the dtype of the model. tick: called after each batch of each schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        *,
        method: str,
        options: Mapping[str, Any],
        file: ScoreFile,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self.batches = batches
        self.images = sum(map(len, batches))
        self.model: Any = fuse(copy_sharing_weights(model), method, r=0, **options).eval()
        self.stack = fused_stack(self.model)
        self.file = file
        self.tick = tick
        self._device = next(model.parameters()).device
        self._run_block = self.stack.run_block
        self._outputs: dict[int, BlockOutput] = {}  # of the last pass, by block
        self._last: Schedule | None = None
        self._shared = 0  # blocks that repeat the last pass
        self._references: dict[int, Tensor] = {}  # logits of the unfused model by batch, B K
        self.stack.run_block = self._cached_block  # type: ignore[method-assign]

    def kl(self, schedules: Iterable[Schedule], images: int | None = None) -> list[Tensor]:
        """KL per image of each schedule, float64, over at least this many images; all of them by default."""
        wanted = min(self.images, self.images if images is None else images)
        schedules = list(schedules)
        # sorted: neighbors share most of their first blocks
        missing = sorted(each for each in set(schedules) if len(self.file.scores.get(each, ())) < wanted)
        start = 0
        for index, batch in enumerate(self.first(wanted)):
            lacking = [each for each in missing if len(self.file.scores.get(each, ())) == start]
            if lacking:
                self._measure(index, batch, lacking)
                self.file.save()
            start += len(batch)
        return [torch.tensor(self.file.scores[each][:start], dtype=torch.float64) for each in schedules]

    def first(self, images: int | None) -> Sequence[Tensor]:
        """The first batches, with at least this many images where there are as many; all of them for None."""
        total = 0
        for index, batch in enumerate(self.batches):
            if images is not None and total >= images:
                return self.batches[:index]
            total += len(batch)
        return self.batches

    @torch.inference_mode()
    def _measure(self, index: int, batch: Tensor, schedules: Sequence[Schedule]) -> None:
        pixels = batch.to(self._device)
        self._last, self._outputs = None, {}
        if index not in self._references:
            self._references[index] = self._logits(pixels, (0,) * len(self.stack))
        for schedule in schedules:
            divergence = kl_divergence(self._references[index], self._logits(pixels, schedule))
            self.file.scores.setdefault(schedule, []).extend(divergence.clamp_min(0).tolist())
            self.tick()
        self._last, self._outputs = None, {}

    def _logits(self, pixels: Tensor, schedule: Schedule) -> Tensor:
        """Logits of one batch in float64: B K."""
        self.stack.set_r(schedule)
        self._shared = 0
        if self._last is not None:
            # an output also depends on whether the next block reduces
            while self._shared < len(schedule) and (
                schedule[self._shared] == self._last[self._shared]
                and any(schedule[self._shared + 1 : self._shared + 2])
                == any(self._last[self._shared + 1 : self._shared + 2])
            ):
                self._shared += 1
        logits = self.model.forward_head(features_for_head(self.model, pixels)).cpu().double()
        self._last = schedule
        if not logits.isfinite().all():
            raise MctfError(f"the model gives infinite or undefined numbers in {pixels.dtype}: use float32 or bfloat16")
        return logits

    def _cached_block(self, index: int, x: Tensor, **given: Any) -> BlockOutput:
        if index >= self._shared:
            self._outputs[index] = self._run_block(index, x, **given)
        return self._outputs[index]
