"""From a recipe to a run: model, images, teachers, optimizer, objective; from the first step or a checkpoint."""

import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from .._utils import atomic_write, plural
from ..api import fuse, fused_stack
from ..data import Feed, FeedOptions, Preprocessing, Progress, make_feed, open_dataset
from ..distributed import DistributedContext, on_main
from ..errors import MctfError
from ..hosts import find_host
from ..methods._layers import UntrainedWarning
from ..models.loading import create, load_model
from .checkpoint import Checkpoints
from .compile import compile_blocks
from .config import Recipe, read_recipe, read_toml
from .consistency import Consistency
from .engine import OnStep, Trainer
from .finalize import EVALUATION_FILE, RAW_WEIGHTS_FILE, WEIGHTS_FILE
from .logging import LOG_FILE, Logs, check_tensorboard, logged_steps
from .objective import Objective
from .optimizer import LRSchedule, Steps, make_optimizer
from .signals import catch_signals
from .teachers import Distillation, OriginalModel, Teacher

RECIPE_FILE = "recipe.toml"
_PROBED = 16  # validation images that are read before training
_RECIPE_HEADING = "# written by mctf finetune"


def start_run(
    recipe: Recipe,
    distributed: DistributedContext,
    *,
    resume: bool = False,
    on_decoding: Progress | None = None,
) -> tuple[Trainer, list[str]]:
    """A run that is ready to train, and notes for the user. It has written its recipe into its folder.

    resume: continue from the last checkpoint in the recipe's folder, or start where there is none, so that one command
    under torchrun survives restarts. Without it, a folder with a run is refused.
    """
    check_tensorboard()
    recipe_file = f"{_RECIPE_HEADING}\n{recipe.as_toml()}".encode()
    on_main(distributed, lambda: check_run_folder(recipe, resume=resume))
    trainer = build_trainer(recipe, distributed, on_decoding=on_decoding)
    notes = [f"{trainer.feed.note}, {plural(trainer.feed.num_classes, 'class', 'classes')}"]
    if resume:
        notes += trainer.resume()
    if trainer.step:
        notes.append(f"continues after step {trainer.step} of {trainer.steps.total}")

    def write_recipe() -> None:
        _check_log(trainer)
        try:
            recipe.output.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise MctfError(
                f"{recipe.output} cannot be created ({failure.strerror}): choose another --output"
            ) from None
        if not _holds_recipe(recipe.output / RECIPE_FILE, recipe):
            atomic_write(recipe.output / RECIPE_FILE, recipe_file, sync=True)

    on_main(distributed, write_recipe)
    return trainer, notes


def check_run_folder(recipe: Recipe, *, resume: bool) -> None:
    """Raise MctfError where the run would overwrite another one, or files of another program."""
    folder = recipe.output
    if os.path.lexists(folder / "checkpoints") and not (folder / "checkpoints").is_dir():
        raise MctfError(f"{folder / 'checkpoints'} is not a folder: name another --output")
    checkpoints = Checkpoints(folder / "checkpoints").paths()
    logged = logged_steps(folder / LOG_FILE)
    results = [name for name in (WEIGHTS_FILE, RAW_WEIGHTS_FILE, EVALUATION_FILE) if os.path.lexists(folder / name)]
    if not resume and (checkpoints or (logged and not results)):
        raise MctfError(f"{folder} holds a run already: add --resume to continue it, or name another --output")
    if results and not resume:
        raise MctfError(f"{folder} holds a finished run already ({results[0]}): name another --output")
    if results and not checkpoints:
        raise MctfError(
            f"{folder} holds a finished run ({results[0]}) without checkpoints, so nothing is left to resume: "
            "name another --output"
        )
    path = folder / RECIPE_FILE
    if os.path.lexists(path) and not checkpoints and not _holds_recipe(path, recipe):
        try:
            ours = path.is_file() and path.read_bytes().startswith(_RECIPE_HEADING.encode())
        except OSError:
            ours = False
        if not ours:
            raise MctfError(f"{path} holds another recipe and would be overwritten: name another --output")


def _holds_recipe(path: Path, recipe: Recipe) -> bool:
    """Whether a file holds exactly this recipe."""
    try:
        return read_recipe(read_toml(path)) == recipe
    except MctfError:
        return False


def _check_log(trainer: Trainer) -> None:
    """Raise MctfError where the log tells of steps after the first checkpoint, but there is no checkpoint."""
    recipe = trainer.recipe
    first_save = min(recipe.save_epochs * trainer.steps.per_epoch, recipe.save_steps or trainer.steps.total)
    logged = logged_steps(recipe.output / LOG_FILE)
    if trainer.step == 0 and logged > min(first_save, trainer.steps.total):
        raise MctfError(
            f"the log in {recipe.output} ends at step {logged}, but there are no checkpoints to resume from: "
            "put them back, or name another --output"
        )


def train(trainer: Trainer, on_step: OnStep) -> None:
    """All remaining steps, logged; `Trainer.run` lists the exceptions."""
    logs = Logs(trainer.recipe.output, done=trainer.step) if trainer.distributed.is_main else None
    try:
        with catch_signals() as stop:
            trainer.run(stop, logs, on_step)
    finally:
        if logs is not None:
            logs.close()


