"""`mctf finetune`: in one process and in two, interrupted, killed and resumed, refused with one line."""

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

import mctf.cli
from helpers.command_line import Command
from helpers.finetuning import arguments, steps_logged
from helpers.torchrun import Running, run_torchrun, write_stripes
from helpers.train_feeds import read_log
from mctf import MctfError
from mctf._locks import lock_folder
from mctf.schedule_file import Schedule
from mctf.train import finalize
from mctf.train.engine import Trainer
from mctf.train.logging import Logs, Record


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finetune")
    write_stripes(place / "train", images=24, seed=0)
    write_stripes(place / "val", images=5, seed=1)
    return place


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd, "finetune")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_printed_command_works_in_a_shell(place: Path, tmp_path: Path) -> None:
    output = tmp_path / 'it\'s \U0001f98a "$HOME" `x` \\ * ; \x7f\n& '
    running = Running(["finetune", *arguments(place, output)], folder=tmp_path)
    running.wait_until(lambda: steps_logged(output) >= 1)
    running.send(signal.SIGTERM)
    assert running.codes() == [128 + signal.SIGTERM]
    command = running.output().partition("to continue: ")[2].removesuffix("\n")
    assert command.startswith("mctf finetune")
    own = f'mctf() {{ {shlex.quote(sys.executable)} -m mctf "$@"; }}\n'
    done = subprocess.run(["sh", "-c", own + command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert steps_logged(output) == 30


@pytest.mark.slow
def test_two_processes_under_torchrun(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = ["--epochs", 2, "--augmentation", "none", "--validation", place / "val", "--evaluate-r", "0,2"]
    done = run_torchrun(["finetune", *arguments(place, output, *options, batch=8)], world=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("weights: ") == 1  # rank 0 alone prints
    assert "batch 8 x 2, cpu" in done.stdout
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert evaluation["images"] == 20
    assert [row["r"] for row in evaluation["rows"]] == [0, 2]
    assert [row["step"] for row in read_log(output)] == list(range(1, 13))


def test_eval_reads_the_weights_and_a_used_folder_is_refused(
    place: Path, tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    short = arguments(
        place, output, "--epochs", 1, "--validation", place / "val", "--evaluate-r", "0,2", "--smoothing", 0
    )
    outcome = run(*short)
    assert outcome.code == 0, outcome.err
    assert "test_vit (0.3 M parameters), mctf r=2, consistency: 1 epoch of 6 steps, batch 16, cpu" in outcome.out
    assert "step 6 of 6: loss " in outcome.out
    assert "top-1 %" in outcome.out
    names = {path.name for path in output.iterdir()}
    assert names == {
        *("checkpoints", "tensorboard", "log.csv", "recipe.toml"),
        *("model.safetensors", "model-raw.safetensors", "evaluation.json"),
    }
    evaluate = Command(monkeypatch, capfd, "eval", "test_vit", "--image-size", "64", "--json")
    again = evaluate(
        "--data", place / "val", "--weights", output / "model.safetensors", "-r", "0,2", "--batch-size", 16
    )
    assert again.code == 0, again.err
    ours, theirs = json.loads((output / "evaluation.json").read_text())["rows"], json.loads(again.out)["rows"]
    assert [row["top1"] for row in ours] == [row["top1"] for row in theirs]

    assert "holds a run already: add --resume to continue it, or name another --output" in run.refusal(*short)
    assert "epochs = 1 there, 2 here" in run.refusal(*short, "--epochs", 2, "--resume")
    (tmp_path / "other.toml").write_text((output / "recipe.toml").read_text().replace("test_vit", "test_vit2"))
    other = run.refusal("--config", tmp_path / "other.toml", "--resume")
    assert "the checkpoint belongs to another run (model = 'test_vit' there, 'test_vit2' here)" in other


def test_unfused_training_with_a_teacher(place: Path, tmp_path: Path, run: Command) -> None:
    teacher = tmp_path / "teacher.safetensors"
    save_file(timm.create_model("test_vit2", num_classes=4).state_dict(), teacher)
    options = ["--method", "none", "--objective", "cross-entropy", "--epochs", 1, "--no-progress"]
    options += ["--teacher", "test_vit2", "--teacher-weights", teacher, "--json"]
    outcome = run(*arguments(place, tmp_path / "run", *options))
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert (facts["model"], facts["steps"], facts["rows"]) == ("test_vit", 6, [])
    assert facts["recipe"]["objective"] == "cross-entropy"
    row = read_log(tmp_path / "run")[0]
    assert row["distillation"] > 0
    assert (row["lighter_cross_entropy"], row["distance"]) == (None, None)


def test_options_of_the_method_and_progress_bars(place: Path, tmp_path: Path, run: Command) -> None:
    more = ["--epochs", 1, "--option", "pooling=size", "--option", "tau_sim=0.5", "--option", "bidirectional=false"]
    outcome = run(*arguments(place, tmp_path / "run", *more, "--progress"))
    assert outcome.code == 0, outcome.err
    assert "images/s" in outcome.err
    assert "decoding images" in outcome.err
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert text.endswith('[method_options]\npooling = "size"\ntau_sim = 0.5\nbidirectional = false\n')


def short(place: Path, output: Path, *more: object) -> list[object]:
    return arguments(place, output, "--epochs", 1, "--no-progress", *more)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestUsedFolders:
    """A run never overwrites another one, nor files of another program."""

    @pytest.fixture(scope="class")
    def finished(self, place: Path) -> Path:
        output = place / "finished"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["mctf", "finetune", *map(str, short(place, output))])
            with suppress(SystemExit):
                mctf.cli.main()
        assert (output / "model.safetensors").exists()
        return output

    @pytest.mark.parametrize("resume", [(), ("--resume",)])
    def test_a_finished_run_without_checkpoints(
        self, place: Path, finished: Path, tmp_path: Path, run: Command, resume: tuple[str, ...]
    ) -> None:
        output = shutil.copytree(finished, tmp_path / "run")
        shutil.rmtree(output / "checkpoints")
        before = listing(output)
        line = run.refusal(*short(place, output, *resume))
        assert "holds a finished run" in line
        assert "(model.safetensors)" in line
        assert "name another --output" in line
        assert listing(output) == before

    @pytest.mark.parametrize("name", ["model.safetensors", "model-raw.safetensors", "evaluation.json"])
    def test_a_single_result(self, place: Path, tmp_path: Path, run: Command, name: str) -> None:
        (tmp_path / name).write_text("precious")
        for resume in ((), ("--resume",)):
            assert f"holds a finished run{'' if resume else ' already'} ({name})" in run.refusal(
                *short(place, tmp_path, *resume)
            )
        assert listing(tmp_path) == {name: b"precious"}

    def test_a_log_with_lines(self, place: Path, finished: Path, tmp_path: Path, run: Command) -> None:
        shutil.copy(finished / "log.csv", tmp_path)
        before = listing(tmp_path)
        assert "holds a run already: add --resume" in run.refusal(*short(place, tmp_path))
        line = run.refusal(*short(place, tmp_path, "--resume"))
        assert "ends at step 6, but there are no checkpoints to resume from: put them back, or name another" in line
        assert listing(tmp_path) == before

    @pytest.mark.parametrize("content", ["a,b\n1,2\n", "step\n", "\0\n", "any\n\udcff"])
    def test_a_log_of_another_program(self, place: Path, tmp_path: Path, run: Command, content: str) -> None:
        (tmp_path / "log.csv").write_bytes(content.encode(errors="surrogateescape"))
        for resume in ((), ("--resume",)):
            line = run.refusal(*short(place, tmp_path, *resume))
            assert "log.csv is not a log of this version of mctf finetune: move it, or name another --output" in line
        assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]

    def test_a_recipe_of_the_user(self, place: Path, tmp_path: Path, run: Command) -> None:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text("# of mine\nlr = 1e-4\n")
        line = run.refusal(*short(place, tmp_path, "--config", recipe, "--resume"))
        assert "recipe.toml holds another recipe and would be overwritten: name another --output" in line
        assert recipe.read_text() == "# of mine\nlr = 1e-4\n"

    def test_foreign_files_and_a_complete_recipe_stay(
        self, place: Path, finished: Path, tmp_path: Path, run: Command
    ) -> None:
        text = "# of mine\n" + (finished / "recipe.toml").read_text().replace(str(finished), str(tmp_path))
        (tmp_path / "checkpoints").mkdir()
        foreign = {"recipe.toml": text, "notes.txt": "a", "checkpoints/x.partial": "b", "checkpoints/step-1.pt": "c"}
        for name, content in foreign.items():
            (tmp_path / name).write_text(content)
        outcome = run("--config", tmp_path / "recipe.toml", "--resume")
        assert outcome.code == 0, outcome.err
        after = listing(tmp_path)
        assert {name: after[name].decode() for name in foreign} == foreign

    def test_a_file_in_place_of_the_checkpoints(self, place: Path, tmp_path: Path, run: Command) -> None:
        (tmp_path / "checkpoints").write_text("in the way")
        assert "checkpoints is not a folder: name another --output" in run.refusal(*short(place, tmp_path))
        assert listing(tmp_path) == {"checkpoints": b"in the way"}

    @pytest.mark.parametrize("name", ["train", "train/run", "val/direction0"])
    def test_a_folder_of_images(self, place: Path, run: Command, name: str) -> None:
        before = listing(place)
        line = run.refusal(*short(place, place / name, "--validation", place / "val"))
        assert "lies among the images of" in line
        assert listing(place) == before

    def test_a_folder_in_use(self, place: Path, finished: Path, run: Command) -> None:
        before = listing(finished)
        with lock_folder(finished, doing="trains in", option="--output"):
            line = run.refusal(*short(place, finished, "--resume"))
        expected = f"process {os.getpid()} trains in {finished} already: wait for it, or name another --output"
        assert expected in line
        assert listing(finished) == before


def write_until_refused(logs: Logs, record: Record, log: Path) -> None:
    for _ in range(50):
        log.write_bytes(b"")  # only the events grow
        logs.write(record)


class TestFullDisk:
    """A write that fails is named in one line; nothing half-written stays, and the run can be resumed."""

    @pytest.fixture
    def limit(self) -> Iterator[Callable[[int], None]]:
        """Files beyond a size are refused by the system, as on a full disk."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (700, "recipe.toml cannot be written (File too large)"),
            (1_500, "cannot be written (File too large): make room, then --resume"),
            (20_000, "the checkpoint of step 5 cannot be written (File too large), there is no earlier one"),
        ],
    )
    def test_a_file_that_cannot_be_written(
        self, place: Path, tmp_path: Path, run: Command, limit: Callable[[int], None], size: int, words: str
    ) -> None:
        output = tmp_path / "new" / "run"
        limit(size)
        often = [] if size == 20_000 else ["--save-steps", 99, "--save-epochs", 99]
        outcome = run(*arguments(place, output, "--epochs", 2, *often))
        limit(resource.RLIM_INFINITY)
        assert outcome.code == 2
        (line,) = outcome.err.splitlines()
        assert words in line
        if size == 700:
            assert list(tmp_path.iterdir()) == []
            return
        assert {path.name for path in output.rglob("*")} >= {"recipe.toml", "log.csv"}
        assert not [path for path in output.rglob("*") if path.name.startswith(".") or path.suffix == ".partial"]
        outcome = run("--config", output / "recipe.toml", "--resume")
        assert outcome.code == 0, outcome.err
        assert steps_logged(output) == 12

    def test_weights_and_evaluation(
        self, place: Path, tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch, limit: Callable[[int], None]
    ) -> None:
        options = short(place, tmp_path, "--validation", place / "val", "--evaluate-r", "0")
        with monkeypatch.context() as patch:
            write = finalize.write_weights

            def full(trainer: Trainer) -> Path:
                limit(1000)
                return write(trainer)

            patch.setattr(finalize, "write_weights", full)
            outcome = run(*options)
            limit(resource.RLIM_INFINITY)
        assert outcome.code == 2
        assert outcome.err.endswith("model.safetensors cannot be written (File too large): make room, then --resume\n")
        assert not [path for path in tmp_path.iterdir() if "safetensors" in path.name]
        assert run(*options, "--resume").code == 0
        assert (tmp_path / "evaluation.json").exists()

    def test_lines_and_events(self, tmp_path: Path, limit: Callable[[int], None]) -> None:
        logs = Logs(tmp_path)
        values = dict.fromkeys([each.name for each in fields(Record)], 1.0) | {"step": 1}
        limit(100)
        with pytest.raises(MctfError, match=r"log.csv cannot be written \(File too large\): make room"):
            logs.write(Record(**values))
        limit(1500)
        with pytest.raises(MctfError, match=r"tensorboard/events.* cannot be written \(File too large\): make room"):
            write_until_refused(logs, Record(**values), tmp_path / "log.csv")
        logs.close()


class TestValidation:
    def test_unreadable_images_are_counted_after_training(self, place: Path, tmp_path: Path, run: Command) -> None:
        validation = shutil.copytree(place / "val", tmp_path / "val")
        bad = sorted(validation.rglob("*.png"))[4]  # not among those that are read before training
        bad.write_bytes(b"damaged")
        options = ["--validation", validation, "--evaluate-r", "0", "--on-corrupt", "stop"]
        outcome = run(*short(place, tmp_path / "run", *options))
        assert outcome.code == 0, outcome.err
        facts = json.loads((tmp_path / "run" / "evaluation.json").read_text())
        assert facts["images"] == 19
        assert "1 unreadable validation image left out" in facts["notes"]
        assert "1 unreadable validation image left out" in outcome.out

    @pytest.mark.parametrize("policy", ["stop", "skip"])
    def test_unreadable_images_are_refused_before_training(
        self, place: Path, tmp_path: Path, run: Command, policy: str
    ) -> None:
        validation = shutil.copytree(place / "val", tmp_path / "val")
        for path in validation.rglob("*.png"):
            path.write_bytes(b"damaged")
        line = run.refusal(*short(place, tmp_path / "run", "--validation", validation, "--on-corrupt", policy))
        assert ".png" in line
        assert not (tmp_path / "run").exists()


def test_one_step_prints_nothing_but_its_lines(place: Path, tmp_path: Path, run: Command) -> None:
    outcome = run(*short(place, tmp_path / "run", "--batch", 96))
    assert (outcome.code, outcome.err) == (0, "")


class TestRefuses:
    def test_all_errors_at_once(self, place: Path, tmp_path: Path, run: Command) -> None:
        (tmp_path / "recipe.toml").write_text('model = "test_vit"\nbatch = 0\nepochz = 3\n')
        line = run.refusal("--config", tmp_path / "recipe.toml", "--lr", "high", "--weights", "nowhere.pt")
        for part in ("batch = 0", "no option epochz: did you mean 'epochs'", "lr = 'high'", "weights = 'nowhere.pt'"):
            assert part in line
        assert "data is missing" in line

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--option", "pooling"], "'pooling' is no NAME=VALUE"),
            (["--option", "pool=size"], "has no option 'pool'"),
            (["--method", "none"], "give r above 0, or objective = cross-entropy"),
            (["--config", "nowhere.toml"], "nowhere.toml cannot be read"),
            (["--device", "abacus"], "device 'abacus' cannot be used"),
            (["--batch", "1000"], "1000"),
            (["-r", "1e5x"], "1e5x"),
            (["--color-jitter", "1"], "color_jitter = '1': expected a number 0 or more, below 1"),
            (["--colour-jitter", "2"], "color_jitter = '2': expected"),
            (["--image-size", ""], "image size '' is not a size"),
            (["--frobnicate"], "--frobnicate"),
        ],
    )
    def test_bad_options(self, place: Path, tmp_path: Path, run: Command, options: list[str], words: str) -> None:
        assert words in run.refusal(*arguments(place, tmp_path / "run", *options))

    def test_a_model_of_transformers_is_refused_before_it_is_loaded(
        self, place: Path, tmp_path: Path, run: Command
    ) -> None:
        line = run.refusal("hf:nowhere", "--data", place / "train", "--output", tmp_path / "run")
        assert "model = 'hf:nowhere': only timm models can be fine-tuned" in line

    def test_a_missing_data_folder_and_weights_of_another_model(
        self, place: Path, tmp_path: Path, run: Command
    ) -> None:
        assert "nowhere" in run.refusal(*arguments(place, tmp_path / "run", "--data", tmp_path / "nowhere"))
        other = tmp_path / "other.safetensors"
        save_file(timm.create_model("test_vit2", num_classes=4).state_dict(), other)
        line = run.refusal(*arguments(place, tmp_path / "run", "--no-random-weights", "--weights", other))
        assert "other.safetensors holds weights of another model" in line
        assert not (tmp_path / "run").exists()

    def test_validation_images_of_other_classes(self, place: Path, tmp_path: Path, run: Command) -> None:
        other = shutil.copytree(place / "val", tmp_path / "other")
        first = sorted(other.iterdir())[0]
        first.rename(other / "walrus")  # as many classes, and not the same
        line = run.refusal(*arguments(place, tmp_path / "run", "--validation", other))
        assert f"class 'walrus' of {other} is not among the classes of training: remove it" in line
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("by", ["flops", "schedule"])
def test_a_budget_or_a_schedule_in_place_of_r(place: Path, tmp_path: Path, run: Command, by: str) -> None:
    path = tmp_path / "schedule.json"
    Schedule(method="ward", depth=6, tokens=17, protected=1, r=(0, 2, 0, 1, 0, 0)).write(path)
    amount = ("--flops", 0.8, "-m", "tome") if by == "flops" else ("--schedule", path)
    tiny = ("test_vit", "--random-weights", "--image-size", 64, "--batch", 8, "--device", "cpu", "--epochs", 1)
    images = ("--data", place / "train", "--validation", place / "val", "--output", tmp_path / "out")
    answer = run(*tiny, *images, *amount, "--json")
    assert answer.code == 0, answer.err
    rows = json.loads(answer.out)["rows"]
    assert rows[0]["r"] == 0
    if by == "flops":
        assert rows[1]["gflops"] == pytest.approx(0.8 * rows[0]["gflops"], rel=0.03)
    else:
        assert (rows[1]["method"], rows[1]["r"]) == ("ward", [0, 2, 0, 1, 0, 0])
    assert run(*tiny, *images, *amount, "--resume").code == 0
