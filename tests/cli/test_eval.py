"""`mctf eval`: its JSON object, table and file, and one line for every kind of wrong input."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import save_file

import mctf.evaluation.evaluate
from helpers.command_line import Command, Outcome
from helpers.images import write_folder, zip_folder
from helpers.shared_data import SHARED, needs_shared
from mctf.cli.output import write_text

KEYS = ["r", "method", "top1", "top5", "agreement", "kl", "kl_error", "class_cosine"]
KEYS += ["gflops", "images_per_second", "mean_tokens", "patch_cosine"]
KEYS += ["precision", "kl_added", "kl_unquantized", "quantized_share"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd, "eval")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of three classes, the same in a zip file, a class table and weights of a tiny model."""
    place = tmp_path_factory.mktemp("eval")
    write_folder(place / "pictures", *(f"{name}/{index}.jpg" for name in ("cat", "dog", "emu") for index in range(2)))
    zip_folder(place / "pictures", place / "pictures.zip")
    write_folder(place / "flat", "a.png", "b.png", "c.png")
    (place / "classes.tsv").write_text("1\tcat\tTabby\n0\tdog\tPug\n2\temu\tEmu\n")
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), place / "tiny.safetensors")
    return place


@pytest.fixture
def basic(place: Path) -> list[object]:
    """Arguments of a call that works."""
    return ["test_vit", "--data", place / "pictures", "--weights", place / "tiny.safetensors", "--batch-size", 4]


def rows_of(answer: Outcome) -> list[dict[str, Any]]:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)["rows"]


def fidelity_of(answer: Outcome) -> list[list[Any]]:
    return [[row[key] for key in KEYS if key != "images_per_second"] for row in rows_of(answer)]


