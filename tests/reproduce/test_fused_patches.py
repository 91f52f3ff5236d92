"""Pictures of fused patches: one for every image, r and block."""

from PIL import Image

import mctf
from helpers.models import make
from helpers.subjects import make_subject, make_task
from mctf.reproduce.pictures import CRITERIA, FusedPatches


def test_there_is_a_picture_for_everything(tmp_path, subject) -> None:
    task, steps = make_task(tmp_path, subject)
    found = FusedPatches().run(task)
    assert sum(steps) == FusedPatches().steps(task)
    assert found["tokens"] == [mctf.plan(subject.model, r=r).token_counts for r in found["reductions"]]
    files = [file for images in found["pictures"] for blocks in images for file in blocks]
    assert len(files) == len(set(files)) == 3 * 2 * 4
    by_criteria = [file for images in found["criteria"]["pictures"] for file in images]
    assert len(set(by_criteria)) == len(CRITERIA) * 2
    for file in [*files, *by_criteria, *found["originals"]]:
        assert Image.open(task.pictures / file).size == (448, 448)


def test_pictures_differ_from_block_to_block_and_from_r_to_r(tmp_path, subject) -> None:
    task, _ = make_task(tmp_path, subject)
    pictures = FusedPatches().run(task)["pictures"]
    shown = {(task.pictures / file).read_bytes() for images in pictures for file in images[0]}
    assert len(shown) == 1 + 3 * 3  # the first block does not fuse and looks the same for every r


def test_patches_that_form_no_grid_are_not_drawn(tmp_path) -> None:
    subject = make_subject(tmp_path, make("plain", img_size=(64, 64), patch_size=(8, 16)))
    assert "no grid of squares" in str(FusedPatches().unsuited(subject))
