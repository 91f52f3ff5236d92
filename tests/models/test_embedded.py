"""The embedded models: their packaged weights, their classes, the commands that take the name, the accuracy."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import mctf
from helpers.command_line import Command, Outcome
from helpers.flops import EXACT, counted
from helpers.images import write_folder
from helpers.shared_data import SHARED, needs_shared
from mctf.data import EvalLoader, Preprocessing, open_dataset
from mctf.evaluation.evaluate import Setting, evaluate
from mctf.models.class_names import class_labels, class_names
from mctf.models.embedded import SMALL_WEIGHTS, WEIGHTS, pack_int8, unpack_int8
from mctf.models.loading import load_model
from mctf.viz.demo import photographs

VALIDATION = "data/tiny-imagenet-val.zip"
TABLE = "data/tiny-imagenet-classes.tsv"
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "embedded.md"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def about(weights: Path = WEIGHTS) -> dict[str, Any]:
    """The metadata of a file of weights."""
    with safe_open(weights, "pt") as file:
        return json.loads(file.metadata()["about"])


def same(model: nn.Module, state: dict[str, Tensor], *, but: tuple[str, ...] = ()) -> bool:
    """Whether a model has the values of a file, in the model's own dtype; `but`: names to ignore."""
    own = model.state_dict()
    return all(
        torch.equal(own[name], value.to(own[name].dtype))
        for name, value in unpack_int8(state).items()
        if name not in but
    )


class TestWeights:
    def test_are_a_small_file(self) -> None:
        assert WEIGHTS.stat().st_size <= 6_000_000
        assert SMALL_WEIGHTS.stat().st_size <= 4_000_000
        assert {value.dtype for value in load_file(WEIGHTS).values()} == {torch.float16, torch.int8}
        dtypes = {value.dtype for value in load_file(SMALL_WEIGHTS).values()}
        assert dtypes == {torch.float16, torch.int64}, "the counters of batch norm are whole numbers"

    @pytest.mark.parametrize(("name", "weights"), [("embedded", WEIGHTS), ("embedded_small", SMALL_WEIGHTS)])
    def test_come_without_network_by_timm_and_by_mctf(self, offline: None, name: str, weights: Path) -> None:
        state = load_file(weights)
        for model in (timm.create_model(name, pretrained=True), load_model(name)):
            assert same(model, state)
            assert next(model.parameters()).dtype == torch.float32
        assert not same(timm.create_model(name), state), "without pretrained=True weights are random"

    @pytest.mark.parametrize(
        ("name", "weights", "size", "rows", "width"),
        [("embedded", WEIGHTS, (160, 224), 10 * 14, 192), ("embedded_small", SMALL_WEIGHTS, (96, 64), 24 * 16, 128)],
    )
    def test_fit_other_classes_channels_and_image_sizes(
        self, name: str, weights: Path, size: tuple[int, int], rows: int, width: int
    ) -> None:
        state = load_file(weights)
        ten = timm.create_model(name, pretrained=True, num_classes=10)
        assert ten.head.weight.shape == (10, width)
        assert same(ten, state, but=("head.weight", "head.bias"))
        grey = timm.create_model(name, pretrained=True, in_chans=1).eval()
        assert grey(torch.zeros(1, 1, *grey.pretrained_cfg["input_size"][1:])).shape == (1, 200)
        other = load_model(name, image_size=size)
        assert other.pos_embed.shape == (1, 1 + rows, width)
        assert other(torch.zeros(1, 3, *size)).shape == (1, 200)
        assert same(other, state, but=("pos_embed",))

    def test_in_float16_are_also_read_as_a_file(self) -> None:
        assert same(load_model("embedded_small", weights=SMALL_WEIGHTS), load_file(SMALL_WEIGHTS))

    def test_record_their_training_and_accuracy(self) -> None:
        facts = about()
        assert "recipes/tiny_imagenet/consistency_ward" in facts["command"]
        assert facts["images"] == 5000
        assert facts["top1"]["0"] >= 74
        assert facts["top1"]["0.209"] >= facts["top1"]["0"] - 0.3, "at 44 % fewer FLOPs"
        (run,) = (
            each
            for each in json.loads((RESULTS / "tiny_imagenet_seeds.json").read_text())["runs"]["consistency_ward"]
            if each["name"] == "consistency_ward-0"
        )
        assert facts["top1"] == {str(row["r"]): row["top1"] for row in run["rows"]}
        assert facts["commit"] == run["commit"]
        cells = " | ".join(f"{value:.2f}" for value in facts["top1"].values())
        assert f"| as trained | {cells} |" in PAGE.read_text(encoding="utf-8")
        small = about(SMALL_WEIGHTS)
        cells = " | ".join(f"{value:.2f}" for value in small["top1"].values())
        assert f"| top-1 | {cells} |" in PAGE.read_text(encoding="utf-8")
        assert "recipes/tiny_imagenet/embedded" in small["command"]
        assert small["top1"]["21"] >= small["top1"]["0"] - 1, "at 41 % fewer FLOPs"


