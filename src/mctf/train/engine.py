"""The training loop: optimizer steps over a feed, logged, saved and stopped on signals.

All randomness is a function of seed, step and rank, and so are the batches of a feed. A resumed run therefore continues
exactly as an uninterrupted one: a checkpoint holds weights, their average, the optimizer's state and the step.

Axes: B images, 3 H W.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .._utils import atomic_file, file_digest, first_line
from ..core.schedule import Amount
from ..data.feed import Feed
from ..data.sampler import generator_for, seed_of
from ..distributed import DistributedContext, all_gather_object, on_main
from ..errors import MctfError
from .checkpoint import Checkpoints, RunState, read_checkpoint
from .config import Recipe
from .consistency import Losses
from .logging import Logs, Meters, Record
from .objective import Objective
from .optimizer import LRSchedule, Steps
from .rank_sync import RankSync
from .signals import StoppedError, StopRequest
from .teachers import Teacher

OnStep = Callable[[int, Record | None], None]  # called after each step, with the line of the log if there is one


@dataclass
class Trainer:
    """The parts of a run. step: number of finished steps.

    model: the model in training, the same module as in `objective`. ema: moving average of its weights, if any.
    """

    recipe: Recipe
    distributed: DistributedContext
    feed: Feed
    steps: Steps
    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    schedule: LRSchedule
    checkpoints: Checkpoints
    ema: ModelEmaV3 | None = None
    teacher: Teacher | None = None
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._meters = Meters(self.distributed.device)
        self._sync = RankSync(self.distributed)
        self._parameters = [each for each in self.model.parameters() if each.requires_grad]
        self._state = RunState(
            recipe=self.recipe,
            steps=self.steps,
            world_size=self.distributed.world_size,
            model=self.model,
            optimizer=self.optimizer,
            ema=self.ema,
            meters=self._meters,
            inputs={"images": self.feed.digest, **_file_digests(self.recipe)},
        )
        self._module: nn.Module = self.objective
        if self.distributed.is_distributed:
            self._module = DistributedDataParallel(self.objective)

    def resume(self) -> tuple[str, ...]:
        """Load the newest intact checkpoint, if there is any; returns notes, one per damaged one among them."""
        path, notes = on_main(self.distributed, self.checkpoints.newest)
        if path is not None:
            self.step, more = self._state.load_state_dict(read_checkpoint(path))
            notes += more
        return notes

    def run(self, stop: StopRequest, logs: Logs | None = None, on_step: OnStep = lambda step, record: None) -> None:
        """All remaining steps. logs: on rank 0 only.

        Raises StoppedError after saving if a rank received a signal, MctfError if a loss is not finite.
        """
        self.model.train()
        while self.step < self.steps.total:
            epoch, within = divmod(self.step, self.steps.per_epoch)
            batches = self.feed.batches(epoch, within * self.steps.accumulate)
            for _ in range(within, self.steps.per_epoch):
                signal = self._run_step(batches, stop)
                on_step(self.step, self._log(logs))
                if signal or self._is_save_due():
                    signal = self._read_status() or signal
                    self.save()
                if signal:
                    raise StoppedError(signal, self.step)
        late = max(all_gather_object(stop.signal or 0))
        if late:
            raise StoppedError(late, self.step)

    def save(self) -> None:
        """Write a checkpoint on rank 0; the other ranks continue."""
        if self.distributed.is_main:
            self.checkpoints.save(self.step, self._state.state_dict(self.step))

    def draw_lighter(self, step: int) -> tuple[Amount, ...] | None:
        """r' of a step: the same on all ranks, whose tensor shapes must agree."""
        return self.objective.draw_lighter(generator_for(self.recipe.seed, "lighter", step))

    def _run_step(self, batches: Iterator[tuple[Tensor, Tensor]], stop: StopRequest) -> int:
        """One optimizer step; returns the signal that ends the run after it, 0 for none.

        The status of the previous step is read after this step's backward pass is queued: the device has it by then.
        """
        accumulate = self.steps.accumulate
        torch.manual_seed(seed_of(self.recipe.seed, "step", self.step, self.distributed.rank))
        lighter = self.draw_lighter(self.step)
        self._lr = self.schedule.set(self.step)
        losses, images = [], 0
        for index, (pixels, labels) in enumerate(islice(batches, accumulate)):
            accumulating = index < accumulate - 1 and isinstance(self._module, DistributedDataParallel)
            with self._module.no_sync() if accumulating else contextlib.nullcontext():  # type: ignore[operator]
                losses.append(self._backward(pixels, labels, lighter))
            images += len(labels) * self.distributed.world_size
        signal = self._read_status()
        grad_norm = self._update()
        finite = torch.stack([each.total.detach() for each in losses]).isfinite().all() & grad_norm.isfinite()
        self._sync.post(self.step, signal=stop.signal or 0, finite=finite)
        self._meters.add(losses, grad_norm, images=images)
        return signal

    def _backward(self, images: Tensor, labels: Tensor, lighter: tuple[Amount, ...] | None) -> Losses:
        if self.recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            teacher_logits = None if self.teacher is None else self.teacher(images)
            losses = self._module(images, labels, lighter, teacher_logits)
        (losses.total / self.steps.accumulate).backward()
        return losses

    def _update(self) -> Tensor:
        """Update the weights and their average; returns the norm of the gradient before clipping."""
        norm = get_total_norm([each.grad for each in self._parameters if each.grad is not None])
        if self.recipe.clip is not None:
            clip_grads_with_norm_(self._parameters, self.recipe.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)
        return norm

    def _log(self, logs: Logs | None) -> Record | None:
        if logs is None or (self.step % self.recipe.log_steps and self.step < self.steps.total):
            return None
        record = self._meters.take(step=self.step, epoch=self.step / self.steps.per_epoch, lr=self._lr)
        logs.write(record)
        return record

    def _is_save_due(self) -> bool:
        epoch, within = divmod(self.step, self.steps.per_epoch)
        by_steps = self.recipe.save_steps is not None and self.step % self.recipe.save_steps == 0
        by_epochs = within == 0 and epoch % self.recipe.save_epochs == 0
        return by_steps or by_epochs or self.step == self.steps.total

    def _read_status(self) -> int:
        """The signal in the last status, 0 for none; raises MctfError if its step was not finite."""
        status = self._sync.read()
        if status is None:
            return 0
        if not status.finite:
            raise MctfError(self._save_batches(status.step))
        return status.signal

    def _save_batches(self, step: int) -> str:
        """Write the batches of a step that failed, which the feed yields again; returns the error message."""
        epoch, within = divmod(step - 1, self.steps.per_epoch)
        batches = islice(self.feed.batches(epoch, within * self.steps.accumulate), self.steps.accumulate)
        path = self.recipe.output / f"not-finite-step{step}-process{self.distributed.rank}.pt"
        payload = {
            "step": step,
            "lighter": self.draw_lighter(step - 1),
            "batches": [(images.cpu(), labels.cpu()) for images, labels in batches],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path.with_name(f".{path.name}.{os.getpid()}"), lambda: path) as file:
                torch.save(payload, file)
            saved = f"its images are in {path}"
        except (OSError, RuntimeError) as failure:
            saved = f"its images cannot be saved ({first_line(failure)})"
        return f"the loss or its gradient is not finite in step {step}; {saved}: lower lr, or clip the gradient"


def _file_digests(recipe: Recipe) -> dict[str, str]:
    """Checksums of the files with weights that a run starts from, by what they are."""
    files = {"weights": recipe.weights, "weights of the teacher": recipe.teacher_weights}
    return {name: file_digest(path) for name, path in files.items() if path is not None}
