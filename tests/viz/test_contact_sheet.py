"""Pictures of a fused model: every panel shows its own image after its own block."""

import numpy as np
import pytest
import torch
from PIL import Image

import mctf
from mctf.data import Preprocessing
from mctf.errors import MctfError
from mctf.models.loading import create
from mctf.viz.contact_sheet import Panel, choose_blocks, contact_sheet, make_sheet
from mctf.viz.fused_patches import fused_picture, to_image

SIZE = (96, 160)  # 6 x 10 patches


def prepared(**features: object) -> tuple[torch.nn.Module, Preprocessing, list[torch.Tensor]]:
    model = create("test_vit", image_size=SIZE, **features)
    preprocessing = Preprocessing.of(model)
    generator = np.random.default_rng(0)
    images = [Image.fromarray(generator.integers(0, 256, (120, 200, 3), dtype=np.uint8)) for _ in range(2)]
    return model, preprocessing, [preprocessing.transform()(image) for image in images]


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_every_panel_shows_its_own_image_after_its_own_block(prefix: int) -> None:
    kinds = {0: {"class_token": False, "global_pool": "avg"}, 1: {}, 5: {"reg_tokens": 4}}
    model, preprocessing, inputs = prepared(**kinds[prefix])
    mctf.fuse(model, r=6)
    rows = []
    for tensor in inputs:
        with torch.inference_mode(), mctf.trace(model) as trace:
            model(tensor[None])
        seen = to_image(tensor, preprocessing)
        panels = [Panel(seen, f"input: {60 + prefix} tokens")]
        for block in (1, 5):
            slots = trace.source_map(block)[0, prefix:]
            caption = f"block {block}: {60 + prefix - 6 * block} tokens"
            panels.append(Panel(fused_picture(seen, slots, grid=(6, 10), scale=1), caption))
        rows.append(panels)
    expected = make_sheet(rows)
    assert contact_sheet(model, inputs, preprocessing, blocks=(1, 5), scale=1).tobytes() == expected.tobytes()


def test_dropped_patches_are_drawn_counted_and_explained() -> None:
    """Every block but the first drops six: the last ones of the image, row by row."""
    model, preprocessing, inputs = prepared()
    mctf.fuse(model, "free_drop", r=6)
    rows = []
    for image in (to_image(tensor, preprocessing) for tensor in inputs):
        whole = fused_picture(image, range(60), grid=(6, 10), scale=1)
        half = fused_picture(image, range(60), grid=(6, 10), dropped=np.arange(60) >= 30, scale=1)
        captions = ("input: 61 tokens", "block 0: 61 tokens", "block 5: 31 tokens, 30 dropped")
        rows.append([Panel(*each) for each in zip((image, whole, half), captions, strict=True)])
    expected = make_sheet(rows, legend="striped gray: dropped, input of no later block")
    assert contact_sheet(model, inputs, preprocessing, blocks=(0, 5), scale=1).tobytes() == expected.tobytes()


def test_a_sheet_without_dropped_patches_has_no_legend() -> None:
    model, preprocessing, inputs = prepared()
    mctf.fuse(model, "free_drop", r=6)
    early, late = (contact_sheet(model, inputs, preprocessing, blocks=(block,), scale=1) for block in (0, 1))
    assert early.width == late.width
    assert early.height < late.height


@pytest.mark.parametrize(("size", "scale"), [((160, 320), 3), ((96, 160), 5), ((64, 64), 7)])
def test_small_images_are_enlarged_more(size: tuple[int, int], scale: int) -> None:
    model = mctf.fuse(create("test_vit", image_size=size), r=2)
    inputs, preprocessing = [torch.zeros(3, *size)], Preprocessing.of(model)
    expected = contact_sheet(model, inputs, preprocessing, blocks=(1,), scale=scale)
    assert contact_sheet(model, inputs, preprocessing, blocks=(1,)).size == expected.size


def test_the_shown_image_is_the_model_input() -> None:
    _, preprocessing, (tensor, _) = prepared()
    shown = np.asarray(to_image(tensor, preprocessing)) / 255
    seen = (shown - preprocessing.mean) / preprocessing.std
    step = 1 / 255 / min(preprocessing.std)  # of 8 bits
    assert np.abs(seen.transpose(2, 0, 1) - tensor.numpy()).max() < step


@pytest.mark.parametrize(("depth", "blocks"), [(12, (3, 6, 9, 11)), (6, (2, 3, 4, 5)), (1, (0,))])
def test_blocks_by_default(depth: int, blocks: tuple[int, ...]) -> None:
    assert choose_blocks(None, depth) == blocks


def test_blocks_keep_the_given_order() -> None:
    assert choose_blocks((5, 1), 6) == (5, 1)
    with pytest.raises(MctfError, match="no block 6"):
        choose_blocks((5, 6), 6)


def test_a_model_that_is_not_fused_is_refused() -> None:
    model, preprocessing, inputs = prepared()
    with pytest.raises(MctfError, match="not fused"):
        contact_sheet(model, inputs, preprocessing, blocks=(1,))