def test_packing_rounds_to_half_a_step_of_each_row() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 5) * torch.logspace(-6, 2, 6)[:, None]
    weight[2] = 0
    state = {"blocks.0.fc.weight": weight, "blocks.0.fc.bias": torch.randn(6), "head.weight": torch.randn(2, 3)}
    packed = pack_int8(state)
    assert packed["blocks.0.fc.weight"].dtype == torch.int8
    assert packed["head.weight"].dtype == torch.float16
    restored = unpack_int8(packed)
    assert restored.keys() == state.keys()
    step = packed["blocks.0.fc.weight_scale"].float()[:, None]
    # float16 rounds the step itself, at most by 1/2048 of it or by half of its smallest number, times 127
    assert ((restored["blocks.0.fc.weight"] - weight).abs() <= step / 2 + 127 * (step / 2048 + 3e-8)).all()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "r", "method", "parameters", "tokens", "gflops"),
    [
        ("embedded", 0.209, "ward", 5_563_016, 197, (1.26, 0.71)),
        ("embedded_small", 21, "mctf", 1_976_552, 257, (0.74, 0.43)),
    ],
)
def test_size_and_cost_are_those_of_their_page(
    name: str, r: float, method: str, parameters: int, tokens: int, gflops: tuple[float, float]
) -> None:
    model = timm.create_model(name).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    plan = mctf.plan(name, method=method, r=r)
    assert plan.token_counts[0] == tokens
    assert (round(plan.gflops_base, 2), round(plan.gflops, 2)) == gflops
    images = torch.zeros(1, *model.pretrained_cfg["input_size"])
    assert counted(model, images) == pytest.approx(plan.gflops_base, abs=EXACT)