def resume_command(output: Path, world_size: int) -> str:
    """The shell command that continues a run."""
    launcher = ["mctf"] if world_size == 1 else ["torchrun", "--nproc-per-node", str(world_size), "-m", "mctf"]
    return shlex.join([*launcher, "finetune", "--config", str(output / RECIPE_FILE), "--resume"])


def build_trainer(recipe: Recipe, distributed: DistributedContext, *, on_decoding: Progress | None = None) -> Trainer:
    """A run at its first step. on_decoding: called while images are decoded into memory."""
    torch.manual_seed(recipe.seed)
    options = {"drop_path_rate": recipe.drop_path} if recipe.drop_path else {}
    model: Any
    if recipe.random_weights:
        model = create(recipe.model, image_size=recipe.image_size, **options)
    else:
        model = load_model(recipe.model, weights=recipe.weights, image_size=recipe.image_size, **options)
    if recipe.flops is not None or recipe.schedule is not None:  # refused before images are decoded
        recipe.request().resolve(find_host(model))
    preprocessing = Preprocessing.of(model)
    feed = make_feed(
        recipe.data,
        options=FeedOptions(
            batch=recipe.batch,
            image_size=preprocessing.image_size,
            mean=preprocessing.mean,
            std=preprocessing.std,
            interpolation=preprocessing.interpolation,
            seed=recipe.seed,
            augmentation=recipe.augmentation,  # type: ignore[arg-type]
            smallest_crop=recipe.smallest_crop,
            color_jitter=recipe.color_jitter,
            repeated=recipe.repeated,
            workers=recipe.workers,
            in_memory=recipe.in_memory,  # type: ignore[arg-type]
            on_corrupt=recipe.on_corrupt,  # type: ignore[arg-type]
            limits=recipe.limits,
        ),
        device=distributed.device,
        rank=distributed.rank,
        world_size=distributed.world_size,
        classes=recipe.classes,
        progress=on_decoding if distributed.is_main else None,
    )
    if recipe.validation is not None:
        # other classes and unreadable images are refused before training
        validation = open_dataset(recipe.validation, class_to_idx=feed.class_to_idx, limits=recipe.limits)
        for _ in validation.spaced(_PROBED).readable(skip=recipe.on_corrupt == "skip"):
            pass
    same_classes = model.num_classes == feed.num_classes
    if not same_classes:
        model.reset_classifier(feed.num_classes)
    return build_around(model, feed, recipe, distributed, preprocessing=preprocessing, same_classes=same_classes)


def build_around(
    model: nn.Module,
    feed: Feed,
    recipe: Recipe,
    distributed: DistributedContext,
    *,
    preprocessing: Preprocessing | None = None,
    same_classes: bool = True,
) -> Trainer:
    """A run at its first step, from an unfused model and a feed.

    preprocessing: of the feed's images, for a teacher. same_classes: whether the model's classifier was trained for the
    classes of the feed.
    """
    steps = Steps(feed.steps(), recipe.accumulate, recipe.total_epochs)
    if steps.total == 0:
        raise MctfError(
            f"{plural(feed.num_images, 'image')} cannot fill one step of this size: lower batch or accumulate"
        )
    model.to(distributed.device)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    teacher = None
    if recipe.teacher is not None:
        teacher_model = load_model(recipe.teacher, weights=recipe.teacher_weights).to(distributed.device)
        if recipe.compile:
            teacher_model.compile()
        teacher = Teacher(teacher_model, student=preprocessing or Preprocessing.of(model), classes=feed.num_classes)
    method, original = recipe.make_method(), None
    if method is not None and method.learns_from_original and not recipe.random_weights:
        original = OriginalModel(model, same_classes=same_classes)
        if recipe.compile:
            original.model.compile()
    if method is not None:
        with warnings.catch_warnings(action="ignore", category=UntrainedWarning):
            fuse(
                model,
                recipe.method,
                r=recipe.r,
                flops=recipe.flops,
                blocks=recipe.blocks,
                schedule=recipe.schedule,
                **recipe.method_options,
            )
    # after fusing, so that the layers of a learned method are averaged and trained as well
    ema = None if recipe.ema is None else ModelEmaV3(model, decay=recipe.ema, use_warmup=True)
    optimizer = make_optimizer(model, recipe)
    consistency = Consistency(
        weight=recipe.consistency,
        confidence=recipe.confidence,
        smoothing=recipe.smoothing,
        up_to=recipe.lighter_r,
    )
    objective = Objective(
        model,
        consistency=consistency if recipe.objective == "consistency" else None,
        smoothing=recipe.smoothing,
        distillation=None if teacher is None else Distillation(weight=recipe.teaching, temperature=recipe.temperature),
        extra=getattr(fused_stack(model).method, "extra_loss", None) if recipe.fuses else None,
        original=original,
    )
    if recipe.compile:
        compile_blocks(model)
    return Trainer(
        recipe=recipe,
        distributed=distributed,
        feed=feed,
        steps=steps,
        model=model,
        objective=objective,
        optimizer=optimizer,
        schedule=LRSchedule(optimizer, recipe, per_epoch=steps.per_epoch),
        checkpoints=Checkpoints(recipe.output / "checkpoints", recipe.keep),
        ema=ema,
        teacher=teacher,
    )
