"""Several processes: each image is evaluated by exactly one, and the results cover all of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from helpers.command_line import Command
from helpers.images import write_folder
from helpers.torchrun import run_together
from mctf import MctfError
from mctf.data import open_dataset
from mctf.distributed import DistributedContext, all_gather_object, broadcast_object, init_distributed, on_main

CPU = torch.device("cpu")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path / "pictures", *(f"{name}/{index}.png" for name in ("cat", "dog") for index in range(4))
    )


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shards_are_a_partition(pictures: Path, world: int) -> None:
    dataset = open_dataset(pictures).for_model(2)
    shards = [dataset.shard(rank, world) for rank in range(world)]
    assert sorted(name for shard in shards for name in shard.names) == sorted(dataset.names)
    for shard in shards:
        assert shard.targets.tolist() == [0 if name.startswith("cat") else 1 for name in shard.names]
        assert shard.notes == dataset.notes


def test_more_processes_than_images(pictures: Path) -> None:
    with pytest.raises(MctfError, match="holds fewer images than the 9 processes: start fewer processes"):
        open_dataset(pictures).shard(0, 9)


def test_a_single_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with init_distributed(CPU) as context:
        assert (context.rank, context.world_size, context.is_main, context.is_distributed) == (0, 1, True, False)
        assert all_gather_object("mine") == ["mine"]
        assert broadcast_object("mine") == "mine"


@pytest.mark.parametrize("size", ["abc", "", "-1", "1.5"])
def test_a_world_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with (
        pytest.raises(MctfError, match=f"WORLD_SIZE={size} is not a number.*: start them with torchrun"),
        init_distributed(CPU),
    ):
        pass


def test_a_group_without_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(MctfError, match=r"the processes find no group \(.*RANK.*\): start them"), init_distributed(CPU):
        pass


def test_a_refusal_of_rank_0_is_raised_and_a_value_returned() -> None:
    alone = DistributedContext(0, 1, CPU)
    assert on_main(alone, lambda: 3) == 3

    def refuse() -> None:
        raise MctfError("no: do otherwise")

    with pytest.raises(MctfError, match="no: do otherwise"):
        on_main(alone, refuse)


def test_a_lost_rank_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_: None)
    with (
        pytest.raises(MctfError, match="process 1 lost another process, whose message says why"),
        init_distributed(CPU),
    ):
        raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4")
    with pytest.raises(RuntimeError, match="shapes"), init_distributed(CPU):
        raise RuntimeError("shapes do not fit")


def rows(output: str) -> dict[str, Any]:
    return json.loads(output[output.index("{") : output.rindex("}") + 1])


@pytest.mark.slow
def test_eval_in_two_processes_equals_eval_in_one(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (pictures / "cat" / "0.png").unlink()  # seven images: the shares are unequal
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "tiny.safetensors")
    command = ["eval", "test_vit", "--data", pictures, "--weights", tmp_path / "tiny.safetensors", "-r", "0,8"]
    command += ["--batch-size", 3, "--device", "cpu", "--json", "--image-size", 96]
    one = rows(Command(monkeypatch, capfd)(*command).out)
    printed = run_together(command, world=2, folder=tmp_path)
    assert printed.count('"rows"') == 1
    two = rows(printed)
    assert (one["images"], two["images"]) == (7, 7)
    assert (one["processes"], two["processes"]) == (1, 2)
    for ours, theirs in zip(one["rows"], two["rows"], strict=True):
        for name in ("r", "top1", "top5", "agreement", "kl", "kl_error", "class_cosine", "gflops"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name  # other batches, other rounding
