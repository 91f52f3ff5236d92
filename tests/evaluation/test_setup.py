"""What `open_run` opens: the model, the images and labels, the batches of this rank."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from helpers.images import write_folder
from mctf import MctfError
from mctf.evaluation.setup import RunOptions, open_run


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    write_folder(tmp_path / "images", *(f"{name}/{index}.png" for name in ("cat", "dog") for index in range(3)))
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "tiny.safetensors")
    return RunOptions(
        model="test_vit",
        data=tmp_path / "images",
        weights=tmp_path / "tiny.safetensors",
        image_size=(64, 96),
        batch_size=2,
        limit=5,
        device_name="cpu",
        dtype="bfloat16",
    )


def test_a_run_has_model_images_labels_and_batches(options: RunOptions) -> None:
    with open_run(options) as run:
        assert next(run.model.parameters()).dtype == torch.bfloat16
        assert run.dataset.targets is not None
        assert run.dataset.targets.tolist() == [0, 0, 0, 1, 1]
        assert [tuple(batch.pixels.shape) for batch in run.batches] == [(2, 3, 64, 96), (2, 3, 64, 96), (1, 3, 64, 96)]
        assert run.distributed.is_main
        sample = run.sample(2)
        assert (tuple(sample.shape), sample.dtype) == ((2, 3, 64, 96), torch.bfloat16)
        facts = run.facts(images=5)
    assert (facts["model"], facts["images"], facts["dtype"], facts["processes"]) == ("test_vit", 5, "bfloat16", 1)


def test_out_of_memory_is_one_sentence(options: RunOptions) -> None:
    with (
        pytest.raises(MctfError, match="cpu has too little memory for batches of 2: lower --batch-size"),
        open_run(options),
    ):
        raise torch.OutOfMemoryError
