"""Batches of evaluation, and errors of worker processes."""

from pathlib import Path

import pytest
import torch
from torchvision.transforms.functional import to_tensor

from helpers.images import write_folder, zip_folder
from mctf import MctfError
from mctf.data import EvalLoader, open_dataset
from mctf.data.loader import SafeDataset, first_error, load_batches

NAMES = ("cat/a.png", "cat/b.png", "dog/c.png", "dog/d.png", "emu/e.png")


def load_even(key: int) -> int:
    if key % 2:
        raise MctfError(f"{key} is odd")
    if key > 10:
        raise KeyError(key)
    return key


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
        assert len(str(raised.value).splitlines()) == 1

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
