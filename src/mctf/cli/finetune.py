"""`mctf finetune`: train a model that fuses tokens, in one process or under torchrun."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from ..errors import MctfError
from ..train.config import OLD_NAMES, Recipe, read_recipe, read_toml
from ..train.parsers import flag
from .options import json_option, options_option, parse_options
from .output import check_folder, give_json, say_nothing, tell
from .progress import Command, progress, steps_bar, ticking

if TYPE_CHECKING:
    from ..data import Progress
    from ..evaluation.evaluate import Evaluation
    from ..train.engine import Trainer

_SHORT = {"r": "-r", "method": "-m", "output": "-o"}


def _recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option per field of a recipe. Values stay text: the recipe parses them and reports all errors at once."""
    for old in OLD_NAMES:
        command = click.option("--" + old.replace("_", "-"), old, hidden=True)(command)
    for each in reversed(fields(Recipe)):
        if each.name == "method_options":  # given as --option
            continue
        name, parser, default = "--" + each.name.replace("_", "-"), each.metadata["parser"], each.default
        help_text = each.metadata["help"]
        if default is not None and default is not False and default != "":
            help_text += f"  [default: {default}]"
        if parser is flag:
            command = click.option(f"{name}/--no-{name[2:]}", default=None, help=help_text)(command)
        else:
            short = [_SHORT[each.name]] if each.name in _SHORT else []
            command = click.option(*short, name, each.name, metavar=parser.metavar, help=help_text)(command)
    return command


@click.command(
    "finetune",
    cls=Command,
    epilog="""\b
Examples:
  mctf finetune deit_tiny_patch16_224 --data train --validation val -r 16
  mctf finetune --config recipe.toml --lr 1e-5 --output second
  mctf finetune deit_tiny_patch16_224 --data train --method none \\
      --objective cross-entropy
  torchrun --nproc-per-node 8 -m mctf finetune --config recipe.toml --resume
""",
)
@click.argument("name", metavar="[MODEL]", required=False)
@click.option(
    "--config", type=click.Path(path_type=Path), help="Recipe: a TOML file of these options, which override it."
)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint in --output, if there is one.")
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
    """Fine-tune the timm model MODEL for token fusion (token reduction consistency).

    The output folder gets checkpoints, log.csv, TensorBoard's events, recipe.toml and, at the end,
    model.safetensors for mctf eval --weights. On SIGTERM or Ctrl-C it saves and prints the command that resumes.
    """
    values = {} if config is None else read_toml(config)
    values |= {option: value for option, value in given.items() if value is not None}
    if name is not None:
        values["model"] = name
    if pairs:
        values["method_options"] = parse_options(pairs)
    _finetune(read_recipe(values), resume=resume, bar=bar, as_json=as_json)


def _finetune(recipe: Recipe, *, resume: bool, bar: bool | None, as_json: bool) -> None:
    from .._locks import lock_folder
    from ..distributed import init_distributed, on_main
    from ..evaluation.environment import pick_device, set_threads
    from ..train.build import start_run

    set_threads(recipe.threads)
    validation = None if recipe.validation is None else str(recipe.validation)
    check_folder(recipe.output, "--output", inputs=(recipe.data, *recipe.data.split(","), validation))
    with init_distributed(pick_device(recipe.device)) as distributed, ExitStack() as held:
        lock = lock_folder(recipe.output, doing="trains in", option="--output")
        on_main(distributed, lambda: held.enter_context(lock))
        echo = tell if distributed.is_main and not as_json else say_nothing
        show_bar = bar if distributed.is_main else False
        with _start_bars(recipe.model, show_bar) as on_decoding:
            trainer, notes = start_run(recipe, distributed, resume=resume, on_decoding=on_decoding)
        for line in (_summary(trainer), *notes):
            echo(line)
        signal = _train(trainer, show_bar, echo)
        evaluation = None if signal else _finalize(trainer, show_bar, echo)
        if distributed.is_main and not signal:
            _report(trainer, evaluation, as_json)
    if signal:
        sys.exit(128 + signal)  # the shell's convention for a process that a signal ended


