"""`mctf reproduce` on the command line."""

import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import timm
from safetensors.torch import load_file, save_file

from helpers.command_line import Command, Outcome
from helpers.images import write_folder
from mctf._locks import lock_folder
from mctf.reproduce import analyses, costs
from mctf.reproduce.costs import Counted
from mctf.reproduce.runner import experiments


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three classes, and weights of a tiny model with three classes."""
    place = tmp_path_factory.mktemp("reproduce")
    write_folder(place / "pictures", *(f"{name}/{index}.png" for name in ("cat", "dog", "emu") for index in range(2)))
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), place / "tiny.safetensors")
    return place


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(costs, "count", lambda row: Counted(row.r, row.gflops, row.params_m))
    return Command(monkeypatch, capfd, "reproduce")


@pytest.fixture
def basic(place: Path) -> list[object]:
    return ["test_vit", "--data", place / "pictures", "--weights", place / "tiny.safetensors", "--out", "report"]


def progress_lines(outcome: Outcome) -> str:
    """The lines on stderr before the note on classes."""
    rest, note = outcome.err.rsplit("note: ", 1)
    assert note == "classes are numbered by folder name\n"
    return rest


def test_it_writes_a_page_and_prints_its_path(run, basic, tmp_path: Path) -> None:
    outcome = run(*basic, "--only", "class_token,largest_token", "--table", "1")
    assert (outcome.code, outcome.out) == (0, "report/index.html\n"), outcome.err
    lines = progress_lines(outcome).splitlines()
    assert [line.rsplit(" in ", 1)[0] for line in lines] == [
        "1 of 3: costs_methods",
        "2 of 3: class_token",
        "3 of 3: largest_token",
    ]
    facts = json.loads((tmp_path / "report" / "report.json").read_text())
    assert list(facts["experiments"]) == ["costs_methods", "class_token", "largest_token"]
    assert facts["facts"]["Images"] == "6 of pictures, 160x160, crop 0.95"
    assert facts["facts"]["Model"] == "test_vit, weights: tiny.safetensors"
    assert "--only class_token,largest_token" in facts["facts"]["Command"]


@pytest.mark.slow
def test_an_interrupted_run_resumes(run, basic, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    own = analyses.ClassToken.run

    def stopped(self, task):
        measured.append(self.name)
        if len(measured) == 1:
            raise KeyboardInterrupt
        return own(self, task)

    monkeypatch.setattr(analyses.ClassToken, "run", stopped)
    first = run(*basic, "--only", "costs_methods,class_token")
    assert (first.code, first.err.splitlines()[-1]) == (130, "mctf: interrupted")
    second = run(*basic, "--only", "costs_methods,class_token", "--json")
    assert progress_lines(second).startswith("measured before: costs_methods\n1 of 1: class_token in ")
    assert list(json.loads(second.out)["experiments"]) == ["costs_methods", "class_token"]
    third = run(*basic, "--only", "costs_methods,class_token")
    assert progress_lines(third) == "measured before: costs_methods, class_token\n"
    fourth = run(*basic, "--only", "class_token", "--again")
    assert progress_lines(fourth).startswith("1 of 1: class_token in ")
    assert len(measured) == 3


def test_without_a_model_it_counts_costs(run, tmp_path: Path) -> None:
    assert run("--table", "1,2", "--out", "report").code == 0
    facts = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (list(facts["experiments"]), facts["skipped"]) == (["costs_methods", "costs_backbones"], {})


@pytest.mark.slow
def test_quick_uses_few_images_and_limit_fewer(run, place: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "many", *(f"{index}.png" for index in range(100)))
    options = ["test_vit", "--weights", place / "tiny.safetensors", "--only", "largest_token", "--quick", "--json"]
    many = json.loads(run(*options, "--data", "many", "--out", "many_report").out)
    assert len(many["experiments"]["largest_token"]["result"]["sizes"]["with_size"]) == 96
    few = json.loads(run(*options, "--data", "many", "--out", "few_report", "--limit", 4).out)
    assert len(few["experiments"]["largest_token"]["result"]["sizes"]["with_size"]) == 4


@pytest.mark.slow
def test_a_limit_keeps_the_class_indices(run, basic) -> None:
    content = json.loads(run(*basic, "--only", "one_step_ahead", "--limit", 2, "--quick", "--json").out)
    result = content["experiments"]["one_step_ahead"]["result"]
    assert (result["images"], result["base"]["top1"] in (0.0, 50.0, 100.0)) == (2, True)


@pytest.mark.slow
def test_other_images_in_the_same_folder_are_refused(run, basic) -> None:
    assert run(*basic, "--only", "largest_token").code == 0
    line = run.refusal(*basic, "--only", "largest_token", "--limit", 3)
    assert "report holds results for images 6, not 3" in line
    assert "--again" in line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["test_vit", "--out", "report"], "MODEL and --data belong together"),
        (["--data", "pictures", "--out", "report"], "MODEL and --data belong together"),
        (["--only", "criteria", "--out", "report"], "criteria cannot be measured without images"),
        (["--only", "criterion", "--out", "report"], "there is no experiment 'criterion'"),
        (["--table", "7", "--out", "report"], "no experiment measures Table 7"),
        (["--table", "1", "--out", "file.txt"], "file.txt is not a folder: name another folder with --out"),
        (["--table", "1"], "Missing option '--out'"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    run, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "file.txt").write_text("")
    assert complaint in run.refusal(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_missing_package_is_reported_before_any_experiment(
    run, basic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    line = run.refusal(*basic, "--table", "1")
    assert "reports need jinja2, which is not installed: pip install 'mctf[report]'" in line
    assert not (tmp_path / "report").exists()


class TestRefusedBeforeAnythingIsMeasured:
    @pytest.fixture(autouse=True)
    def _no_costs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mctf.reproduce.runner.measure", lambda *_, **__: pytest.fail("measured"))

    def test_a_folder_in_use(self, run, basic, tmp_path: Path) -> None:
        with lock_folder(tmp_path / "report", doing="measures in", option="--out"):
            line = run.refusal(*basic, "--table", "1")
        assert f"process {os.getpid()} measures in report already: wait for it, or name another --out" in line
        assert not (tmp_path / "report").exists()

    @pytest.mark.parametrize("name", ["index.html", "report.md", "report.json", "results", "pictures"])
    def test_files_of_another_program(self, run, basic, tmp_path: Path, name: str) -> None:
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / name).write_text("precious")
        assert "name another --out" in run.refusal(*basic, "--table", "1")
        assert [path.read_text() for path in (tmp_path / "report").iterdir()] == ["precious"]

    def test_unreadable_images(self, run, place: Path, basic, tmp_path: Path) -> None:
        pictures = shutil.copytree(place / "pictures", tmp_path / "damaged")
        (pictures / "dog" / "1.png").write_bytes(b"damaged")
        assert "1.png" in run.refusal(*basic, "--data", pictures)
        assert not (tmp_path / "report").exists()

    def test_a_model_that_gives_undefined_numbers(self, run, place: Path, basic, tmp_path: Path) -> None:
        state = load_file(place / "tiny.safetensors")
        state["head.weight"] = state["head.weight"].sign() * 3e38
        save_file(state, tmp_path / "huge.safetensors")
        line = run.refusal(*basic, "--weights", tmp_path / "huge.safetensors")
        assert "test_vit gives infinite or undefined numbers for these images: give other weights" in line
        assert not (tmp_path / "report").exists()


def test_other_images_of_the_same_names_are_refused(run, place: Path, basic, tmp_path: Path) -> None:
    pictures = shutil.copytree(place / "pictures", tmp_path / "pictures")
    options = [*basic, "--data", pictures, "--only", "class_token"]
    assert run(*options).code == 0
    (pictures / "dog" / "1.png").write_bytes((pictures / "dog" / "1.png").read_bytes() + b" ")
    assert "holds results for images_checksum" in run.refusal(*options)


@pytest.mark.parametrize("size", [1_000, 2_000, 5_000])
def test_a_full_disk_is_named_and_leaves_nothing_half_written(run, basic, tmp_path: Path, size: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        outcome = run(*basic, "--only", "class_token")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.code == 2, outcome
    assert "cannot be written (File too large)" in outcome.err.splitlines()[-1]
    for path in (tmp_path / "report").rglob("*"):
        assert path.is_dir() or json.loads(path.read_text()) is not None
        assert path.is_file() or list(path.iterdir())
    assert run(*basic, "--only", "class_token").code == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_all_experiments(run, place: Path, tmp_path: Path) -> None:
    data = ["embedded_small", "--data", place / "pictures", "--out", "report"]
    assert run(*data, "--quick", "--limit", 4).code == 0
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (list(content["experiments"]), content["skipped"]) == ([each.name for each in experiments()], {})


@pytest.mark.parametrize(("model", "complaint"), [("test_vitt", "did you mean"), ("resnet18", "cannot be fused")])
def test_models_that_cannot_be_fused_are_refused(run, place: Path, tmp_path: Path, model: str, complaint: str) -> None:
    save_file(timm.create_model("resnet18", num_classes=3).state_dict(), tmp_path / "resnet.safetensors")
    options = ("--data", place / "pictures", "--weights", tmp_path / "resnet.safetensors", "--out", "report")
    assert complaint in run.refusal(model, *options)
    assert not (tmp_path / "report").exists()
