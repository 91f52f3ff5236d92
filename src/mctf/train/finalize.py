"""The results of a run: weights for `mctf eval --weights`, and their evaluation at several r."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save
from torch import nn

from .._utils import atomic_file, plural
from ..api import find_stack, unfuse
from ..data import Batch, EvalLoader, Preprocessing, open_dataset
from ..distributed import all_gather_object
from ..errors import MctfError
from ..evaluation.evaluate import Evaluation, Setting, evaluate
from ..methods._layers import full_state_dict, split_state_dict, stash_layers
from .engine import Trainer

WEIGHTS_FILE = "model.safetensors"
RAW_WEIGHTS_FILE = "model-raw.safetensors"  # the weights of the last step, where the result is their average
EVALUATION_FILE = "evaluation.json"

OnBatches = Callable[[Iterable[Batch], int], Iterable[Batch]]


def final_model(trainer: Trainer) -> nn.Module:
    """The trained model, unfused and in evaluation mode: the averaged one if there is one.

    Learned layers of the method are stashed in it.
    """
    model = trainer.model if trainer.ema is None else trainer.ema.module
    if find_stack(model) is not None:
        _, layers = split_state_dict(model.state_dict())
        unfuse(model)
        if layers:
            stash_layers(model, layers)
    return model.eval()


def write_weights(trainer: Trainer) -> Path:
    """The weights of `final_model` in a file, with those of the last step beside it where the result is averaged."""
    # one entry: safetensors writes several in varying order
    metadata = {"made_by": f"mctf finetune {trainer.recipe.model}, step {trainer.step}"}
    models = {WEIGHTS_FILE: trainer.model}
    if trainer.ema is not None:
        models = {WEIGHTS_FILE: trainer.ema.module, RAW_WEIGHTS_FILE: trainer.model}
    for name, model in models.items():
        tensors = {key: value.detach().cpu().contiguous() for key, value in full_state_dict(model).items()}
        _write(trainer.recipe.output / name, save(tensors, metadata))
    return trainer.recipe.output / WEIGHTS_FILE


def _write(path: Path, content: bytes) -> None:
    try:
        with atomic_file(path.with_name(f".{path.name}.{os.getpid()}"), lambda: path, sync=True) as file:
            file.write(content)
    except OSError as failure:
        raise MctfError(f"{path} cannot be written ({failure.strerror}): make room, then --resume") from None


def evaluate_final(
    model: nn.Module, trainer: Trainer, on_batches: OnBatches = lambda batches, total: batches
) -> Evaluation | None:
    """Accuracy, fidelity and speed of `final_model` on the validation images; None without such images.

    Every process evaluates its share. on_batches: wraps the iteration over the batches, given their number.
    """
    recipe, distributed = trainer.recipe, trainer.distributed
    if recipe.validation is None:
        return None
    dataset = open_dataset(recipe.validation, class_to_idx=trainer.feed.class_to_idx, limits=recipe.limits)
    batches = EvalLoader(
        dataset.shard(distributed.rank, distributed.world_size),
        Preprocessing.of(model).transform(),
        batch_size=recipe.batch,
        workers=recipe.workers,
        device=distributed.device,
        on_corrupt="skip",  # training is over: an unreadable image must not cost its result
    )
    method = recipe.method if recipe.fuses else "mctf"
    options = tuple(recipe.method_options.items())
    settings = [Setting(method, r, recipe.blocks, options) for r in recipe.evaluate_r or (0,)]
    if recipe.evaluate_r is None:  # a budget or a schedule: what it comes to, beside the unfused model
        settings.append(Setting.of(recipe.request(), model, options=recipe.method_options))
    evaluation = evaluate(model, on_batches(batches, len(batches)), settings)
    skipped = sum(all_gather_object(batches.skipped))
    if skipped:
        note = f"{plural(skipped, 'unreadable validation image')} left out"
        evaluation = replace(evaluation, notes=(*evaluation.notes, note))
    return evaluation
