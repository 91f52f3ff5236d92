"""KL under many schedules: the same as from whole passes, and remembered in a file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import mctf
from mctf import MctfError
from mctf.evaluation.fidelity import kl_divergence
from mctf.evaluation.kl_meter import KLMeter, ScoreFile, scores_digest
from mctf.models.loading import copy_sharing_weights

SCHEDULES = [(0, 9, 0, 4, 0, 0), (0, 9, 0, 0, 7, 0), (0, 9, 0, 4, 5, 0), (3, 0, 0, 0, 0, 0), (0, 0, 9, 0, 0, 0)]


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3).eval()


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    images = torch.randn(5, 3, 160, 160, generator=torch.Generator().manual_seed(1))
    return list(images.split(2))


def meter(tiny: Any, batches: list[torch.Tensor], method: str = "ward", file: ScoreFile | None = None) -> KLMeter:
    return KLMeter(tiny, batches, method=method, options={}, file=file or ScoreFile(None, ""))


@pytest.mark.parametrize("method", ["ward", "mctf", "tome", "evit"])
def test_a_shared_prefix_changes_nothing(tiny: Any, batches: list[torch.Tensor], method: str) -> None:
    measured = meter(tiny, batches, method).kl(SCHEDULES)
    images = torch.cat(batches)
    with torch.no_grad():
        reference = tiny(images).double()
        for schedule, found in zip(SCHEDULES, measured, strict=True):
            logits = mctf.fuse(copy_sharing_weights(tiny), method, r=schedule)(images).double()
            expected = kl_divergence(reference, logits)
            assert expected.max() > 1e-8
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-7)


def test_blocks_before_the_first_change_run_once(tiny: Any, batches: list[torch.Tensor]) -> None:
    each = meter(tiny, batches[:1], "tome")
    ran: list[int] = []
    run_block = each._run_block
    each._run_block = lambda index, x, **given: (ran.append(index), run_block(index, x, **given))[1]  # type: ignore[assignment]
    each.kl([(0, 9, 0, 4, 0, 0), (0, 9, 0, 4, 5, 0)])
    # the unfused model; then all of the first; block 3 again, as whether block 4 reduces is another matter
    assert ran == [*range(6), *range(6), 3, 4, 5]


def test_fewer_images_are_whole_batches_and_continued(tiny: Any, batches: list[torch.Tensor]) -> None:
    ticks: list[int] = []
    each = meter(tiny, batches)
    each.tick = lambda: ticks.append(1)
    (few,) = each.kl(SCHEDULES[:1], 3)
    assert (len(few), len(ticks)) == (4, 2)
    (every,) = each.kl(SCHEDULES[:1])
    assert (len(every), len(ticks)) == (5, 3)
    assert torch.equal(every[:4], few)
    assert len(each.kl(SCHEDULES[:1], 1)[0]) == 2
    assert len(ticks) == 3


def test_scores_outlive_the_process(tiny: Any, batches: list[torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "scores"
    first = meter(tiny, batches, file=ScoreFile.open(path, "digest")).kl(SCHEDULES)
    again = meter(tiny, batches, file=ScoreFile.open(path, "digest"))
    again.tick = lambda: pytest.fail("measured again")
    assert all(torch.equal(*pair) for pair in zip(first, again.kl(SCHEDULES), strict=True))
    assert os.listdir(tmp_path) == ["scores"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no scores"),
        (b"\xff\xfe", "holds no scores"),
        (b"[]", "holds no scores of mctf tune"),
        (b"[" * 100_000, "holds no scores"),
        ({"format": "else"}, "holds no scores of mctf tune"),
        ({"version": 2}, "holds no scores of mctf tune"),
        ({"digest": "other"}, "other images, weights or settings"),
        ({"scores": None}, "is damaged"),
        ({"scores": {"a": [1]}}, "is damaged"),
        ({"scores": {"1,2": ["x"]}}, "is damaged"),
        ({"scores": {"1,2": [float("nan")]}}, "is damaged"),
    ],
)
def test_other_files_are_refused_and_kept(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "scores"
    if isinstance(content, dict):
        good = {"format": "mctf tuning scores", "version": 1, "digest": "digest", "scores": {}}
        content = json.dumps(good | content).encode()
    path.write_bytes(content)
    with pytest.raises(MctfError, match=says):
        ScoreFile.open(path, "digest")
    assert path.read_bytes() == content
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(MctfError, match="not a regular file"):
        ScoreFile.open(path, "digest")


def test_the_digest_covers_weights_images_and_settings(tiny: Any) -> None:
    torch.manual_seed(1)
    other = timm.create_model("test_vit", num_classes=3)
    digests = {
        scores_digest(tiny, images="a", settings={}),
        scores_digest(tiny, images="b", settings={}),
        scores_digest(tiny, images="a", settings={"method": "ward"}),
        scores_digest(other, images="a", settings={}),
    }
    assert len(digests) == 4
    assert scores_digest(copy_sharing_weights(tiny), images="a", settings={}) in digests


def test_undefined_logits_are_refused(batches: list[torch.Tensor]) -> None:
    broken = timm.create_model("test_vit", num_classes=3)
    with torch.no_grad():
        broken.head.weight.fill_(torch.inf)
    with pytest.raises(MctfError, match="infinite or undefined"):
        meter(broken, batches).kl(SCHEDULES)