class TestJson:
    def test_has_a_row_for_every_method_and_r(self, run: Command, basic: list[object]) -> None:
        answer = run(*basic, "-r", "0,4,fast", "--method", "mctf,tome", "--json")
        rows = rows_of(answer)
        assert answer.err == ""
        assert [(row["method"], row["r"]) for row in rows] == [
            (method, r) for method in ("mctf", "tome") for r in (0, 4, "fast")
        ]
        for row in rows:
            assert list(row) == KEYS
            assert all(0 <= row[key] <= 100 for key in ("top1", "top5", "agreement"))
            assert row["images_per_second"] > 0
        assert rows[0]["agreement"] == 100
        assert rows[0]["kl"] == 0
        assert rows[0]["kl_error"] == 0
        assert rows[1]["kl"] > 0
        assert rows[1]["kl_error"] > 0
        assert rows[1]["gflops"] < rows[0]["gflops"]

    def test_dense_adds_the_cosine_of_the_patches(self, run: Command, basic: list[object]) -> None:
        (_, plain), (baseline, dense), (_, copied) = (
            rows_of(run(*basic, "-r", "8", "--json", *words))
            for words in ([], ["--dense"], ["--dense", "--restore=copy"])
        )
        assert plain["patch_cosine"] is None
        assert baseline["patch_cosine"] == pytest.approx(1)
        assert dense["patch_cosine"] != copied["patch_cosine"]
        assert plain["gflops"] < dense["gflops"] == copied["gflops"]
        assert plain["kl"] == pytest.approx(dense["kl"], rel=1e-4) == copied["kl"]
        assert "patches" in run(*basic, "-r", "8", "--dense").out
        assert "patches" not in run(*basic, "-r", "8").out

    def test_the_last_block_is_trimmed_on_request(self, run: Command, basic: list[object]) -> None:
        trimmed, whole = (
            rows_of(run(*basic, "-r", "0,8", "-m", "tome", "--json", *words)) for words in (["--trim-last"], [])
        )
        assert [row["r"] for row in trimmed] == [0, 0, 8]  # trimmed, r = 0 is not the baseline
        assert trimmed[0]["gflops"] == whole[0]["gflops"] > trimmed[1]["gflops"]
        assert trimmed[2]["gflops"] < whole[1]["gflops"]
        assert trimmed[2]["kl"] == pytest.approx(whole[1]["kl"], rel=1e-3)
        chosen, off = (
            rows_of(run(*basic, "--flops", "0.7", "-m", "ward", "--json", *words)) for words in ([], ["--no-trim-last"])
        )
        assert chosen[1]["r"] != off[1]["r"]  # at equal cost, more is fused where nothing is trimmed

    def test_says_what_was_measured(self, run: Command, basic: list[object], place: Path) -> None:
        found = json.loads(run(*basic, "-r", "4", "--json", "--device", "cpu", "--limit", "5").out)
        assert found["model"] == "test_vit"
        assert found["data"] == str(place / "pictures")
        assert found["images"] == 5
        assert found["device"].startswith("cpu")
        assert found["dtype"] == "float32"
        assert found["versions"]["mctf"] == mctf.__version__
        assert found["command"].startswith("mctf eval test_vit --data ")
        assert found["preprocessing"]["crop_pct"] == 0.95
        assert [(row["method"], row["r"]) for row in found["rows"]] == [("baseline", 0), ("mctf", 4)]

    def test_each_pair_is_measured_once(self, run: Command, basic: list[object]) -> None:
        rows = rows_of(run(*basic, "-r", "4,4", "--method", "tome,tome", "--json"))
        assert [(row["method"], row["r"]) for row in rows] == [("baseline", 0), ("tome", 4)]

    def test_folder_zip_and_workers_give_the_same(self, run: Command, basic: list[object], place: Path) -> None:
        expected = fidelity_of(run(*basic, "-r", "0,4", "--json"))
        basic[2] = place / "pictures.zip"
        assert fidelity_of(run(*basic, "-r", "0,4", "--json")) == expected
        assert fidelity_of(run(*basic, "-r", "0,4", "--json", "--workers", 2)) == expected

    def test_the_table_of_classes_decides_the_accuracy(self, run: Command, basic: list[object], place: Path) -> None:
        def top1(*options: object) -> float:
            return rows_of(run(*basic, "-r", "0", "--json", *options))[0]["top1"]

        (place / "shifted.tsv").write_text("1\tcat\n2\tdog\n0\temu\n")
        (place / "turned.tsv").write_text("2\tcat\n0\tdog\n1\temu\n")
        shares = [top1(), top1("--classes", place / "shifted.tsv"), top1("--classes", place / "turned.tsv")]
        assert sum(shares) == pytest.approx(100)  # each image is right under exactly one of the three rotations

    def test_unlabelled_images_have_null_accuracy(self, run: Command, basic: list[object], place: Path) -> None:
        basic[2] = place / "flat"
        answer = run(*basic, "-r", "4", "--json")
        for row in rows_of(answer):
            assert row["top1"] is None
            assert row["top5"] is None
            assert row["agreement"] is not None
        (note,) = json.loads(answer.out)["notes"]
        assert note == f"accuracy is unknown: the images of {place / 'flat'} are in no class folders (class/name.jpg)"

    def test_image_size_and_crop_reach_the_model(self, run: Command, basic: list[object]) -> None:
        found = json.loads(run(*basic, "-r", "0", "--json", "--image-size", "96x128", "--crop-pct", "0.5").out)
        assert found["preprocessing"]["image_size"] == [96, 128]
        assert found["preprocessing"]["crop_pct"] == 0.5
        tiny = timm.create_model("test_vit", num_classes=3, img_size=(96, 128))
        assert found["rows"][0]["gflops"] == mctf.plan(tiny, r=0, image_size=(96, 128)).gflops_base

    def test_r_may_be_in_scientific_notation(self, run: Command, basic: list[object]) -> None:
        rows = rows_of(run(*basic, "-r", "1e-1", "--json"))
        assert [(row["method"], row["r"]) for row in rows] == [("baseline", 0), ("mctf", 0.1)]

    def test_other_dtypes_and_blocks(self, run: Command, basic: list[object]) -> None:
        rows = rows_of(run(*basic, "-r", "4", "--json", "--dtype", "bfloat16", "--blocks", "2"))
        assert rows[1]["gflops"] == mctf.plan(timm.create_model("test_vit", num_classes=3), r=4, blocks=[2]).gflops

    def test_options_reach_the_method(self, run: Command, basic: list[object]) -> None:
        asked = ["--option", "attention=exact", "--option", "bidirectional=false"]
        rows = rows_of(run(*basic, "-r", "4", "--json", *asked))
        tiny = timm.create_model("test_vit", num_classes=3)
        assert rows[1]["gflops"] == mctf.plan(tiny, r=4, attention="exact", bidirectional=False).gflops
        assert rows[1]["gflops"] != mctf.plan(tiny, r=4).gflops


class TestText:
    def test_is_a_table_with_notes(self, run: Command, basic: list[object], place: Path) -> None:
        basic[2] = place / "flat"
        answer = run(*basic, "-r", "0,60")
        assert answer.code == 0
        assert answer.err == ""
        assert "test_vit on 3 images of " in answer.out
        heading = next(line for line in answer.out.splitlines() if "agree" in line)
        assert all(word in heading for word in ("method", "top-1", "top-5", "KL", "cosine", "GFLOPs", "images/s"))
        plain = next(line for line in answer.out.splitlines() if line.split()[:2] == ["mctf", "0"])
        assert plain.split()[2:7] == ["-", "-", "100.0", "0.0000", "1.0000"]
        assert "are in no class folders" in " ".join(answer.out.split())
        assert "note: mctf r=60 is capped (too few tokens) in blocks 1 to " in answer.out

    def test_progress_goes_to_stderr_when_asked_for(self, run: Command, basic: list[object]) -> None:
        answer = run(*basic, "-r", "0", "--json", "--progress")
        assert "evaluating" in answer.err
        json.loads(answer.out)


