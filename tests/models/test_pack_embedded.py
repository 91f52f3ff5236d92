"""The script that packages the weights of a run: its file, the metadata, its refusals."""

import io
import json
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file
from torch import nn

from mctf import MctfError
from mctf.models.loading import create, load_model

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "pack_embedded.py"
COMMAND = (
    "mctf finetune --config /x/recipes/tiny_imagenet/embedded_small.toml --data /x/a.zip,../y/b.zip --lr .1 -o ./runs/e"
)
SHORT = "mctf finetune --config recipes/tiny_imagenet/embedded_small.toml --data a.zip,b.zip --lr .1 -o runs/e"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    script = runpy.run_path(str(SCRIPT))
    script["pack"].__globals__["IMAGES"] = 4
    return script


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    save_file(create("embedded_small").state_dict(), folder / "model.safetensors")
    rows = [{"r": r, "top1": 50.5 - r, "method": "mctf"} for r in (0, 19)]
    facts = {"model": "embedded_small", "command": COMMAND, "commit": "abc", "images": 5000, "rows": rows}
    (folder / "evaluation.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def other_run(run: Path, tmp_path: Path) -> Path:
    """A copy to modify."""
    for name in ("model.safetensors", "evaluation.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def packed(script: dict[str, Any], run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file that the script writes for the run, and its printed line."""
    path = tmp_path_factory.mktemp("package") / "packed.safetensors"
    with redirect_stdout(io.StringIO()) as printed:
        script["main"](run / "model.safetensors", path)
    return path, printed.getvalue()


def test_the_file_is_the_run_in_float16(packed: tuple[Path, str], run: Path) -> None:
    path, printed = packed
    theirs, ours = load_file(run / "model.safetensors"), load_file(path)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value.half() if value.is_floating_point() else value), name
    assert path.stat().st_size <= 4_000_000
    assert "of 4 random images" in printed
    loaded = load_model("embedded_small", weights=path)
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}


def test_the_file_records_its_origin(packed: tuple[Path, str]) -> None:
    with safe_open(packed[0], "pt") as file:
        about = json.loads(file.metadata()["about"])
    assert about["command"] == SHORT
    assert about["top1"] == {"0": 50.5, "19": 31.5}
    assert about["images"] == 5000
    assert "research data" in about["data"]


def test_the_same_run_gives_the_same_bytes(script: dict[str, Any], packed: tuple[Path, str], run: Path) -> None:
    name, content, _ = script["pack"](run / "model.safetensors")
    assert (name, content) == ("embedded_small", packed[0].read_bytes())


def test_a_run_of_deit_tiny_is_packed_as_int8(script: dict[str, Any], other_run: Path) -> None:
    torch.manual_seed(0)
    model = create("embedded")
    save_file(model.state_dict(), other_run / "model.safetensors")
    facts = json.loads((other_run / "evaluation.json").read_text()) | {"model": "deit_tiny_patch16_224"}
    (other_run / "evaluation.json").write_text(json.dumps(facts))
    name, content, verdict = script["pack"](other_run / "model.safetensors")
    assert name == "embedded"
    assert len(content) <= 6_000_000
    assert "of 4 random images" in verdict
    assert load(content)["blocks.0.mlp.fc1.weight"].dtype == torch.int8


def test_a_run_without_evaluation_is_refused(script: dict[str, Any], other_run: Path) -> None:
    (other_run / "evaluation.json").unlink()
    with pytest.raises(MctfError, match=r"there is no .*evaluation\.json: .* train with --validation"):
        script["pack"](other_run / "model.safetensors")


def test_weights_for_other_classes_are_refused(script: dict[str, Any], other_run: Path) -> None:
    save_file(create("embedded_small", num_classes=10).state_dict(), other_run / "model.safetensors")
    with pytest.raises(MctfError, match="has 10 classes: expected weights for the 200 of Tiny-ImageNet"):
        script["pack"](other_run / "model.safetensors")


def test_weights_beyond_float16_are_refused(script: dict[str, Any], other_run: Path) -> None:
    state = load_file(other_run / "model.safetensors")
    state["norm.bias"][3] = 1e6
    save_file(state, other_run / "model.safetensors")
    with pytest.raises(MctfError, match=r"norm\.bias of .* does not fit into float16"):
        script["pack"](other_run / "model.safetensors")


def test_logits_that_differ_by_more_than_rounding_are_refused(script: dict[str, Any]) -> None:
    def constant(logit: float) -> nn.Module:
        layer = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2))
        nn.init.zeros_(layer[1].weight)
        layer[1].bias.data.copy_(torch.tensor([1.0, logit]))
        return layer

    assert "0.01 of 1" in script["compare"](constant(0.51), constant(0.5), tolerance=0.02)
    with pytest.raises(MctfError, match=r"moves a logit by 0\.1 of 1"):
        script["compare"](constant(0.6), constant(0.5), tolerance=0.02)


def test_nothing_is_written_where_packing_fails(script: dict[str, Any], other_run: Path) -> None:
    (other_run / "evaluation.json").unlink()
    with pytest.raises(MctfError):
        script["main"](other_run / "model.safetensors", other_run / "packed.safetensors")
    assert not (other_run / "packed.safetensors").exists()
