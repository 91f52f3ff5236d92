"""`mctf finetune`: train a model that fuses tokens, in one process or under torchrun."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from ..errors import MctfError
from ..train.config import Recipe, read_recipe, read_toml, switch
from .options import json_option, options_option, parse_options
from .output import give_json, say_nothing
from .progress import progress, steps_bar, ticking

if TYPE_CHECKING:
    from ..evaluation.evaluate import Evaluation
    from ..train.engine import Trainer

_SHORT = {"r": "-r", "method": "-m", "output": "-o"}
_APART = ("method_options",)  # given as --option


def _recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each field of a recipe. They are taken as words: the recipe reads them, and says all errors."""
    for each in reversed(fields(Recipe)):
        if each.name in _APART:
            continue
        flag = "--" + each.name.replace("_", "-")
        help_text = each.metadata["help"] + _default_text(each.default)
        if each.metadata["read"] is switch:
            command = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=help_text)(command)
        else:
            short = [_SHORT[each.name]] if each.name in _SHORT else []
            command = click.option(*short, flag, each.name, metavar=each.metadata["read"].kind, help=help_text)(command)
    return command


def _default_text(default: Any) -> str:
    if default is None or default is False or default == "":
        return ""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"  [default: {shown}]"


@click.command(
    "finetune",
    epilog="""\b
Examples:
  mctf finetune deit_tiny_patch16_224 --data train --validation val -r 16
  mctf finetune --config recipe.toml --lr 1e-5 --output second
  mctf finetune deit_tiny_patch16_224 --data train --method none --objective cross-entropy
  torchrun --nproc-per-node 8 -m mctf finetune --config recipe.toml --resume
""",
)
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--config", type=click.Path(path_type=Path), help="TOML file of these options; others given win.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output, if there is one.")
@_recipe_options
@options_option
@click.option("--progress/--no-progress", "bar", default=None, help="Progress bar; on a terminal by default.")
@json_option
def command(
    name: str | None,
    config: Path | None,
    resume: bool,
    pairs: Sequence[str],
    bar: bool | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Fine-tune the timm model MODEL so that it loses nothing by fusing tokens (token reduction consistency).

    The output folder gets checkpoints, log.csv, TensorBoard's events, recipe.toml and, at the end,
    model.safetensors for mctf eval --weights. Interrupted, it saves and says how to go on.
    """
    values = {} if config is None else read_toml(config)
    values |= {option: value for option, value in given.items() if value is not None}
    if name is not None:
        values["model"] = name
    if pairs:
        values["method_options"] = parse_options(pairs)
    _finetune(read_recipe(values), resume=resume, bar=bar, as_json=as_json)


def _finetune(recipe: Recipe, *, resume: bool, bar: bool | None, as_json: bool) -> None:
    import torch

    from ..distributed import init_distributed
    from ..evaluation.environment import pick_device
    from ..train.build import begin

    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    with init_distributed(pick_device(recipe.device)) as processes:
        say = click.echo if processes.is_main and not as_json else say_nothing
        wanted = bar if processes.is_main else False
        with progress(f"preparing {recipe.model}", wanted=wanted):
            trainer, notes = begin(recipe, processes, resume=resume)
        for line in (_summary(trainer), *notes):
            say(line)
        signal = _train(trainer, wanted, say)
        found = None if signal else _finish(trainer, wanted, say)
    if processes.is_main and not signal:
        _report(trainer, found, as_json)
    if signal:
        sys.exit(128 + signal)  # as shells expect of what a signal ended


def _train(trainer: "Trainer", wanted: bool | None, say: Callable[[str], None]) -> int:
    """Training itself, with a bar; where a signal interrupts it, says how to go on and gives its number, else 0."""
    import torch

    from ..train.build import carry_on, how_to_resume
    from ..train.signals import StoppedError

    recipe, world = trainer.recipe, trainer.processes.world_size
    images = recipe.batch * recipe.accumulate * world
    lines = say if trainer.processes.is_main else None
    try:
        with steps_bar(trainer.steps.total, done=trainer.step, images=images, wanted=wanted, lines=lines) as on_step:
            carry_on(trainer, on_step)
    except StoppedError as stopped:
        if trainer.processes.is_main:
            how = how_to_resume(recipe.output, world)
            click.echo(f"mctf: stopped after step {stopped.step}, all saved; to go on: {how}", err=True)
        return stopped.number
    except torch.OutOfMemoryError:
        raise MctfError(
            f"{trainer.processes.device} has too little memory for batches of {recipe.batch}: "
            "lower --batch and raise --accumulate"
        ) from None
    if trainer.feed.skipped:
        say(f"{trainer.feed.skipped} unreadable images were skipped")
    return 0


def _finish(trainer: "Trainer", wanted: bool | None, say: Callable[[str], None]) -> "Evaluation | None":
    """Writes the weights, and evaluates them where there are images for it."""
    from ..train.finalize import evaluate_finished, finished_model, write_weights

    if trainer.processes.is_main:
        say(f"weights: {write_weights(trainer)}")

    def watched(batches: Any, total: int) -> Any:
        with progress("evaluating", total, wanted=wanted) as tick:
            yield from ticking(batches, tick)

    return evaluate_finished(finished_model(trainer), trainer, watched)


def _summary(trainer: "Trainer") -> str:
    recipe, steps, world = trainer.recipe, trainer.steps, trainer.processes.world_size
    parameters = sum(each.numel() for each in trainer.model.parameters()) / 1e6
    fusing = f"{recipe.method} r={recipe.r}" if recipe.fuses else "plain"
    batch = " x ".join(
        str(part) for part in (recipe.batch, recipe.accumulate, world) if part > 1 or part is recipe.batch
    )
    return (
        f"{recipe.model} ({parameters:.1f} M parameters), {fusing}, {recipe.objective}: "
        f"{plural(recipe.all_epochs, 'epoch')} of {plural(steps.per_epoch, 'step')}, batch {batch}, "
        f"{trainer.processes.device}"
    )


def _report(trainer: "Trainer", found: "Evaluation | None", as_json: bool) -> None:
    """The evaluation, if any, as JSON beside the weights and as a table; with --json, one object on stdout."""
    from ..evaluation.environment import command_line, commit, describe_device, versions

    recipe = trainer.recipe
    facts = {
        "model": recipe.model,
        "output": str(recipe.output),
        "steps": trainer.step,
        "processes": trainer.processes.world_size,
        "recipe": recipe.decisive(),
        "device": describe_device(trainer.processes.device),
        "versions": versions(),
        "commit": commit(),
        "command": command_line(),
        "data": None if found is None else str(recipe.validation),
        "images": None if found is None else found.images,
        "notes": [] if found is None else list(found.notes),
        "rows": [] if found is None else [asdict(row) for row in found.rows],
    }
    give_json(facts, file=None if found is None else recipe.output / "evaluation.json", as_json=as_json)
    if found is not None and not as_json:
        from .tables import print_rows

        title = f"{recipe.model} on {plural(found.images, 'image')} of {recipe.validation}"
        print_rows(found.rows, title=title, notes=found.notes)