class TestClasses:
    def test_are_numbered_in_the_order_of_their_wnids(self) -> None:
        wnids = list(class_names())
        assert len(wnids) == 200
        assert wnids == sorted(wnids)
        assert timm.create_model("embedded").pretrained_cfg["label_names"] == tuple(wnids)

    @needs_shared(TABLE)
    def test_are_those_of_the_dataset(self) -> None:
        rows = [line.split("\t") for line in (SHARED / TABLE).read_text(encoding="utf-8").splitlines()]
        assert [(index, wnid, names) for index, wnid, names in rows] == [
            (str(index), wnid, names) for index, (wnid, names) in enumerate(class_names().items())
        ]

    @needs_shared(VALIDATION)
    def test_are_matched_to_the_folders_of_the_dataset(self) -> None:
        dataset = open_dataset(SHARED / VALIDATION).for_model(200)
        assert dataset.targets is not None
        wnids = list(class_names())
        assert [wnids[index] for index in dataset.targets] == dataset.class_names


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in folders named by wnids, far fewer than the model has classes."""
    return write_folder(tmp_path_factory.mktemp("pictures"), "n02123045/a.png", "n07920052/b.png", "n02123045/c.png")


class TestCommands:
    """Every verb takes the name and nothing else, without a network."""

    @pytest.fixture
    def command(self, offline: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
        return Command(monkeypatch, capsys)

    def facts(self, outcome: Outcome) -> dict[str, Any]:
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    def test_eval_numbers_its_classes(self, command: Command, pictures: Path) -> None:
        report = self.facts(command("eval", "embedded", "--data", pictures, "-r", "0,16", "--json"))
        assert report["notes"] == ["classes are numbered as in Tiny-ImageNet"]
        assert all(row["top1"] is not None for row in report["rows"])

    def test_compare(self, command: Command, pictures: Path) -> None:
        options = ("--methods", "mctf,tome", "--gflops", "0.8", "--json")
        report = self.facts(command("compare", "embedded", "--data", pictures, *options))
        assert [row["method"] for row in report["rows"]].count("mctf") == 1

    def test_visualize(self, command: Command, pictures: Path, tmp_path: Path) -> None:
        file = pictures / "n02123045" / "a.png"
        report = self.facts(command("visualize", file, "--model", "embedded", "-o", tmp_path / "x.png", "--json"))
        assert report["weights"] == "pretrained"

    def test_bench(self, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mctf.evaluation.benchmark._repeats", lambda *_: 1)
        report = self.facts(command("bench", "embedded_small", "-m", "mctf", "--batch", 1, "--rounds", 1, "--json"))
        assert len(report["tables"][0]["rows"]) >= 3

    def test_finetune_starts_from_its_weights(self, command: Command, pictures: Path, tmp_path: Path) -> None:
        options = ("--epochs", 1, "--batch", 2, "--lr", 1e-9, "--min-lr", 0, "--output", tmp_path / "run", "--json")
        report = self.facts(command("finetune", "embedded_small", "--data", pictures, *options))
        assert report["steps"] == 1
        trained, state = load_file(tmp_path / "run" / "model.safetensors"), load_file(SMALL_WEIGHTS)
        assert trained["head.weight"].shape == (2, 128), "the pictures have two classes"
        name = "blocks.3.attn.qkv.weight"
        assert (trained[name] - state[name].float()).abs().max() < 1e-7, "a step of AdamW is as long as its rate, 1e-9"


class TestTrained:
    """Predictions, which need trained weights."""

    @pytest.fixture(scope="class", params=["embedded", "embedded_small"])
    def model(self, request: pytest.FixtureRequest) -> nn.Module:
        return timm.create_model(request.param, pretrained=True).eval()

    @pytest.mark.parametrize("r", [0, 0.2])
    @torch.inference_mode()
    def test_a_cup_of_coffee_is_recognized(self, model: nn.Module, r: float) -> None:
        (photograph,) = (each for each in photographs() if each.label == "espresso")
        image = Preprocessing.of(model).transform()(photograph.open())[None]
        mctf.fuse(model, "ward", r=r)
        try:
            answer = class_labels(model)[int(model(image).argmax())]
        finally:
            mctf.unfuse(model)
        assert answer == photograph.label

    @pytest.mark.slow
    @needs_shared(VALIDATION)
    def test_accuracy_is_that_of_the_metadata_and_fusing_costs_little(self) -> None:
        model = timm.create_model("embedded", pretrained=True).eval()
        dataset = open_dataset(SHARED / VALIDATION).for_model(200).spaced(100)
        batches = EvalLoader(dataset, Preprocessing.of(model).transform(), batch_size=50)
        unfused, fused = evaluate(model, batches, [Setting("ward", 0), Setting("ward", 0.209)]).rows
        assert unfused.top1 is not None
        assert fused.top1 is not None
        assert abs(unfused.top1 - about()["top1"]["0"]) < 13.2, "three standard errors of 100 images"
        assert fused.top1 > unfused.top1 - 5


def test_the_lines_of_its_page_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL))
    shutil.copy(photographs()[0].path, tmp_path / "cat.png")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    names = {names.split(",")[0] for names in class_names().values()}
    predictions = [line.split(" ", 1) for line in lines[:3]]
    assert all(share.endswith("%") and name in names for share, name in predictions), lines
    assert lines[-2] == re.findall(r"# the last line but one: (.*)", code)[0]