@contextmanager
def _start_bars(model: str, show_bar: bool | None) -> "Iterator[Progress]":
    """A bar without a total while a run is built; the yielded callback replaces it by one for decoding."""
    tick: Callable[..., None] | None = None
    shown = 0
    with ExitStack() as bars:

        def on_decoding(done: int, total: int) -> None:
            nonlocal tick, shown
            if tick is None:
                bars.close()
                tick = bars.enter_context(progress("decoding images", total, wanted=show_bar))
            tick(done - shown)
            shown = done

        bars.enter_context(progress(f"preparing {model}", wanted=show_bar))
        yield on_decoding


def _train(trainer: "Trainer", show_bar: bool | None, echo: Callable[[str], None]) -> int:
    """Train with a progress bar; returns the signal that stopped the run, 0 for none."""
    import torch

    from ..train.build import resume_command, train
    from ..train.signals import StoppedError

    recipe, distributed = trainer.recipe, trainer.distributed
    images = recipe.batch * recipe.accumulate * distributed.world_size
    lines = echo if distributed.is_main else None
    try:
        with steps_bar(trainer.steps.total, done=trainer.step, images=images, wanted=show_bar, lines=lines) as on_step:
            train(trainer, on_step)
    except StoppedError as stopped:
        if distributed.is_main:
            resume = resume_command(recipe.output, distributed.world_size)
            tell(f"mctf: stopped after step {stopped.step}, all saved; to continue: {resume}", err=True, wrap=False)
        return stopped.number
    except torch.OutOfMemoryError:
        raise MctfError(
            f"{distributed.device} has too little memory for batches of {recipe.batch}: "
            "lower --batch and raise --accumulate"
        ) from None
    if trainer.feed.skipped:
        echo(f"{plural(trainer.feed.skipped, 'unreadable image')} skipped")
    return 0


def _finalize(trainer: "Trainer", show_bar: bool | None, echo: Callable[[str], None]) -> "Evaluation | None":
    """Write the weights, and evaluate them where there are validation images."""
    from ..train.finalize import evaluate_final, final_model, write_weights

    if trainer.distributed.is_main:
        echo(f"weights: {write_weights(trainer)}")

    def with_bar(batches: Any, total: int) -> Any:
        with progress("evaluating", total, wanted=show_bar) as tick:
            yield from ticking(batches, tick)

    return evaluate_final(final_model(trainer), trainer, with_bar)


def _summary(trainer: "Trainer") -> str:
    from ..api import fused_stack

    recipe, steps, world = trainer.recipe, trainer.steps, trainer.distributed.world_size
    parameters = sum(each.numel() for each in trainer.model.parameters()) / 1e6
    fusion = f"{recipe.method} r={fused_stack(trainer.model).r}" if recipe.fuses else "unfused"
    batch = " x ".join([str(recipe.batch), *(str(factor) for factor in (recipe.accumulate, world) if factor > 1)])
    return (
        f"{recipe.model} ({parameters:.1f} M parameters), {fusion}, {recipe.objective}: "
        f"{plural(recipe.total_epochs, 'epoch')} of {plural(steps.per_epoch, 'step')}, batch {batch}, "
        f"{trainer.distributed.device}"
    )


def _report(trainer: "Trainer", evaluation: "Evaluation | None", as_json: bool) -> None:
    """The evaluation, if any, as JSON beside the weights and as a table; with --json, one object on stdout."""
    from ..evaluation.environment import command_line, commit, describe_device, versions
    from ..train.finalize import EVALUATION_FILE

    recipe = trainer.recipe
    facts = {
        "model": recipe.model,
        "output": str(recipe.output),
        "steps": trainer.step,
        "processes": trainer.distributed.world_size,
        "recipe": recipe.fingerprint(),
        "device": describe_device(trainer.distributed.device),
        "versions": versions(),
        "commit": commit(),
        "command": command_line(),
        "data": None if evaluation is None else str(recipe.validation),
        "images": None if evaluation is None else evaluation.images,
        "notes": [] if evaluation is None else list(evaluation.notes),
        "rows": [] if evaluation is None else [asdict(row) for row in evaluation.rows],
    }
    give_json(facts, file=None if evaluation is None else recipe.output / EVALUATION_FILE, as_json=as_json)
    if evaluation is not None and not as_json:
        from .tables import print_rows

        title = f"{recipe.model} on {plural(evaluation.images, 'image')} of {recipe.validation}"
        print_rows(evaluation.rows, title=title, notes=evaluation.notes)
