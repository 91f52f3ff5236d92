"""The picture of one image whose patches were fused, and sheets of such pictures."""

import numpy as np
import pytest
from PIL import Image

from mctf.errors import MctfError
from mctf.viz.contact_sheet import Panel, make_sheet, write_png
from mctf.viz.fused_patches import fused_picture, group_color, patch_grid

PATCH = 16
ALONE = np.arange(6)  # six patches, none fused


def make_image(rows: int, columns: int, *, patch: int = PATCH, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (rows * patch, columns * patch, 3), dtype=np.uint8))


def patch_pixels(picture: Image.Image, patch: int, *, columns: int, side: int) -> np.ndarray:
    row, column = divmod(patch, columns)
    return np.asarray(picture)[row * side : (row + 1) * side, column * side : (column + 1) * side]


def middle(picture: Image.Image, patch: int, *, columns: int, side: int) -> tuple[int, ...]:
    return tuple(patch_pixels(picture, patch, columns=columns, side=side)[side // 2, side // 2])


def test_a_group_shows_the_mean_color_of_all_its_pixels() -> None:
    image = make_image(2, 3)
    picture = fused_picture(image, [0, 7, 2, 7, 4, 5], grid=(2, 3), scale=1)
    parts = [patch_pixels(image, patch, columns=3, side=PATCH).reshape(-1, 3) for patch in (1, 3)]
    expected = tuple(np.concatenate(parts).mean(axis=0).round().astype(int))
    assert middle(picture, 1, columns=3, side=PATCH) == expected
    assert middle(picture, 3, columns=3, side=PATCH) == expected
    assert middle(picture, 4, columns=3, side=PATCH) != expected


def test_another_source_map_gives_another_picture() -> None:
    image = make_image(2, 3)
    one = fused_picture(image, [0, 7, 2, 7, 4, 5], grid=(2, 3))
    other = fused_picture(image, [0, 7, 7, 3, 4, 5], grid=(2, 3))
    assert np.asarray(one).shape == np.asarray(other).shape
    assert (np.asarray(one) != np.asarray(other)).any()


def test_numbers_of_slots_do_not_matter_only_which_patches_share_one() -> None:
    image = make_image(2, 3)
    one = fused_picture(image, [0, 1, 1, 2, 2, 3], grid=(2, 3))
    other = fused_picture(image, [9, 4, 4, 1, 1, 0], grid=(2, 3))
    assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("scale", [1, 3])
def test_a_group_has_a_border_of_its_own_color_only_where_another_token_begins(scale: int) -> None:
    side = PATCH * scale
    picture = fused_picture(make_image(2, 3), [1, 1, 2, 3, 4, 5], grid=(2, 3), scale=scale)
    left = patch_pixels(picture, 0, columns=3, side=side)
    color = group_color(0, 0)
    half = side // 2
    assert tuple(left[half, 0]) == color, "the picture's edge"
    assert tuple(left[-1, half]) == color, "another token below"
    assert tuple(left[half, -1]) != color, "the same token to the right"
    assert tuple(left[half, half]) != color
    right = patch_pixels(picture, 1, columns=3, side=side)
    assert tuple(right[half, -1]) == color, "another token to the right"


def test_a_group_is_bordered_on_all_sides() -> None:
    picture = fused_picture(make_image(4, 3), [0, 1, 2, 3, 7, 5, 6, 7, 8, 9, 10, 11], grid=(4, 3), scale=1)
    box = np.asarray(picture)[PATCH : 3 * PATCH, PATCH : 2 * PATCH]
    for side in (box[0], box[-1], box[:, 0], box[:, -1]):
        assert (side == group_color(1, 1)).all()
    assert (box[1:-1, 1:-1] == box[5, 5]).all(), "no line where both patches meet"


def test_the_border_turns_the_inner_corner_of_an_angle() -> None:
    picture = fused_picture(make_image(2, 2), [1, 1, 1, 3], grid=(2, 2), scale=1)
    assert tuple(np.asarray(picture)[PATCH - 1, PATCH - 1]) == group_color(0, 0)


def test_patches_far_apart_in_one_group_share_the_border_color() -> None:
    picture = fused_picture(make_image(1, 5), [1, 2, 3, 4, 1], grid=(1, 5), scale=1)
    assert tuple(np.asarray(picture)[0, 0]) == tuple(np.asarray(picture)[0, -1]) == group_color(0, 0)


def test_unfused_patches_keep_their_pixels_inside_a_thin_seam() -> None:
    image = make_image(2, 3)
    picture = np.asarray(fused_picture(image, ALONE, grid=(2, 3), scale=1))
    pixels = np.asarray(image)
    inside = np.s_[1 : PATCH - 1, 1 : PATCH - 1]
    assert np.array_equal(picture[inside], pixels[inside])
    assert (picture[0] <= pixels[0]).all()


def test_colors_stay_when_a_group_grows() -> None:
    image = make_image(2, 3)
    before = fused_picture(image, [0, 1, 1, 3, 4, 5], grid=(2, 3), scale=1)
    after = fused_picture(image, [8, 6, 6, 6, 4, 5], grid=(2, 3), scale=1)
    assert before.getpixel((PATCH, 0)) == after.getpixel((PATCH, 0)) == group_color(0, 1)


def grays(picture: Image.Image, patch: int, *, side: int = PATCH) -> np.ndarray:
    """The one value of all three channels in each pixel of a patch."""
    pixels = patch_pixels(picture, patch, columns=3, side=side)
    assert (pixels == pixels[..., :1]).all(), "no color"
    return pixels[..., 0]


@pytest.mark.parametrize(("scale", "light"), [(1, 0), (1, 255), (3, 0), (3, 255), (3, 128)])
def test_dropped_patches_are_gray_with_dark_stripes_for_every_image(scale: int, light: int) -> None:
    image = Image.new("RGB", (3 * PATCH, 2 * PATCH), (light, light // 2, light))
    picture = fused_picture(image, ALONE, grid=(2, 3), dropped=np.arange(6) > 3, scale=scale)
    for patch in (4, 5):
        inside = grays(picture, patch, side=PATCH * scale)[1:-1, 1:-1].astype(int)
        assert np.ptp(inside) > 50, "stripes"
        assert len(np.unique(inside)) == 2
        assert 0.05 < (inside == inside.min()).mean() < 0.4, "between which the patch is visible"
    kept = patch_pixels(picture, 0, columns=3, side=PATCH * scale)
    assert (kept[1:-1, 1:-1] == (light, light // 2, light)).all()


def test_stripes_run_through_patches_dropped_side_by_side() -> None:
    image = Image.new("RGB", (3 * PATCH, 2 * PATCH), "red")
    alone = fused_picture(image, ALONE, grid=(2, 3), dropped=[False, True, True, False, False, False], scale=3)
    row = np.asarray(alone)[PATCH * 3 // 2, PATCH * 3 + 1 : 3 * PATCH * 3 - 1, 0].astype(int)
    starts = np.flatnonzero(np.diff((row == row.min()).astype(int)) == 1)
    assert len(set(np.diff(starts))) == 1


def test_a_dropped_patch_is_in_no_group() -> None:
    image = make_image(2, 3)
    slots, dropped = [0, 0, 2, 3, 2, 2], [False, True, False, False, True, False]
    picture = fused_picture(image, slots, grid=(2, 3), dropped=dropped, scale=1)
    inside = np.s_[1 : PATCH - 1, 1 : PATCH - 1]
    shown, pixels = (patch_pixels(each, 0, columns=3, side=PATCH) for each in (picture, image))
    assert np.array_equal(shown[inside], pixels[inside]), "left alone with its token, it is as it was"
    parts = [patch_pixels(image, patch, columns=3, side=PATCH).reshape(-1, 3) for patch in (2, 5)]
    assert middle(picture, 2, columns=3, side=PATCH) == tuple(np.concatenate(parts).mean(axis=0).round().astype(int))
    assert picture.getpixel((3 * PATCH - 1, 0)) == group_color(0, 2)
    for patch in (1, 4):
        grays(picture, patch)


def test_without_dropped_patches_only_the_slots_matter() -> None:
    image, slots = make_image(2, 3), [0, 7, 2, 7, 4, 5]
    expected = fused_picture(image, slots, grid=(2, 3))
    assert fused_picture(image, slots, grid=(2, 3), dropped=[False] * 6).tobytes() == expected.tobytes()
    assert fused_picture(image, slots, grid=(2, 3), dropped=[True] * 6).tobytes() != expected.tobytes()


@pytest.mark.parametrize("columns", [7, 13, 14, 21, 32])
def test_neighboring_groups_have_colors_far_apart(columns: int) -> None:
    colors = np.array([[group_color(row, column) for column in range(columns)] for row in range(columns)], float)
    for here, there in ((colors[1:], colors[:-1]), (colors[:, 1:], colors[:, :-1])):
        assert np.linalg.norm(here - there, axis=-1).min() > 90  # 442 lies between black and white


@pytest.mark.parametrize(("rows", "columns", "patch"), [(3, 5, 8), (5, 2, 14), (1, 7, 32)])
def test_oblong_grids_and_other_patch_sizes(rows: int, columns: int, patch: int) -> None:
    image = make_image(rows, columns, patch=patch)
    slots = np.arange(rows * columns)
    slots[-1] = slots[0]
    picture = fused_picture(image, slots, grid=(rows, columns), scale=2)
    assert picture.size == (2 * columns * patch, 2 * rows * patch)
    first, last = (middle(picture, i, columns=columns, side=2 * patch) for i in (0, rows * columns - 1))
    assert first == last


def test_slots_that_do_not_fit_the_grid_are_refused() -> None:
    with pytest.raises(MctfError, match="one slot for each of 2x3 patches"):
        fused_picture(make_image(2, 3), np.arange(7), grid=(2, 3))
    with pytest.raises(MctfError, match=r"one dropped flag for each of 2x3 patches, got shape \(5,\)"):
        fused_picture(make_image(2, 3), ALONE, grid=(2, 3), dropped=[True] * 5)


@pytest.mark.parametrize(
    ("patches", "size", "grid"), [(196, (224, 224), (14, 14)), (60, (96, 160), (6, 10)), (1369, (518, 518), (37, 37))]
)
def test_the_grid_follows_from_the_number_of_patches(
    patches: int, size: tuple[int, int], grid: tuple[int, int]
) -> None:
    assert patch_grid(patches, height=size[0], width=size[1]) == grid


@pytest.mark.parametrize("patches", [0, 197])
def test_patches_that_form_no_grid_are_refused(patches: int) -> None:
    with pytest.raises(MctfError, match="no grid"):
        patch_grid(patches, height=224, width=224)


def test_a_sheet_holds_every_picture_with_ink_below_it() -> None:
    red, blue = (Image.new("RGB", (120, 80), color) for color in ("red", "blue"))
    sheet = np.asarray(
        make_sheet([[Panel(red, "one"), Panel(blue, "two")], [Panel(blue, "three"), Panel(red, "four")]])
    )
    for color in ((255, 0, 0), (0, 0, 255)):
        assert (sheet == color).all(axis=-1).sum() == 2 * 120 * 80
    dark = (sheet < 120).all(axis=-1)
    assert dark.any(), "captions"
    paper = (sheet == 255).all(axis=-1)
    assert paper[0].all()
    assert paper[-1].all()
    assert paper[:, 0].all()
    assert paper[:, -1].all()


def test_captions_shrink_to_the_width_of_their_picture() -> None:
    picture = Image.new("RGB", (100, 50), "red")
    short = make_sheet([[Panel(picture, "a")]])
    long = np.asarray(make_sheet([[Panel(picture, "block 11: 123 tokens")]]))
    assert long.shape[1] == short.width
    assert (long[:, :3] == 255).all()


@pytest.mark.parametrize("legend", ["what it means", "what it means " * 4])
def test_a_legend_lies_below_everything_within_the_sheet(legend: str) -> None:
    rows = [[Panel(Image.new("RGB", (200, 80), "red"), "one")]]
    without, sheet = np.asarray(make_sheet(rows)), np.asarray(make_sheet(rows, legend=legend))
    assert sheet.shape[1] == without.shape[1]
    red = np.flatnonzero((sheet == (255, 0, 0)).all(axis=-1).any(axis=1))
    rows_with_ink = np.flatnonzero((sheet[red[-1] + 1 :] < 120).all(axis=-1).any(axis=1))
    assert (np.diff(rows_with_ink) > 2).any(), "a caption, a gap, and the legend"
    for edge in (sheet[0], sheet[-1], sheet[:, :3], sheet[:, -3:]):
        assert (edge == 255).all()


def test_a_sheet_without_a_legend_has_no_room_for_one() -> None:
    rows = [[Panel(Image.new("RGB", (200, 80), "red"), "one")]]
    assert make_sheet(rows, legend="").tobytes() == make_sheet(rows).tobytes()
    assert make_sheet(rows).height < make_sheet(rows, legend="more").height


def test_an_empty_sheet_is_refused() -> None:
    with pytest.raises(MctfError, match="at least one picture"):
        make_sheet([])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    target = tmp_path / "picture.png"
    target.write_bytes(b"old")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(MctfError, match="No space left"):
        write_png(Image.new("RGB", (4, 4)), target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
