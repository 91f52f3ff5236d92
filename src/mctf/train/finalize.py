"""What a finished run leaves: weights for `mctf eval --weights`, and how good they are at several r."""

from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors.torch import save
from torch import nn

from ..api import find_stack, unfuse
from ..data import Batch, EvalLoader, Preprocessing, open_dataset
from ..evaluation.evaluate import Evaluation, Setting, evaluate
from ..methods._layers import full_state_dict, split_state_dict, stash_layers
from .checkpoint import write_whole
from .config import PLAIN
from .engine import Trainer

WEIGHTS = "model.safetensors"
RAW_WEIGHTS = "model-raw.safetensors"  # those of the last step, where averaged ones are the result

Watching = Callable[[Iterable[Batch], int], Iterable[Batch]]


def finished_model(trainer: Trainer) -> nn.Module:
    """The model that training leaves, plain and in evaluation mode: the averaged one if there is an average.

    Layers that the method has learned are kept aside in it.
    """
    model = trainer.model if trainer.average is None else trainer.average.module
    if find_stack(model) is not None:
        _, layers = split_state_dict(model.state_dict())
        unfuse(model)
        if layers:
            stash_layers(model, layers)
    return model.eval()


def write_weights(trainer: Trainer) -> Path:
    """The weights of `finished_model` in a file; the raw ones beside them where these are averaged."""
    path = trainer.recipe.output / WEIGHTS
    facts = {"made_by": f"mctf finetune {trainer.recipe.model}, step {trainer.step}"}  # one: their order would vary
    averaged = trainer.average is not None
    write_whole(path, _packed(trainer.average.module if averaged else trainer.model, facts))  # type: ignore[union-attr]
    if averaged:
        write_whole(trainer.recipe.output / RAW_WEIGHTS, _packed(trainer.model, facts))
    return path


def _packed(model: nn.Module, facts: dict[str, str]) -> bytes:
    tensors = {name: value.detach().cpu().contiguous() for name, value in full_state_dict(model).items()}
    return save(tensors, facts)


def evaluate_finished(
    model: nn.Module, trainer: Trainer, watching: Watching = lambda batches, total: batches
) -> Evaluation | None:
    """Accuracy, fidelity and speed of what a run left, on its validation images at its r; None without such images.

    Every process evaluates its share. watching: goes through the batches, of which there are so many, for a bar.
    """
    recipe, processes = trainer.recipe, trainer.processes
    if recipe.validation is None:
        return None
    dataset = open_dataset(recipe.validation, class_to_idx=trainer.feed.class_to_idx)
    batches = EvalLoader(
        dataset.shard(processes.rank, processes.world_size),
        Preprocessing.of(model).transform(),
        batch_size=recipe.batch,
        workers=recipe.workers,
        device=processes.device,
    )
    method = "mctf" if recipe.method == PLAIN else recipe.method
    options = tuple(recipe.method_options.items())
    settings = [Setting(method, r, recipe.blocks, options) for r in recipe.evaluate_r]
    return evaluate(model, watching(batches, len(batches)), settings)
