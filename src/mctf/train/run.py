"""A run from its first step, or from where it stopped, to its last."""

from pathlib import Path

from ..errors import MctfError
from ..processes import Processes, from_first
from ..wording import counted
from .assembly import OnDecoding, assemble
from .checkpoints import Checkpoints, write_whole
from .engine import OnStep, Trainer
from .interruption import interruptible
from .logs import Logs
from .recipe import Recipe

RECIPE = "recipe.toml"


def begin(
    recipe: Recipe, processes: Processes, *, resume: bool = False, on_decoding: OnDecoding | None = None
) -> tuple[Trainer, list[str]]:
    """A run that is ready to go, and what to know of it. It has written its recipe into its folder.

    resume: go on from the last checkpoint in the recipe's folder, or start where there is none: a command under
    torchrun that always says so survives a restart. Without it, a folder with checkpoints is refused.
    """
    found = from_first(bool(Checkpoints(recipe.output / "checkpoints").paths()))
    if found and not resume:
        raise MctfError(f"{recipe.output} holds a run already: add --resume to go on, or name another --output")
    trainer = assemble(recipe, processes, on_decoding=on_decoding)
    notes = [f"{trainer.feed.note}, {counted(trainer.feed.classes, 'class', 'classes')}"]
    if resume:
        notes += trainer.resume()
    if trainer.step:
        notes.append(f"goes on after step {trainer.step} of {trainer.steps.total}")
    if processes.first:
        write_whole(recipe.output / RECIPE, recipe.as_toml().encode())
    return trainer, notes


def carry_on(trainer: Trainer, on_step: OnStep) -> None:
    """All steps that are left, logged; see `Trainer.run` for how it may end before."""
    logs = Logs(trainer.recipe.output, done=trainer.step) if trainer.processes.first else None
    try:
        with interruptible() as interruption:
            trainer.run(interruption, logs, on_step)
    finally:
        if logs is not None:
            logs.close()


def how_to_resume(output: Path, world: int) -> str:
    """The command that goes on with a run."""
    start = "mctf" if world == 1 else f"torchrun --nproc-per-node {world} -m mctf"
    return f"{start} finetune --config {output / RECIPE} --resume"
