"""Training batches by a loader and from memory: reproducible, labeled, and the choice between the two."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.data_feeds import MEAN, SIZE, STD, assert_same, collect, feed, number_of, options, write_uniform_images
from helpers.images import make_picture, write_folder, zip_folder
from mctf import MctfError
from mctf.data import Feed, Preprocessing, make_feed, open_dataset

NAMES = tuple(f"{folder}/{number}.png" for folder in ("ant", "bee", "cow") for number in range(6))
IN_MEMORY = {"loader": "no", "memory": "yes"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures"), *NAMES)


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uniform_images(tmp_path_factory.mktemp("uniform"), 26)


@pytest.fixture(params=IN_MEMORY)
def in_memory(request: pytest.FixtureRequest) -> str:
    return IN_MEMORY[request.param]


@pytest.mark.parametrize("augmentation", ["weak", "strong"])
class TestSameBatches:
    def test_are_reproducible_from_any_step(self, pictures: Path, in_memory: str, augmentation: str) -> None:
        built = [feed(pictures, in_memory=in_memory, augmentation=augmentation) for _ in range(2)]
        whole = list(built[0].batches(2))
        assert len(whole) == built[0].steps() == 4
        random.seed(1)
        torch.manual_seed(1)
        assert_same(whole, built[0].batches(2))
        assert_same(whole[3:], built[1].batches(2, start=3))
        assert not torch.equal(whole[0][0], next(iter(built[0].batches(3)))[0])

    def test_do_not_depend_on_the_number_of_workers(self, pictures: Path, augmentation: str) -> None:
        built = [feed(pictures, in_memory="no", augmentation=augmentation, workers=workers) for workers in (0, 2)]
        assert_same(built[0].batches(0, start=1), built[1].batches(0, start=1))

    def test_preserve_the_global_generators(self, pictures: Path, in_memory: str, augmentation: str) -> None:
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        list(feed(pictures, in_memory=in_memory, augmentation=augmentation).batches(0))
        after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        assert before[:2] == after[:2]
        assert torch.equal(before[2], after[2])

    def test_do_not_depend_on_autocast(self, pictures: Path, in_memory: str, augmentation: str) -> None:
        built = feed(pictures, in_memory=in_memory, augmentation=augmentation)
        expected = list(built.batches(0))
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(expected, built.batches(0))


class TestBatches:
    def test_have_the_shape_and_dtype_of_training(self, pictures: Path, in_memory: str) -> None:
        built = feed(pictures, in_memory=in_memory)
        assert (built.num_images, built.num_classes, built.skipped) == (18, 3, 0)
        for images, labels in built.batches(0):
            assert (images.shape, images.dtype) == ((4, 3, SIZE, SIZE), torch.float32)
            assert (labels.shape, labels.dtype) == ((4,), torch.int64)

    @pytest.mark.parametrize("augmentation", ["none", "weak"])
    def test_have_the_labels_of_their_images(self, uniform: Path, in_memory: str, augmentation: str) -> None:
        images, labels = collect(feed(uniform, in_memory=in_memory, augmentation=augmentation).batches(0))
        numbers = [number_of(image) for image in torch.cat(images)]
        assert len(set(numbers)) == 24
        assert torch.cat(labels).tolist() == [number % 3 for number in numbers]

    def test_are_split_between_ranks(self, uniform: Path, in_memory: str) -> None:
        built = [feed(uniform, in_memory=in_memory, rank=rank, world_size=2, repeated=2) for rank in range(2)]
        assert [each.steps() for each in built] == [3, 3]
        numbers = [[number_of(image) for image in torch.cat(collect(each.batches(1))[0])] for each in built]
        assert numbers[0] == numbers[1]  # with as many repeats as ranks, each rank has one of every image
        assert len(set(numbers[0])) == 12

    def test_augment_repeats_differently(self, pictures: Path, in_memory: str) -> None:
        first, second = (feed(pictures, in_memory=in_memory, rank=rank, world_size=2, repeated=2) for rank in range(2))
        for (images, labels), (others, other_labels) in zip(first.batches(0), second.batches(0), strict=True):
            assert torch.equal(labels, other_labels)
            assert ((images - others).abs().mean((1, 2, 3)) > 0.01).all()

    def test_augment_an_image_differently_in_every_epoch(self, tmp_path: Path, in_memory: str) -> None:
        for name in ("ant/1.png", "ant/2.png", "bee/3.png", "bee/4.png"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            make_picture(0).save(tmp_path / name)
        built = feed(tmp_path, in_memory=in_memory)
        shown = torch.cat([images for epoch in range(3) for images, _ in built.batches(epoch)])
        assert len(torch.unique(shown, dim=0)) == 12

    def test_without_augmentation_equal_those_of_evaluation(self, pictures: Path, in_memory: str) -> None:
        dataset = open_dataset(pictures)
        transform = Preprocessing((SIZE, SIZE), 1.0, "center", "bicubic", MEAN, STD).transform()
        expected = torch.stack([transform(dataset.read(index)) for index in range(len(dataset))])
        for batch, _ in feed(pictures, in_memory=in_memory, augmentation="none").batches(0):
            distance = (batch[:, None] - expected).abs().amax((2, 3, 4)).amin(1)
            assert (distance < (1.6 / 255 / min(STD) if in_memory == "yes" else 1e-6)).all()  # Pillow rounds twice

    def test_of_another_size_and_interpolation(self, pictures: Path, in_memory: str) -> None:
        built = feed(
            pictures, in_memory=in_memory, image_size=(10, 20), interpolation="bilinear", augmentation="strong"
        )
        assert next(iter(built.batches(0)))[0].shape == (4, 3, 10, 20)

    @pytest.mark.parametrize("augmentation", ["weak", "strong"])
    def test_are_augmented_within_range(self, pictures: Path, in_memory: str, augmentation: str) -> None:
        plain, changed = (
            torch.cat(collect(feed(pictures, in_memory=in_memory, augmentation=each).batches(0))[0])
            for each in ("none", augmentation)
        )
        assert ((plain - changed).abs().mean((1, 2, 3)) > 0.01).all()
        if augmentation == "weak":  # random erasing adds unbounded noise
            levels = changed * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
            assert levels.min() > -1e-5
            assert levels.max() < 1 + 1e-5

    @pytest.mark.parametrize("augmentation", ["weak", "strong"])
    def test_have_color_jitter(self, uniform: Path, in_memory: str, augmentation: str) -> None:
        without, jittered = (
            torch.cat(
                collect(feed(uniform, in_memory=in_memory, augmentation=augmentation, color_jitter=most).batches(0))[0]
            )
            for most in (0.0, 0.5)
        )
        assert ((without - jittered).abs().mean((1, 2, 3)) > 0.01).float().mean() > 0.8

    def test_have_the_same_order_either_way(self, uniform: Path) -> None:
        labels = [torch.cat(collect(feed(uniform, in_memory=each).batches(4))[1]) for each in IN_MEMORY.values()]
        assert torch.equal(*labels)


class TestChoice:
    def test_small_images_are_kept_in_memory(self, pictures: Path, tmp_path: Path) -> None:
        calls: list[tuple[int, int]] = []
        archive = zip_folder(pictures, tmp_path / "x.zip")
        built = make_feed(archive, options=options(), device="cpu", progress=lambda *call: calls.append(call))
        assert "18 images of 48 x 40 pixels, kept on cpu" in built.note
        assert calls[-1] == (18, 18)

    def test_many_images_are_decoded_by_workers(self, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = list(feed(pictures).batches(0))
        monkeypatch.setattr("mctf.data.gpu_feed._MIN_IMAGES_FOR_WORKERS", 0)
        monkeypatch.setattr("mctf.data.gpu_feed._CHUNK_BYTES", 4 * 48 * 40 * 3)  # 4 images, 5 chunks
        assert_same(expected, feed(pictures, workers=2).batches(0))
        (pictures / "bee" / "9.png").write_bytes(b"text")
        try:
            with pytest.raises(MctfError, match=r"bee/9\.png is not a readable image .* or skip unreadable images"):
                feed(pictures, workers=2, on_corrupt="stop")
        finally:
            (pictures / "bee" / "9.png").unlink()

    def test_large_images_are_not_kept_on_a_cpu(self, tmp_path: Path) -> None:
        built = feed(write_uniform_images(tmp_path, 6, side=97))
        assert built.note == "6 images, read by the training process (they are not small, and there is no GPU)"

    @pytest.mark.parametrize("place", ["class0/000.png", "class2/039.png"])  # one is probed, one is not
    def test_images_of_several_sizes_are_not_kept(self, tmp_path: Path, place: str) -> None:
        write_uniform_images(tmp_path, 40)
        make_picture(0, width=9, height=8).save(tmp_path / place)
        assert "they have several sizes" in feed(tmp_path).note
        with pytest.raises(
            MctfError, match=r"cannot be kept in memory: they have several sizes \(.*9 x 8.*\); use a loader"
        ):
            feed(tmp_path, in_memory="yes")

    def test_too_many_images_are_not_kept(self, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mctf.data.feed.memory_of", lambda _: 4 * 18 * 48 * 40 * 3 - 4)
        assert "GB decoded" in feed(pictures).note
        monkeypatch.setattr("mctf.data.feed.memory_of", lambda _: 4 * 18 * 48 * 40 * 3)
        assert "kept on cpu" in feed(pictures).note

    def test_other_interpolations_need_the_loader(self, pictures: Path) -> None:
        built: Feed = feed(pictures, interpolation="lanczos")
        assert "batches have no 'lanczos' interpolation" in built.note
        list(built.batches(0))
