"""Batches of evaluation, and errors of worker processes."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from torchvision.transforms.functional import to_tensor

from helpers.images import write_folder, zip_folder
from mctf import MctfError
from mctf.data import EvalLoader, open_dataset
from mctf.data.dataset import SkippedImageWarning
from mctf.data.loader import SafeDataset, first_error, load_batches

NAMES = ("cat/a.png", "cat/b.png", "dog/c.png", "dog/d.png", "emu/e.png")


def load_even(key: int) -> int:
    if key % 2:
        raise MctfError(f"{key} is odd")
    if key > 10:
        raise KeyError(key)
    return key


def kill_worker(_: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


class TestEvalLoader:
    @pytest.mark.parametrize(("workers", "zipped"), [(0, False), (2, True)])
    def test_has_every_image_once_and_in_order(self, tmp_path: Path, workers: int, zipped: bool) -> None:
        folder = write_folder(tmp_path / "x", *NAMES)
        dataset = open_dataset(zip_folder(folder, tmp_path / "x.zip") if zipped else folder)
        loader = EvalLoader(dataset, to_tensor, batch_size=2, workers=workers)
        batches = list(loader)
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert len(loader) == 3
        pixels = torch.cat([batch.pixels for batch in batches])
        assert torch.equal(pixels, torch.stack([to_tensor(dataset.read(index)) for index in range(5)]))
        assert torch.cat([batch.labels for batch in batches if batch.labels is not None]).tolist() == [0, 0, 1, 1, 2]

    def test_without_classes_has_no_labels(self, tmp_path: Path) -> None:
        dataset = open_dataset(write_folder(tmp_path, *NAMES)).for_model(10)
        assert [batch.labels for batch in EvalLoader(dataset, to_tensor)] == [None]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_damaged_image_is_one_line(self, tmp_path: Path, workers: int) -> None:
        folder = write_folder(tmp_path, *NAMES)
        (folder / "dog" / "d.png").write_bytes(b"text")
        with pytest.raises(MctfError) as raised:
            list(EvalLoader(open_dataset(folder), to_tensor, workers=workers))
        assert "dog/d.png is not a readable image" in str(raised.value)
        assert str(raised.value).endswith("repair or remove it, or skip unreadable images (--on-corrupt skip)")
        assert len(str(raised.value).splitlines()) == 1

    @pytest.mark.parametrize("workers", [0, 2])
    def test_skips_damaged_images_with_their_labels(self, tmp_path: Path, workers: int) -> None:
        folder = write_folder(tmp_path, *NAMES)
        for name in ("cat/b.png", "dog/c.png", "dog/d.png"):
            (folder / name).write_bytes(b"text")
        dataset = open_dataset(folder)
        loader = EvalLoader(dataset, to_tensor, batch_size=2, workers=workers, on_corrupt="skip")
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                batches = list(loader)
            assert [batch.labels.tolist() for batch in batches if batch.labels is not None] == [[0], [2]]
            assert torch.equal(batches[1].pixels[0], to_tensor(dataset.read(4)))
            assert (loader.skipped, len(loader)) == (3, 3)
        assert not caught  # each image has its warning in the first pass

    def test_warns_about_skipped_images_in_its_own_name(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, *NAMES)
        (folder / "cat/b.png").write_bytes(b"text")
        with pytest.warns(SkippedImageWarning, match=r"^skipped: .*b\.png is not a readable image"):
            list(EvalLoader(open_dataset(folder), to_tensor, on_corrupt="skip"))

    @pytest.mark.filterwarnings("ignore:skipped")
    def test_without_a_readable_image(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, *NAMES)
        for name in NAMES:
            (folder / name).write_bytes(b"text")
        with pytest.raises(MctfError, match=r"^none of 5 images is readable, the first: .*cat/a\.png is not a"):
            list(EvalLoader(open_dataset(folder), to_tensor, batch_size=2, on_corrupt="skip"))

    def test_draws_no_random_numbers(self, tmp_path: Path) -> None:
        before = torch.get_rng_state()
        list(EvalLoader(open_dataset(write_folder(tmp_path, *NAMES)), to_tensor))
        assert torch.equal(torch.get_rng_state(), before)


class TestErrors:
    def test_are_values(self) -> None:
        samples = [SafeDataset(load_even)[key] for key in (2, 3, 5)]
        assert samples[0] == 2
        assert str(first_error(samples)) == "3 is odd"
        assert first_error(samples[:1]) is None

    def test_of_another_type_are_raised(self) -> None:
        with pytest.raises(KeyError):
            SafeDataset(load_even)[12]

    def test_are_raised_after_the_batches_before(self) -> None:
        batches = load_batches(load_even, [[0, 2], [4, 5], [6, 8]], list, workers=0)
        assert next(batches) == [0, 2]
        with pytest.raises(MctfError, match=r"^5 is odd$"):
            next(batches)

    def test_killed_worker_is_one_line(self) -> None:
        with pytest.raises(MctfError, match=r"^the 1 loader process failed \(.*\): lower --workers"):
            list(load_batches(kill_worker, [[0]], list, workers=1))

    def test_many_workers_are_no_warning(self) -> None:
        with warnings.catch_warnings(action="error"):
            next(load_batches(load_even, [[0]] * 9, list, workers=9))
