"""Batches for training: the same whenever asked for, by a loader and from memory."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.data_feeds import MEAN, SIZE, STD, assert_same, collect, feed, number_of, options, write_plain_images
from helpers.images import make_picture, write_folder, zip_folder
from mctf import MctfError
from mctf.data import Feed, FeedOptions, Preprocessing, find_images, make_feed
from mctf.data.gpu_feed import processes_for

NAMES = tuple(f"{folder}/{number}.png" for folder in ("ant", "bee", "cow") for number in range(6))
WAYS = {"loader": "no", "memory": "yes"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures"), *NAMES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain_images(tmp_path_factory.mktemp("plain"), 26)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return WAYS[request.param]


@pytest.mark.parametrize("augmentation", ["weak", "strong"])
class TestSameBatches:
    def test_are_given_again_and_from_any_step(self, pictures: Path, way: str, augmentation: str) -> None:
        made = [feed(pictures, in_memory=way, augmentation=augmentation) for _ in range(2)]
        whole = list(made[0].batches(2))
        assert len(whole) == made[0].steps() == 4
        random.seed(1)
        torch.manual_seed(1)
        assert_same(whole, made[0].batches(2))
        assert_same(whole[3:], made[1].batches(2, start=3))
        assert not torch.equal(whole[0][0], next(iter(made[0].batches(3)))[0])

    def test_come_from_any_number_of_workers(self, pictures: Path, augmentation: str) -> None:
        made = [feed(pictures, in_memory="no", augmentation=augmentation, workers=workers) for workers in (0, 2)]
        assert_same(made[0].batches(0, start=1), made[1].batches(0, start=1))

    def test_do_not_disturb_the_random_numbers_of_training(self, pictures: Path, way: str, augmentation: str) -> None:
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        list(feed(pictures, in_memory=way, augmentation=augmentation).batches(0))
        after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        assert before[:2] == after[:2]
        assert torch.equal(before[2], after[2])

    def test_do_not_depend_on_autocast(self, pictures: Path, way: str, augmentation: str) -> None:
        made = feed(pictures, in_memory=way, augmentation=augmentation)
        expected = list(made.batches(0))
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(expected, made.batches(0))


class TestBatches:
    def test_are_what_training_takes(self, pictures: Path, way: str) -> None:
        made = feed(pictures, in_memory=way)
        assert (made.images, made.classes, made.skipped) == (18, 3, 0)
        for images, labels in made.batches(0):
            assert (images.shape, images.dtype) == ((4, 3, SIZE, SIZE), torch.float32)
            assert (labels.shape, labels.dtype) == ((4,), torch.int64)

    @pytest.mark.parametrize("augmentation", ["none", "weak"])
    def test_have_the_labels_of_their_images(self, plain: Path, way: str, augmentation: str) -> None:
        images, labels = collect(feed(plain, in_memory=way, augmentation=augmentation).batches(0))
        numbers = [number_of(image) for image in torch.cat(images)]
        assert len(set(numbers)) == 24
        assert torch.cat(labels).tolist() == [number % 3 for number in numbers]

    def test_are_shared_between_processes(self, plain: Path, way: str) -> None:
        made = [feed(plain, in_memory=way, rank=rank, world=2, repeated=2) for rank in range(2)]
        assert [each.steps() for each in made] == [3, 3]
        numbers = [[number_of(image) for image in torch.cat(collect(each.batches(1))[0])] for each in made]
        assert numbers[0] == numbers[1]  # with as many repeats as processes, each has one of every image
        assert len(set(numbers[0])) == 12

    def test_show_repeats_differently(self, pictures: Path, way: str) -> None:
        first, second = (feed(pictures, in_memory=way, rank=rank, world=2, repeated=2) for rank in range(2))
        for (images, labels), (others, other_labels) in zip(first.batches(0), second.batches(0), strict=True):
            assert torch.equal(labels, other_labels)
            assert ((images - others).abs().mean((1, 2, 3)) > 0.01).all()

    def test_show_an_image_differently_in_every_epoch(self, tmp_path: Path, way: str) -> None:
        for name in ("ant/1.png", "ant/2.png", "bee/3.png", "bee/4.png"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            make_picture(0).save(tmp_path / name)
        made = feed(tmp_path, in_memory=way)
        seen = torch.cat([images for epoch in range(3) for images, _ in made.batches(epoch)])
        assert len(torch.unique(seen, dim=0)) == 12

    def test_without_augmentation_are_those_of_evaluation(self, pictures: Path, way: str) -> None:
        images = find_images(pictures)
        transform = Preprocessing((SIZE, SIZE), 1.0, "center", "bicubic", MEAN, STD).transform()
        expected = torch.stack([transform(images.read(index)) for index in range(len(images))])
        for batch, _ in feed(pictures, in_memory=way, augmentation="none").batches(0):
            distance = (batch[:, None] - expected).abs().amax((2, 3, 4)).amin(1)
            assert (distance < (1.6 / 255 / min(STD) if way == "yes" else 1e-6)).all()  # Pillow rounds twice

    def test_of_another_size_and_interpolation(self, pictures: Path, way: str) -> None:
        made = feed(pictures, in_memory=way, image_size=(10, 20), interpolation="bilinear", augmentation="strong")
        assert next(iter(made.batches(0)))[0].shape == (4, 3, 10, 20)

    @pytest.mark.parametrize("augmentation", ["weak", "strong"])
    def test_are_changed_by_augmentation_and_stay_in_range(self, pictures: Path, way: str, augmentation: str) -> None:
        plain, changed = (
            torch.cat(collect(feed(pictures, in_memory=way, augmentation=each).batches(0))[0])
            for each in ("none", augmentation)
        )
        assert ((plain - changed).abs().mean((1, 2, 3)) > 0.01).all()
        if augmentation == "weak":  # erasing puts noise without bounds
            levels = changed * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
            assert levels.min() > -1e-5
            assert levels.max() < 1 + 1e-5

    @pytest.mark.parametrize("augmentation", ["weak", "strong"])
    def test_are_jittered_where_asked(self, plain: Path, way: str, augmentation: str) -> None:
        calm, jittered = (
            torch.cat(collect(feed(plain, in_memory=way, augmentation=augmentation, colour_jitter=most).batches(0))[0])
            for most in (0.0, 0.5)
        )
        assert ((calm - jittered).abs().mean((1, 2, 3)) > 0.01).float().mean() > 0.8

    def test_show_the_same_images_in_the_same_order_either_way(self, plain: Path) -> None:
        labels = [torch.cat(collect(feed(plain, in_memory=each).batches(4))[1]) for each in WAYS.values()]
        assert torch.equal(*labels)


class TestChoice:
    def test_small_images_are_kept_in_memory(self, pictures: Path, tmp_path: Path) -> None:
        calls: list[tuple[int, int]] = []
        archive = zip_folder(pictures, tmp_path / "x.zip")
        made = make_feed(archive, options=options(), device="cpu", progress=lambda *seen: calls.append(seen))
        assert "18 images of 48 x 40 pixels, kept on cpu" in made.note
        assert calls[-1] == (18, 18)

    def test_many_images_are_decoded_by_several_processes(
        self, pictures: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = list(feed(pictures).batches(0))
        monkeypatch.setattr("mctf.data.gpu_feed._FEW", 0)
        monkeypatch.setattr("mctf.data.gpu_feed._CHUNK_BYTES", 4 * 48 * 40 * 3)  # 4 images, 5 chunks
        assert_same(expected, feed(pictures, workers=2).batches(0))
        (pictures / "bee" / "9.png").write_bytes(b"no image")
        try:
            with pytest.raises(MctfError, match=r"bee/9\.png is no readable image .* or skip such images"):
                feed(pictures, workers=2, on_corrupt="stop")
        finally:
            (pictures / "bee" / "9.png").unlink()

    def test_training_processes_share_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
        assert [processes_for(world) for world in (1, 4, 64)] == [16, 4, 1]
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert processes_for(64) == 2

    def test_large_images_are_not_on_a_cpu(self, tmp_path: Path) -> None:
        made = feed(write_plain_images(tmp_path, 6, side=97))
        assert made.note == "6 images, read by the training process (they are not small, and there is no GPU)"

    @pytest.mark.parametrize("place", ["class0/000.png", "class2/039.png"])  # one is looked at first, one is not
    def test_images_of_several_sizes_are_not(self, tmp_path: Path, place: str) -> None:
        write_plain_images(tmp_path, 40)
        make_picture(0, width=9, height=8).save(tmp_path / place)
        assert "they have several sizes" in feed(tmp_path).note
        with pytest.raises(MctfError, match=r"cannot be kept in memory: they have several sizes \(.*9 x 8.*\); let a"):
            feed(tmp_path, in_memory="yes")

    def test_images_that_are_too_many_are_not(self, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mctf.data.feed._memory_of", lambda _: 4 * 18 * 48 * 40 * 3 - 4)
        assert "GB decoded" in feed(pictures).note
        monkeypatch.setattr("mctf.data.feed._memory_of", lambda _: 4 * 18 * 48 * 40 * 3)
        assert "kept on cpu" in feed(pictures).note

    def test_other_interpolations_are_for_the_loader(self, pictures: Path) -> None:
        made: Feed = feed(pictures, interpolation="lanczos")
        assert "'lanczos' is no interpolation of batches" in made.note
        list(made.batches(0))

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"augmentation": "storng"}, "augmentation is 'storng': did you mean 'strong'"),
            ({"in_memory": "maybe"}, "in_memory is 'maybe': choose from auto, no, yes"),
            ({"on_corrupt": "stopp"}, "on_corrupt is 'stopp': did you mean 'stop'"),
            ({"batch": 0}, "batch is 0: give 1 or more"),
            ({"repeated": 0}, "repeated is 0: give 1 or more"),
            ({"workers": -1}, "workers is -1: give 0 or more"),
            ({"smallest_crop": 0.0}, "smallest_crop is 0.0: give a share of the area, above 0 and at most 1"),
            ({"smallest_crop": 0.5, "augmentation": "none"}, "smallest_crop speaks of random crops"),
            ({"colour_jitter": 1.0}, "colour_jitter is 1.0: give 0 or more, below 1"),
            ({"image_size": (0, 4)}, r"image_size is \(0, 4\): give height and width"),
            ({"mean": (0.5,)}, "mean and std need three numbers each"),
        ],
    )
    def test_wrong_options_are_refused(self, wrong: dict[str, object], message: str) -> None:
        with pytest.raises(MctfError, match=message):
            options(**wrong)

    def test_options_cannot_change(self) -> None:
        made: FeedOptions = options()
        with pytest.raises(AttributeError):
            made.batch = 8  # type: ignore[misc]