class TestOutput:
    def test_is_the_json_object(self, run: Command, basic: list[object], tmp_path: Path) -> None:
        answer = run(*basic, "-r", "0,4", "--output", tmp_path / "rows.json", "--json")
        assert json.loads((tmp_path / "rows.json").read_text()) == json.loads(answer.out)
        assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]

    def test_is_whole_or_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "rows.json"
        path.write_text("before")

        def full_disk(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full_disk)
        with pytest.raises(mctf.MctfError, match=r"rows\.json cannot be written \(No space left on device\)"):
            write_text(path, "after")
        assert path.read_text() == "before"
        assert list(tmp_path.iterdir()) == [path]

    def test_an_interrupt_leaves_nothing(
        self, run: Command, basic: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*arguments: object, **options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(mctf.evaluation.evaluate, "run_model", interrupted)
        answer = run(*basic, "-r", "4", "--output", tmp_path / "rows.json", "--json")
        assert (answer.code, answer.out, answer.err.strip()) == (130, "", "mctf: interrupted")
        assert list(tmp_path.iterdir()) == []


class TestRefuses:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["-r", "-4"], "r=-4 is negative"),
            (["-r", "nan"], "r=nan is neither"),
            (["-r", "1.5"], "r=1.5 is neither"),
            (["-r", ","], "name at least one r"),
            (["--method", "mctv"], "unknown method 'mctv': did you mean 'mctf'"),
            (["--method", ","], "one method"),
            (["--option", "pooling=[1]"], "pooling=[1] is unknown: "),
            (["--option", "pooling"], "--option 'pooling' is no NAME=VALUE"),
            (["--option", "poling=size"], "method 'mctf' has no option 'poling': did you mean 'pooling'"),
            (["--method", "mctf,tome", "--option", "pooling=size"], "--option belongs to one method"),
            (["--blocks", "2,x"], "blocks '2,x' is not a list of block numbers"),
            (["--blocks", "77"], "blocks names 77, but the model has blocks 0 to"),
            (["--image-size", "big"], "image size 'big' is not a size"),
            (["--crop-pct", "0"], "--crop-pct"),
            (["--batch-size", "0"], "--batch-size"),
            (["--limit", "0"], "--limit"),
            (["--device", "abacus"], "device 'abacus' cannot be used"),
            (["--dtype", "int8"], "--dtype"),
            (["--weights", "nowhere.pt"], "there is no weights file nowhere.pt"),
            (["--classes", "nowhere.tsv"], "there is no class table nowhere.tsv"),
            (["--data", "nowhere"], "there is no nowhere: give a folder or a zip file"),
            (["--output", "nowhere/rows.json"], "there is no folder nowhere"),
            (["--output", "/"], "/ is a folder"),
            (["--frobnicate"], "--frobnicate"),
        ],
    )
    def test_bad_options(self, run: Command, basic: list[object], options: list[str], words: str) -> None:
        assert words in run.refusal(*basic, *options)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--method", "tpme"], "unknown method 'tpme': did you mean 'tome'?"),
            (["--method", "mctf,tpme"], "unknown method 'tpme'"),
            (["--option", "tau_sim=-1"], "tau_sim=-1 must be"),
            (["--option", "pooling=[1]"], "pooling=[1] is unknown"),
            (["-r", "-1"], "r=-1 is negative"),
        ],
    )
    def test_methods_options_and_r_before_anything_is_opened(
        self, run: Command, basic: list[object], monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
    ) -> None:
        monkeypatch.setattr("mctf.evaluation.setup.open_run", lambda *_: pytest.fail("the run was opened"))
        assert words in run.refusal(*basic, *options)

    def test_no_data(self, run: Command) -> None:
        assert "--data" in run.refusal("test_vit")

    def test_an_unknown_model(self, run: Command, basic: list[object]) -> None:
        assert "timm has no model 'test_vitt': did you mean 'test_vit'" in run.refusal("test_vitt", *basic[1:])

    def test_a_model_that_is_no_vision_transformer(self, run: Command, basic: list[object], tmp_path: Path) -> None:
        save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.safetensors")
        line = run.refusal("test_resnet", *basic[1:], "--weights", tmp_path / "resnet.safetensors")
        assert "ResNet cannot be fused, it has no global attention" in line

    def test_weights_of_another_model(self, run: Command, basic: list[object]) -> None:
        assert "tiny.safetensors holds weights of another model" in run.refusal("test_vit2", *basic[1:])

    def test_places_without_images(self, run: Command, basic: list[object], tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert "is empty: expected images" in run.refusal(*basic, "--data", tmp_path / "empty")
        zipfile.ZipFile(tmp_path / "empty.zip", "w").close()
        assert "is empty: expected images" in run.refusal(*basic, "--data", tmp_path / "empty.zip")
        (tmp_path / "empty" / "notes.txt").write_text("nothing")
        assert "holds no images: expected files ending in" in run.refusal(*basic, "--data", tmp_path / "empty")
        assert "neither a folder nor a readable zip" in run.refusal(*basic, "--data", tmp_path / "empty" / "notes.txt")

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("zipped", [False, True])
    def test_a_damaged_image(
        self, run: Command, basic: list[object], tmp_path: Path, workers: int, zipped: bool
    ) -> None:
        data = write_folder(tmp_path / "data", *(f"cat/{index}.png" for index in range(6)))
        (data / "cat" / "5.png").write_bytes((data / "cat" / "5.png").read_bytes()[:200])
        data = zip_folder(data, tmp_path / "data.zip") if zipped else data
        words = ("--data", data, "--workers", workers, "--json", "--output", tmp_path / "rows.json")
        line = run.refusal(*basic, *words)
        assert f"{data}/cat/5.png is not a readable image" in line
        assert "repair or remove it" in line
        assert not (tmp_path / "rows.json").exists()

    @pytest.mark.parametrize(
        ("table", "words"),
        [
            ("0\tcat\tTabby\n1\tdog\tPug\n", "class 'emu'"),
            ("0\tcat\tTabby\n1 dog Pug\n", "expected index, folder and name between tabs"),
            ("0\tcat\n1\tdog\n3\temu\n", "has class 3, but the model has 3 classes"),
        ],
    )
    def test_class_tables_that_do_not_fit(
        self, run: Command, basic: list[object], tmp_path: Path, table: str, words: str
    ) -> None:
        (tmp_path / "classes.tsv").write_text(table)
        assert words in run.refusal(*basic, "--classes", tmp_path / "classes.tsv")


SAMPLE = ("data/imagenet-sample-500.zip", "data/deit_tiny_patch16_224.safetensors", "data/imagenet-classes.tsv")


@pytest.mark.slow
@needs_shared(*SAMPLE)
def test_the_published_fidelity_on_real_images(run: Command) -> None:
    """On 100 of the 500 images whose figures the published implementations gave, at the same crop."""
    data, weights, classes = (SHARED / name for name in SAMPLE)
    model = ["deit_tiny_patch16_224", "--data", data, "--weights", weights, "--classes", classes]
    rows = rows_of(run(*model, "-r", "0,16", "--method", "mctf,tome", "--crop-pct", 0.875, "--limit", 100, "--json"))
    plain, fused, _, merged = rows
    # Near-ties between pairs of tokens may fall otherwise on another processor: one image in a hundred may then be
    # answered otherwise, and KL moves by less than the 4 % by which it is to be reproduced.
    assert plain["top1"] == pytest.approx(78, abs=1)
    assert plain["top5"] == pytest.approx(95, abs=1)
    assert fused["agreement"] == pytest.approx(93, abs=1)
    assert fused["kl"] == pytest.approx(0.0499, abs=0.002)
    assert fused["class_cosine"] == pytest.approx(0.9676, abs=0.002)
    assert merged["agreement"] == pytest.approx(82, abs=1)
    assert merged["kl"] == pytest.approx(0.1750, abs=0.006)
    assert merged["class_cosine"] == pytest.approx(0.9207, abs=0.002)


@pytest.mark.nightly
@pytest.mark.slow
@needs_shared(*SAMPLE)
def test_residuals_bring_real_patches_closer_to_the_baselines(run: Command) -> None:
    data, weights, _ = (SHARED / name for name in SAMPLE)
    model = ["deit_tiny_patch16_224", "--data", data, "--weights", weights, "--limit", 24, "--crop-pct", 0.875]
    found = {}
    for restore in ("copy", "residual"):
        words = ("--flops", 0.58, "-m", "ward,mctf", "--dense", "--restore", restore, "--json")
        found[restore] = [row["patch_cosine"] for row in rows_of(run(*model, *words))[1:]]
    for copied, restored, gain in zip(found["copy"], found["residual"], (0.03, 0.06), strict=True):
        assert restored > copied + gain
