"""Options of a feed: one table of limits, which a training config can use as well."""

import pytest

from helpers.data_feeds import options
from mctf import MctfError
from mctf.data import FEED_CHOICES, FEED_LIMITS, check_feed_option


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"augmentation": "storng"}, "augmentation is 'storng': did you mean 'strong'"),
        ({"in_memory": "maybe"}, "in_memory is 'maybe': choose from auto, no, yes"),
        ({"on_corrupt": "stopp"}, "on_corrupt is 'stopp': did you mean 'stop'"),
        ({"batch": 0}, "batch is 0: expected an integer, 1 or more"),
        ({"batch": 1.5}, "batch is 1.5: expected an integer, 1 or more"),
        ({"repeated": 0}, "repeated is 0: expected an integer, 1 or more"),
        ({"workers": -1}, "workers is -1: expected an integer, 0 or more"),
        ({"smallest_crop": 0.0}, "smallest_crop is 0.0: expected a number, above 0, at most 1"),
        ({"smallest_crop": 0.5, "augmentation": "none"}, "smallest_crop is for random crops"),
        ({"color_jitter": 1.0}, "color_jitter is 1.0: expected a number, 0 or more, below 1"),
        ({"color_jitter": float("nan")}, "color_jitter is nan: expected a number"),
        ({"image_size": (0, 4)}, r"image_size is \(0, 4\): give height and width"),
        ({"mean": (0.5,)}, "mean and std need three numbers each"),
    ],
)
def test_wrong_values(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(MctfError, match=message):
        options(**wrong)


def test_every_limit_refuses_and_accepts() -> None:
    for name, limits in FEED_LIMITS.items():
        check_feed_option(name, 1 if 1 in limits else 0.5)
        with pytest.raises(MctfError, match=f"^expected {limits}$"):
            check_feed_option(name, limits.low - 1)
    for name, choices in FEED_CHOICES.items():
        check_feed_option(name, choices[0])
        with pytest.raises(MctfError, match="choose from"):
            check_feed_option(name, "xyz")


def test_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        options().batch = 8  # type: ignore[misc]
