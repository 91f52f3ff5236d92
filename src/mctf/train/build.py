"""From a recipe to a run that is ready to go: model, images, teacher, optimiser, objective."""

import warnings
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from .._utils import plural
from ..api import fuse, fused_stack
from ..data import Feed, FeedOptions, Preprocessing, Progress, make_feed, open_dataset
from ..distributed import DistributedContext, broadcast_object
from ..errors import MctfError
from ..methods._layers import UntrainedWarning
from ..models.loading import create, load_model
from .checkpoint import Checkpoints, write_whole
from .compile import compile_blocks
from .config import Recipe
from .consistency import Consistency
from .engine import OnStep, Trainer
from .logging import Logs
from .objective import Objective
from .optimizer import Schedule, Steps, make_optimiser
from .signals import interruptible
from .teachers import Distillation, Original, Teacher


def assemble(recipe: Recipe, processes: DistributedContext, *, on_decoding: Progress | None = None) -> Trainer:
    """A run at its first step. on_decoding: told while images are decoded into memory, how many of how many."""
    torch.manual_seed(recipe.seed)
    model: Any = load_student(recipe)
    preprocessing = Preprocessing.of(model)
    feed = _feed(recipe, preprocessing, processes, on_decoding)
    if recipe.validation is not None:
        open_dataset(
            recipe.validation, class_to_idx=feed.class_to_idx
        )  # other classes are better known now than at the end
    knows_classes = model.num_classes == feed.num_classes
    if not knows_classes:
        model.reset_classifier(feed.num_classes)
    return assemble_around(model, feed, recipe, processes, preprocessing=preprocessing, knows_classes=knows_classes)


def assemble_around(
    model: nn.Module,
    feed: Feed,
    recipe: Recipe,
    processes: DistributedContext,
    *,
    preprocessing: Preprocessing | None = None,
    knows_classes: bool = True,
) -> Trainer:
    """The same for a plain model and a feed of one's own.

    preprocessing: of the feed's images, for a teacher. knows_classes: whether the model's classifier is one for the
    classes of the feed already.
    """
    steps = Steps(feed.steps(), recipe.accumulate, recipe.all_epochs)
    if steps.total == 0:
        raise MctfError(f"{feed.num_images} images are too few for one step of this size: lower batch or accumulate")
    model.to(processes.device)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    teacher = _teacher(recipe, preprocessing or Preprocessing.of(model), feed.num_classes, processes)
    original = _original(recipe, model, knows_classes=knows_classes)
    if recipe.fuses:
        with warnings.catch_warnings(action="ignore", category=UntrainedWarning):
            fuse(model, recipe.method, r=recipe.r, blocks=recipe.blocks, **recipe.method_options)
    # after fusing, so that a method's own layers are averaged and trained as well
    average = None if recipe.ema is None else ModelEmaV3(model, decay=recipe.ema, use_warmup=True)
    optimiser = make_optimiser(model, recipe)
    objective = _objective(recipe, model, original)
    if recipe.compile:
        compile_blocks(model)
    return Trainer(
        recipe=recipe,
        processes=processes,
        feed=feed,
        steps=steps,
        model=model,
        objective=objective,
        optimiser=optimiser,
        schedule=Schedule(optimiser, recipe, per_epoch=steps.per_epoch),
        checkpoints=Checkpoints(recipe.output / "checkpoints", recipe.keep),
        average=average,
        teacher=teacher,
    )


def load_student(recipe: Recipe) -> nn.Module:
    """The model to train; random weights follow from torch's seed."""
    options = {"drop_path_rate": recipe.drop_path} if recipe.drop_path else {}
    if recipe.random_weights:
        return create(recipe.model, image_size=recipe.image_size, **options)
    return load_model(recipe.model, weights=recipe.weights, image_size=recipe.image_size, **options)


def _feed(
    recipe: Recipe, preprocessing: Preprocessing, processes: DistributedContext, on_decoding: Progress | None
) -> Feed:
    options = FeedOptions(
        batch=recipe.batch,
        image_size=preprocessing.image_size,
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        seed=recipe.seed,
        augmentation=recipe.augmentation,  # type: ignore[arg-type]
        smallest_crop=recipe.smallest_crop,
        color_jitter=recipe.colour_jitter,
        repeated=recipe.repeated,
        workers=recipe.workers,
        in_memory=recipe.in_memory,  # type: ignore[arg-type]
        on_corrupt=recipe.on_corrupt,  # type: ignore[arg-type]
    )
    return make_feed(
        recipe.data,
        options=options,
        device=processes.device,
        rank=processes.rank,
        world_size=processes.world_size,
        classes=recipe.classes,
        progress=on_decoding if processes.is_main else None,
    )


def _teacher(recipe: Recipe, seen_by: Preprocessing, classes: int, processes: DistributedContext) -> Teacher | None:
    if recipe.teacher is None:
        return None
    model = load_model(recipe.teacher, weights=recipe.teacher_weights).to(processes.device)
    if recipe.compile:
        model.compile()
    return Teacher(model, seen_by=seen_by, classes=classes)


def _original(recipe: Recipe, model: nn.Module, *, knows_classes: bool) -> Original | None:
    """The plain model as it is, for a method that learns from it; random weights teach nothing."""
    method = recipe.made_method()
    if method is None or not method.learns_from_original or recipe.random_weights:
        return None
    original = Original(model, knows_classes=knows_classes)
    if recipe.compile:
        original.model.compile()
    return original


def _objective(recipe: Recipe, model: nn.Module, original: Original | None) -> Objective:
    """What the model is trained for."""
    consistency = extra = None
    if recipe.fuses:
        extra = getattr(fused_stack(model).method, "extra_loss", None)
    if recipe.objective == "consistency":
        consistency = Consistency(
            weight=recipe.consistency,
            confidence=recipe.confidence,
            smoothing=recipe.smoothing,
            up_to=recipe.lighter_r,
        )
    distillation = None
    if recipe.teacher is not None:
        distillation = Distillation(weight=recipe.teaching, temperature=recipe.temperature)
    return Objective(
        model,
        consistency=consistency,
        smoothing=recipe.smoothing,
        distillation=distillation,
        extra=extra,
        original=original,
    )


# MERGED from mctf.train.build:
# A run from its first step, or from where it stopped, to its last.

RECIPE = "recipe.toml"


def begin(
    recipe: Recipe, processes: DistributedContext, *, resume: bool = False, on_decoding: Progress | None = None
) -> tuple[Trainer, list[str]]:
    """A run that is ready to go, and what to know of it. It has written its recipe into its folder.

    resume: go on from the last checkpoint in the recipe's folder, or start where there is none: a command under
    torchrun that always says so survives a restart. Without it, a folder with checkpoints is refused.
    """
    found = broadcast_object(bool(Checkpoints(recipe.output / "checkpoints").paths()))
    if found and not resume:
        raise MctfError(f"{recipe.output} holds a run already: add --resume to go on, or name another --output")
    trainer = assemble(recipe, processes, on_decoding=on_decoding)
    notes = [f"{trainer.feed.note}, {plural(trainer.feed.num_classes, 'class', 'classes')}"]
    if resume:
        notes += trainer.resume()
    if trainer.step:
        notes.append(f"goes on after step {trainer.step} of {trainer.steps.total}")
    if processes.is_main:
        write_whole(recipe.output / RECIPE, recipe.as_toml().encode())
    return trainer, notes


def carry_on(trainer: Trainer, on_step: OnStep) -> None:
    """All steps that are left, logged; see `Trainer.run` for how it may end before."""
    logs = Logs(trainer.recipe.output, done=trainer.step) if trainer.processes.is_main else None
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
