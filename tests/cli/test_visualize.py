"""`mctf visualize`: the sheet it writes, its JSON object, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mctf
from helpers.command_line import Command
from mctf.models.loading import create
from mctf.viz.fused_patches import open_image


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


@pytest.fixture
def images(tmp_path) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = [tmp_path / "one.png", tmp_path / "two.jpg"]
    for path in paths:
        Image.fromarray(generator.integers(0, 256, (180, 240, 3), dtype=np.uint8)).save(path)
    return paths


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_picture_has_a_row_per_image_and_a_column_per_block(command, images, tmp_path) -> None:
    output = tmp_path / "sheet.png"
    shared = ("--model", "test_vit", "--random-weights", "-r", 8, "--scale", 1, "--show-blocks", "1,5", "-o", output)
    outcome = command("visualize", images[0], *shared)
    assert (outcome.code, outcome.out) == (0, f"{output}\n"), outcome.err
    one = Image.open(output)
    assert command("visualize", *images, *shared).code == 0
    two = Image.open(output)
    assert 3 * 160 < one.width == two.width < 4 * 160
    assert 160 < one.height < 2 * 160 < two.height


def test_json_names_the_picture_and_the_tokens_of_the_blocks(command, images, tmp_path) -> None:
    outcome = command("visualize", images[0], "--model", "test_vit", "--random-weights", "-r", 8, "--json")
    facts = json.loads(outcome.out)
    assert Path(facts["output"]).resolve() == tmp_path / "fused.png"
    assert (tmp_path / facts["output"]).is_file()
    assert facts["weights"] == "random"
    expected = mctf.plan("test_vit", r=8).token_counts
    assert facts["blocks"] == [{"block": block, "tokens": expected[block]} for block in (2, 3, 4, 5)]


def test_options_reach_the_method(command, images, tmp_path) -> None:
    option = ("--method", "evit", "--option", "fuse_inattentive=false", "--json")
    outcome = command("visualize", images[0], "--model", "test_vit", "--random-weights", "-r", 0.3, *option)
    expected = mctf.plan("test_vit", method="evit", r=0.3, fuse_inattentive=False).token_counts
    assert [each["tokens"] for each in json.loads(outcome.out)["blocks"]] == [expected[block] for block in (2, 3, 4, 5)]
    assert expected != mctf.plan("test_vit", method="evit", r=0.3).token_counts


def test_untrained_layers_are_reported_in_one_line(command, images) -> None:
    outcome = command("visualize", images[0], "--model", "test_vit", "--random-weights", "-m", "dynamic_vit", "-r", 0.3)
    assert outcome.code == 0
    (line,) = outcome.err.splitlines()
    assert line.startswith("mctf: warning: the layers of dynamic_vit are untrained: load ")


def test_equal_patches_end_in_one_color(command, tmp_path) -> None:
    """Two flat halves far apart in color: whatever is fused in the first block stays within its half."""
    pixels = np.zeros((160, 160, 3), dtype=np.uint8)
    pixels[:, 80:] = (250, 240, 20)
    Image.fromarray(pixels).save(tmp_path / "halves.png")
    weights = tmp_path / "no_positions.pt"
    model = create("test_vit")
    torch.nn.init.zeros_(model.pos_embed)
    torch.save(model.state_dict(), weights)
    arguments = ("--weights", weights, "-r", 40, "--show-blocks", "1", "--scale", 1)
    outcome = command("visualize", "halves.png", "--model", "test_vit", *arguments)
    assert outcome.code == 0, outcome.err
    sheet = np.asarray(Image.open("fused.png").convert("RGB")).astype(int)
    left = (sheet.shape[1] - 2 * 160) // 3  # the margin, as wide as the gap between the panels
    panel = sheet[left : left + 160, 2 * left + 160 : 2 * left + 320]
    middles = panel[8::16, 8::16]  # 10 x 10 patches
    assert np.abs(middles[:, :5] - (0, 0, 0)).max() <= 3
    assert np.abs(middles[:, 5:] - (250, 240, 20)).max() <= 3


def test_dropped_patches_are_gray_and_not_fused(command, tmp_path) -> None:
    """The last row of 10 x 10 red patches is dropped in block 1."""
    Image.new("RGB", (160, 160), "red").save(tmp_path / "red.png")
    arguments = ("--random-weights", "-m", "free_drop", "-r", 10, "--show-blocks", "1", "--scale", 1)
    outcome = command("visualize", "red.png", "--model", "test_vit", *arguments)
    assert outcome.code == 0, outcome.err
    sheet = np.asarray(Image.open("fused.png").convert("RGB")).astype(int)
    left = (sheet.shape[1] - 2 * 160) // 3  # the margin, as wide as the gap between the panels
    panel = sheet[left : left + 160, 2 * left + 160 : 2 * left + 320]
    kept, dropped = panel[:144], panel[145:159, 1:159]
    assert (kept[..., 1:] == 0).all()
    assert np.ptp(dropped, axis=2).max() == 0
    assert len(np.unique(dropped)) == 2, "stripes"


def test_oblong_images_and_other_methods(command, images, tmp_path) -> None:
    size = ("--image-size", "96x160", "--scale", 1, "--show-blocks", "5")
    outcome = command("visualize", images[0], "--model", "test_vit", "--random-weights", "-m", "tome", *size)
    assert outcome.code == 0, outcome.err
    sheet = Image.open("fused.png")
    assert sheet.width > 2 * 160
    assert 96 < sheet.height < 160


def test_photographs_are_turned_upright(tmp_path) -> None:
    image = Image.new("RGB", (30, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (20, 30)


def truncated(tmp_path: Path, images: list[Path]) -> Path:
    path = tmp_path / "truncated.png"
    path.write_bytes(images[0].read_bytes()[:5000])
    return path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.png"], "there is no image file missing.png"),
        (["."], ". is a folder: name the images in it"),
        (["corrupt.png"], "corrupt.png is not a readable image"),
        (["truncated.png"], "truncated.png is not a readable image"),
        (["one.png", "missing.png"], "there is no image file missing.png"),
        (["one.png", "--show-blocks", "6"], "the model has blocks 0 to 5"),
        (["one.png", "--show-blocks", "-1"], "the model has blocks 0 to 5"),
        (["one.png", "--show-blocks", "a"], "blocks 'a' is not a list"),
        (["one.png", "--blocks", "9"], "the model has blocks 0 to 5"),
        (["one.png", "-o", "nowhere/fused.png"], "there is no folder nowhere"),
        (["one.png", "-o", "fused.jpg"], "name it fused.png"),
        (["one.png", "-r", "-3"], "negative"),
        (["one.png", "-r", "many"], "r='many' is no"),
        (["one.png", "--method", "tomme"], "did you mean 'tome'?"),
        (["one.png", "--image-size", "wide"], "is not a size"),
        (["one.png", "--weights", "w.pt"], "exclude each other"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    command, images, tmp_path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "corrupt.png").write_bytes(b"this is no image")
    truncated(tmp_path, images)
    before = files(tmp_path)
    line = command.refusal("visualize", *arguments, "--model", "test_vit", "--random-weights")
    assert complaint in line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("model", "complaint"), [("test_vitt", "did you mean 'test_vit"), ("resnet18", "ResNet cannot be fused")]
)
def test_models_that_cannot_be_fused_are_refused(command, images, tmp_path, model: str, complaint: str) -> None:
    before = files(tmp_path)
    assert complaint in command.refusal("visualize", images[0], "--model", model, "--random-weights")
    assert files(tmp_path) == before


def test_weights_of_another_model_are_refused(command, images, tmp_path) -> None:
    torch.save({"some.weight": torch.zeros(3)}, tmp_path / "other.pt")
    line = command.refusal("visualize", images[0], "--model", "test_vit", "--weights", tmp_path / "other.pt")
    assert "other.pt holds weights of another model" in line


def test_weights_that_cannot_be_fetched_name_the_cures(command, images, monkeypatch, tmp_path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    line = command.refusal("visualize", images[0], "--model", "test_vit")
    assert "--weights" in line
    assert "--random-weights" in line
