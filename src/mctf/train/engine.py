"""The loop: steps of an optimiser over a feed, logged, saved, and stopped in good order.

All randomness follows from the seed, the step and the rank, and batches from the feed likewise. So a run that stopped
goes on as if it had not: a checkpoint holds weights, their average, the optimiser's state and the step, no more.

Axes: B images, 3 H W.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..core.schedule import Amount
from ..data.feed import Feed
from ..data.sampler import generator_for, seed_of
from ..distributed import DistributedContext, all_gather_object, broadcast_object
from ..errors import MctfError
from .checkpoint import Checkpoints, Snapshots, read
from .config import Recipe
from .consistency import Losses
from .logging import Logs, Meters, Record
from .objective import Objective
from .optimizer import Schedule, Steps
from .rank_sync import Watch
from .signals import Interruption, StoppedError
from .teachers import Teacher

OnStep = Callable[[int, Record | None], None]


def _silent(step: int, record: Record | None) -> None:
    """Hears of steps and says nothing."""


@dataclass
class Trainer:
    """Everything that a run consists of. step: how many are done.

    model: what is trained, as `objective` holds it. average: of its weights, if wanted.
    """

    recipe: Recipe
    processes: DistributedContext
    feed: Feed
    steps: Steps
    model: nn.Module
    objective: Objective
    optimiser: torch.optim.Optimizer
    schedule: Schedule
    checkpoints: Checkpoints
    average: ModelEmaV3 | None = None
    teacher: Teacher | None = None
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._meters = Meters(self.processes.device)
        self._watch = Watch(self.processes)
        self._parameters = [each for each in self.model.parameters() if each.requires_grad]
        self._snapshots = Snapshots(
            self.recipe,
            self.steps,
            self.processes.world_size,
            self.model,
            self.optimiser,
            self.average,
            self._meters,
        )
        self._module: nn.Module = self.objective
        if self.processes.is_distributed:
            self._module = DistributedDataParallel(self.objective)

    def resume(self) -> tuple[str, ...]:
        """Go on from the newest whole checkpoint, if there is any; in words, which damaged ones were passed over."""
        path, damaged = broadcast_object(self.checkpoints.newest() if self.processes.is_main else None)
        if path is not None:
            self.step = self._snapshots.put_back(read(path))
        return damaged

    def run(self, interruption: Interruption, logs: Logs | None = None, on_step: OnStep = _silent) -> None:
        """All steps that are left; logs: in the first process only. on_step: told of each step and line of the log.

        Raises StoppedError, all saved, if a signal came; MctfError, the batch saved, if a loss is no number.
        """
        self.model.train()
        while self.step < self.steps.total:
            epoch, within = divmod(self.step, self.steps.per_epoch)
            batches = self.feed.batches(epoch, within * self.steps.accumulate)
            for _ in range(within, self.steps.per_epoch):
                signal = self._one_step(batches, interruption)
                on_step(self.step, self._log(logs))
                if signal or self._is_time_to_save():
                    signal = self._look() or signal
                    self.save()
                if signal:
                    raise StoppedError(signal, self.step)
        late = max(all_gather_object(interruption.signal or 0))
        if late:
            raise StoppedError(late, self.step)

    def save(self) -> None:
        """Write a checkpoint, in the first process; the others need not wait."""
        if self.processes.is_main:
            self.checkpoints.save(self.step, self._snapshots.take(self.step))

    def _one_step(self, batches: Iterator[tuple[Tensor, Tensor]], interruption: Interruption) -> int:
        """One step of the optimiser; the signal that is to end the run after it, 0 if none.

        The notice of the step before is read when this one's gradient is under way: the device has it by then.
        """
        accumulate = self.steps.accumulate
        torch.manual_seed(seed_of(self.recipe.seed, "step", self.step, self.processes.rank))
        lighter = self.objective.draw(self._drawing(self.step))
        self._lr = self.schedule.set(self.step)
        losses, images = [], 0
        for index, (pixels, labels) in enumerate(islice(batches, accumulate)):
            with self._apart(index < accumulate - 1):
                losses.append(self._backward(pixels, labels, lighter))
            images += len(labels) * self.processes.world_size
        signal = self._look()
        gradient = self._update()
        finite = torch.stack([each.total.detach() for each in losses]).isfinite().all() & gradient.isfinite()
        self._watch.post(self.step, signal=interruption.signal or 0, finite=finite)
        self._meters.add(losses, gradient, images=images)
        return signal

    def _drawing(self, step: int) -> torch.Generator:
        """For r': the same in all processes, whose shapes then agree."""
        return generator_for(self.recipe.seed, "lighter", step)

    def _apart(self, apart: bool) -> contextlib.AbstractContextManager[None]:
        """While `apart`, gradients gather in this process and are not exchanged."""
        if apart and isinstance(self._module, DistributedDataParallel):
            return self._module.no_sync()
        return contextlib.nullcontext()

    def _backward(self, images: Tensor, labels: Tensor, lighter: tuple[Amount, ...] | None) -> Losses:
        if self.recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        mixed = self.recipe.dtype == "bfloat16"
        with torch.autocast(images.device.type, torch.bfloat16, enabled=mixed):
            taught = None if self.teacher is None else self.teacher(images)
            losses = self._module(images, labels, lighter, taught)
        (losses.total / self.steps.accumulate).backward()
        return losses

    def _update(self) -> Tensor:
        """Move the weights and their average; gives the norm of the gradient."""
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        norm = get_total_norm(gradients)
        if self.recipe.clip is not None:
            clip_grads_with_norm_(self._parameters, self.recipe.clip, norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        if self.average is not None:
            self.average.update(self.model, step=self.step)
        return norm

    def _log(self, logs: Logs | None) -> Record | None:
        if logs is None or (self.step % self.recipe.log_steps and self.step < self.steps.total):
            return None
        record = self._meters.take(step=self.step, epoch=self.step / self.steps.per_epoch, lr=self._lr)
        logs.write(record)
        return record

    def _is_time_to_save(self) -> bool:
        epoch, within = divmod(self.step, self.steps.per_epoch)
        by_steps = self.recipe.save_steps is not None and self.step % self.recipe.save_steps == 0
        by_epochs = within == 0 and epoch % self.recipe.save_epochs == 0
        return by_steps or by_epochs or self.step == self.steps.total

    def _look(self) -> int:
        """Read the last notice: the signal it tells of, 0 if none. Raises MctfError if its step went wrong."""
        notice = self._watch.read()
        if notice is None:
            return 0
        if not notice.finite:
            raise MctfError(self._keep_batches(notice.step))
        return notice.signal

    def _keep_batches(self, step: int) -> str:
        """Write the batches of a step that failed; what to say of it. The feed gives the same batches again."""
        epoch, within = divmod(step - 1, self.steps.per_epoch)
        batches = islice(self.feed.batches(epoch, within * self.steps.accumulate), self.steps.accumulate)
        path = self.recipe.output / f"not-finite-step{step}-process{self.processes.rank}.pt"
        payload = {
            "step": step,
            "lighter": self.objective.draw(self._drawing(step - 1)),
            "batches": [(images.cpu(), labels.cpu()) for images, labels in batches],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(payload, path)
            saved = f"its images are in {path}"
        except (OSError, RuntimeError) as failure:
            saved = f"its images cannot be saved ({failure})"
        return f"the loss or its gradient is not finite in step {step}; {saved}: lower lr, or clip the gradient"
