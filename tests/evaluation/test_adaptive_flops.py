"""Tokens and cost of image-adaptive methods, measured: by function, in an evaluation, on the command line."""

import json
from pathlib import Path
from statistics import mean

import pytest
import timm
import torch
from safetensors.torch import save_file

import mctf
from helpers.command_line import Command
from helpers.images import write_folder
from helpers.models import make, make_images
from helpers.shared_data import SHARED, needs_shared
from mctf import MctfError
from mctf.data import Batch
from mctf.evaluation.adaptive_flops import count_tokens, mean_tokens
from mctf.evaluation.evaluate import Setting, evaluate


def test_counts_are_of_the_images_themselves() -> None:
    model = mctf.fuse(make("plain").double(), "ats")
    images = make_images(model, 4)
    counts = count_tokens(model, images)
    assert counts.shape == (4, 5)
    assert counts[:, 0].tolist() == [65] * 4
    alone = torch.cat([count_tokens(model, images[i : i + 1]) for i in range(4)])
    assert torch.equal(counts, alone)
    assert len(set(counts[:, -1].tolist())) > 1


def test_means_are_over_images_and_so_is_the_cost() -> None:
    model = mctf.fuse(make("plain").double(), "ats")
    images = make_images(model, 5)
    each = [mean_tokens(model, [images[i : i + 1]]) for i in range(5)]
    found = mean_tokens(model, [images[:3], images[3:]])
    by_block = zip(*(one.token_counts for one in each), strict=True)
    assert found.token_counts == pytest.approx([mean(counts) for counts in by_block])
    assert found.gflops == pytest.approx(mean(one.gflops for one in each))
    assert found.gflops_run == pytest.approx(mean(one.gflops_run for one in each))


@pytest.mark.parametrize("method", ["mctf", "tome", "evit"])
def test_a_fixed_number_of_tokens_is_measured_as_planned(method: str) -> None:
    model = make("plain")
    plan = mctf.plan(model, method=method, r=9)
    found = mean_tokens(mctf.fuse(model, method, r=9), [make_images(model, 2)])
    assert list(found.token_counts) == plan.token_counts
    assert found.gflops == pytest.approx(plan.gflops)
    assert found.gflops_run == pytest.approx(plan.gflops_run)


def test_dense_output_is_counted() -> None:
    model = make("plain")
    sparse = mean_tokens(mctf.fuse(model, r=9), [make_images(model, 1)]).gflops
    mctf.unfuse(model)
    dense = mean_tokens(mctf.fuse(model, r=9, dense=True), [make_images(model, 1)]).gflops
    assert dense - sparse == pytest.approx(27 * 5 * 48 / 1e9)  # the final norm of the tokens that are back


def test_no_images_are_refused() -> None:
    with pytest.raises(MctfError, match="give at least one batch"):
        mean_tokens(mctf.fuse(make("plain"), "ats"), [])


def test_an_evaluation_measures_adaptive_methods() -> None:
    model = make("plain")
    batches = [Batch(make_images(model, 3)), Batch(make_images(model, 2, seed=1))]
    found = evaluate(model, batches, [Setting("ats", 1), Setting("mctf", 8), Setting("ats", 0)])
    adaptive, fixed, plain = found.rows
    expected = mean_tokens(mctf.fuse(model, "ats"), [batch.pixels for batch in batches])
    assert adaptive.mean_tokens == expected.token_counts
    assert adaptive.gflops == pytest.approx(expected.gflops)
    assert adaptive.gflops < mctf.plan(model, method="ats").gflops
    assert (fixed.mean_tokens, plain.mean_tokens) == (None, None)
    counts = " ".join(f"{count:.1f}" for count in expected.token_counts)
    assert found.notes == (f"ats r=1 depends on the image (~): tokens after each block {counts}",)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_folder(tmp_path / "pictures", "cat/0.png", "dog/1.png", "dog/2.png")
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "tiny.safetensors")
    return tmp_path


def test_the_command_marks_what_it_measured(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Command(monkeypatch, capfd, "eval", "test_vit", "-r", "1", "-m", "ats,tome")
    answer = run("--data", place / "pictures", "--weights", place / "tiny.safetensors")
    assert answer.code == 0, answer.err
    lines = {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}
    adaptive, fixed = lines["ats"], lines["tome"]
    assert adaptive.split()[-2].startswith("~0.")
    assert "~" not in fixed
    assert "note: ats r=1 depends on the image (~): tokens after each block" in answer.out


SAMPLE = ("data/imagenet-sample-500.zip", "data/deit_tiny_patch16_224.safetensors", "data/imagenet-classes.tsv")


@pytest.mark.nightly
@pytest.mark.slow
@needs_shared(*SAMPLE)
def test_ats_off_the_shelf_on_real_images(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A third of the cost gone at the published setting, and as good as before, without any training."""
    data, weights, classes = (SHARED / name for name in SAMPLE)
    model = ["deit_tiny_patch16_224", "--data", data, "--weights", weights, "--classes", classes]
    run = Command(monkeypatch, capfd, "eval")
    answer = run(*model, "-r", "0,1", "-m", "ats", "--crop-pct", 0.875, "--limit", 100, "--json")
    assert answer.code == 0, answer.err
    plain, sampled = json.loads(answer.out)["rows"]
    assert sampled["gflops"] == pytest.approx(0.84, abs=0.02)
    assert sampled["mean_tokens"][:3] == [197] * 3
    assert sampled["mean_tokens"][-1] == pytest.approx(66, abs=2)
    assert sampled["top1"] >= plain["top1"] - 3
    assert sampled["kl"] == pytest.approx(0.101, abs=0.01)
