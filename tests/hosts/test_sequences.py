"""Padded and packed images: no token attends to another image or to padding, or is fused with it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mctf
from helpers.families.hf_towers import patchify
from helpers.models import make as make_timm
from helpers.refusals import assert_refused
from hosts.test_towers import inputs, make

pytest.importorskip("transformers", reason="the extra hf is not installed")

GRIDS = ((4, 5), (6, 6), (5, 4), (3, 7))  # rows and columns of patches; 20, 36, 20 and 21 of them
METHODS = ("mctf", "mctf_exact", "ward", "tome", "pitome", "random")


def pictures(patch: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = [(3, rows * patch, columns * patch) for rows, columns in GRIDS]
    return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]


def siglip2_inputs(images: list[Tensor], *, length: int, fill: float = 0.0) -> dict[str, Tensor]:
    """Patches of images, padded to that many."""
    patches = torch.full((len(images), length, 192), fill, dtype=torch.float64)
    mask = torch.zeros(len(images), length, dtype=torch.long)
    for row, image in enumerate(images):
        own = patchify(image[None], 8)[0]
        patches[row, : len(own)], mask[row, : len(own)] = own, 1
    grids = torch.tensor([[image.shape[1] // 8, image.shape[2] // 8] for image in images])
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": grids}


def idefics3_inputs(images: list[Tensor], *, fill: float = 0.0, side: int = 56) -> dict[str, Tensor]:
    """Images in the corner of a square, with a mask of their patches."""
    pixels = torch.full((len(images), 3, side, side), fill, dtype=torch.float64)
    mask = torch.zeros(len(images), side // 8, side // 8, dtype=torch.bool)
    for row, image in enumerate(images):
        _, height, width = image.shape
        pixels[row, :, :height, :width], mask[row, : height // 8, : width // 8] = image, True
    return {"pixel_values": pixels, "patch_attention_mask": mask}


def real_tokens(name: str, model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """The tokens of each image without its padding."""
    output = model(**given).last_hidden_state
    mask = given["patch_attention_mask" if name != "siglip2" else "pixel_attention_mask"].flatten(1).bool()
    return [row[real] for row, real in zip(output, mask, strict=True)]


def padded(name: str, images: list[Tensor], fill: float = 0.0) -> dict[str, Tensor]:
    return siglip2_inputs(images, length=40, fill=fill) if name == "siglip2" else idefics3_inputs(images, fill=fill)


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6, rtol=1e-6) for a, b in zip(one, other, strict=True))


class TestPadding:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", ["siglip2", "idefics3", "smolvlm"])
    @torch.no_grad()
    def test_with_r_0_it_is_the_unfused_model(self, name: str, attention: str) -> None:
        model = make(name, attention=attention).double()
        given = padded(name, pictures())
        plain = model(**given).last_hidden_state
        mctf.fuse(model, r=0)
        assert torch.equal(model(**given).last_hidden_state, plain)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("name", ["siglip2", "idefics3"])
    @torch.no_grad()
    def test_an_image_is_fused_as_without_padding(self, name: str, method: str) -> None:
        model = make(name).double()
        images = pictures()
        plain = real_tokens(name, model, padded(name, images))
        mctf.fuse(model, method, r=4)
        together = real_tokens(name, model, padded(name, images))
        assert [len(each) for each in together] == [rows * columns for rows, columns in GRIDS]
        assert not close(together, plain)
        torch.manual_seed(0)
        if name == "siglip2":  # no padding at all
            alone = [
                real_tokens(name, model, siglip2_inputs([each], length=each[0].numel() // 64))[0] for each in images
            ]
        else:
            alone = [
                model(pixel_values=image[None], patch_attention_mask=torch.ones(1, rows, columns).bool())[0][0]
                for image, (rows, columns) in zip(images, GRIDS, strict=True)
            ]
        if method != "random":  # it draws other tokens for another batch
            assert close(together, alone)

    @pytest.mark.parametrize("name", ["siglip2", "idefics3"])
    @torch.no_grad()
    def test_what_lies_in_the_padding_does_not_matter(self, name: str) -> None:
        model = mctf.fuse(make(name).double(), r=4)
        empty = real_tokens(name, model, padded(name, pictures()))
        assert close(empty, real_tokens(name, model, padded(name, pictures(), fill=7.0)))

    @torch.no_grad()
    def test_the_head_sees_no_padding(self) -> None:
        model = mctf.fuse(make("siglip2").double(), r=4)
        images = pictures()
        together = model(**siglip2_inputs(images, length=40)).pooler_output
        alone = [model(**siglip2_inputs([each], length=each[0].numel() // 64)).pooler_output for each in images]
        assert close(list(together), [each[0] for each in alone])

    @pytest.mark.parametrize("name", ["siglip2", "idefics3"])
    @torch.no_grad()
    def test_layers_before_a_fusion_are_the_unfused_ones_and_padding_attends_on(self, name: str) -> None:
        """In the last layer all tokens of an image are still there, so its padding reads what it read unfused."""
        model = make(name).double()
        given = padded(name, pictures())
        mask = given["patch_attention_mask" if name != "siglip2" else "pixel_attention_mask"].flatten(1).bool()
        plain = model(**given, output_hidden_states=True).hidden_states
        mctf.fuse(model, r=[0, 0, 0, 6])
        fused = model(**given, output_hidden_states=True).hidden_states
        assert close(list(fused[:4]), list(plain[:4]))
        assert close([fused[4][~mask]], [plain[4][~mask]])
        assert not close([fused[4][mask]], [plain[4][mask]])

    @torch.no_grad()
    def test_a_ratio_is_of_the_real_tokens(self) -> None:
        model = mctf.fuse(make("siglip2").double(), r=0.25)
        images = pictures()[:1]
        with mctf.trace(model) as trace:
            model(**siglip2_inputs(images, length=40))
        assert trace.token_counts == [20, 15, 12, 10]
        assert trace.source_map().shape == (1, 20)

    def test_gradients_are_those_of_the_images_alone(self) -> None:
        model = mctf.fuse(make("siglip2").double(), r=4)
        gradients = []
        for checkpointed in (False, True):
            if checkpointed:
                model.train().gradient_checkpointing_enable({"use_reentrant": False})
            given = siglip2_inputs(pictures(), length=40)
            given["pixel_values"].requires_grad_()
            model(**given).pooler_output.sum().backward()
            gradients.append(given["pixel_values"].grad)
            assert not gradients[-1][0, 20:].any()
            assert gradients[-1][0, :20].any()
        torch.testing.assert_close(*gradients)


def naflex_inputs(images: list[Tensor], *, length: int, fill: float = 0.0) -> dict[str, Tensor]:
    """Patches of images with their coordinates, padded to that many."""
    patches = torch.full((len(images), length, 192), fill, dtype=torch.float64)
    places, valid = torch.zeros(len(images), length, 2, dtype=torch.long), torch.zeros(len(images), length).bool()
    for row, image in enumerate(images):
        grid = (image.shape[1] // 8, image.shape[2] // 8)
        own = patchify(image[None], 8)[0]
        patches[row, : len(own)], valid[row, : len(own)] = own, True
        places[row, : len(own)] = torch.cartesian_prod(*map(torch.arange, grid))
    return {"patches": patches, "patch_coord": places, "patch_valid": valid}


@pytest.mark.parametrize("features", [{}, {"name": "naflex_rope"}, {"use_key_only_attn_mask": False}], ids=str)
@pytest.mark.parametrize("method", METHODS[:4])
@torch.no_grad()
def test_timms_naflex_fuses_an_image_as_without_padding(features: dict[str, Any], method: str) -> None:
    name = features.get("name", "naflex")
    more = {feature: value for feature, value in features.items() if feature != "name"}
    model = make_timm(name, embed_proj_type="linear", **more).double()
    images = pictures()
    given = naflex_inputs(images, length=40)
    plain = model(given)
    mctf.fuse(model, method, r=0)
    assert torch.equal(model(given), plain)
    mctf.set_r(model, 4)
    together = model(given)
    assert not torch.allclose(together, plain, atol=1e-4)
    assert torch.allclose(model(naflex_inputs(images, length=40, fill=7.0)), together, atol=1e-6)
    alone = [model(naflex_inputs([each], length=each[0].numel() // 64)) for each in images]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)  # rotary tables are in float32


class TestPacking:
    @torch.no_grad()
    def test_pixtral_fuses_each_image_by_itself(self) -> None:
        model = make("pixtral").double()
        images = pictures()
        pixels = torch.zeros(4, 3, 56, 56, dtype=torch.float64)
        for row, image in enumerate(images):
            pixels[row, :, : image.shape[1], : image.shape[2]] = image
        given = {"pixel_values": pixels, "image_sizes": torch.tensor([each.shape[1:] for each in images])}
        plain = model(**given).last_hidden_state
        mctf.fuse(model, r=0)
        assert torch.equal(model(**given).last_hidden_state, plain)
        mctf.set_r(model, 4)
        together = model(**given).last_hidden_state
        assert together.shape == plain.shape == (1, 97, 32)
        assert not torch.allclose(together, plain)
        alone = [model(image[None]).last_hidden_state for image in images]
        torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("method", METHODS[:4])
    @pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
    @torch.no_grad()
    def test_qwen_fuses_each_image_and_frame_by_itself(self, name: str, method: str) -> None:
        model = make(name).double()
        grids = torch.tensor([[1, 4, 6], [2, 6, 4], [1, 6, 6]])  # the second one has two frames
        counts = [24, 48, 36]
        patches = torch.randn(108, 96, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        plain = model(patches, grids)
        mctf.fuse(model, method, r=0)
        assert torch.equal(model(patches, grids).pooler_output, plain.pooler_output)
        mctf.set_r(model, 4)
        together = model(patches, grids)
        assert together.pooler_output.shape == plain.pooler_output.shape == (27, 24)
        assert not torch.allclose(together.pooler_output, plain.pooler_output)
        alone = [model(part, grid[None]) for part, grid in zip(patches.split(counts), grids, strict=True)]
        for field in ("pooler_output", "last_hidden_state"):
            parts = torch.cat([getattr(each, field) for each in alone])
            torch.testing.assert_close(getattr(together, field), parts, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("name", ["pixtral", "qwen3_vl"])
    @torch.no_grad()
    def test_layers_before_a_fusion_are_the_unfused_ones(self, name: str) -> None:
        """Up to there images run as a batch, and give what the packed sequence gives."""
        model = make(name).double()
        given = inputs(model)
        plain = model(**given, output_hidden_states=True).hidden_states
        mctf.fuse(model, r=[0, 0, 0, 6])
        fused = model(**given, output_hidden_states=True).hidden_states
        for one, other in zip(fused[:-1], plain[:-1], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)  # rotary tables are in float32
        assert not torch.allclose(fused[-1], plain[-1], atol=1e-3)

    def test_gradients_with_and_without_checkpointing_agree(self) -> None:
        model = mctf.fuse(make("pixtral").double(), r=4)
        given, gradients = inputs(model), []
        for checkpointed in (False, True):
            if checkpointed:
                model.train().gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad()
            model(**given).last_hidden_state.square().sum().backward()
            gradients.append(model.patch_conv.weight.grad.clone())
        assert gradients[0].any()
        torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_what_a_hook_adds_between_layers_is_kept() -> None:
    model = mctf.fuse(make("siglip2").double(), r=4)
    images, plain = pictures(), siglip2_inputs(pictures(), length=40)
    before = model(**plain).pooler_output
    model.encoder.layers[1].register_forward_hook(lambda module, args, output: 2 * output)
    together = model(**plain).pooler_output
    assert not torch.allclose(together, before, atol=1e-3)
    alone = [model(**siglip2_inputs([each], length=each[0].numel() // 64)).pooler_output for each in images]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-6)


class TestRefusals:
    @torch.no_grad()
    def test_a_trace_of_images_with_different_numbers_of_patches(self) -> None:
        model = mctf.fuse(make("siglip2").double(), r=4)
        given = siglip2_inputs(pictures(), length=40)
        with mctf.trace(model):
            assert_refused(model, "these have 3 different numbers: trace images of one size", lambda: model(**given))

    @torch.no_grad()
    def test_an_image_of_padding_alone(self) -> None:
        model = mctf.fuse(make("siglip2").double(), r=4)
        given = siglip2_inputs(pictures(), length=40)
        given["pixel_attention_mask"][2] = 0
        assert_refused(model, "an image of the batch is padding alone: leave it out", lambda: model(**given))

    @torch.no_grad()
    def test_a_mask_that_is_not_one_of_padding(self) -> None:
        model = mctf.fuse(make("idefics3").double(), r=4)
        layers = iter(model.encoder.layers)
        mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
        x = torch.randn(1, 20, 32, dtype=torch.float64)
        assert_refused(model, "takes no attention mask but one of padding", lambda: next(layers)(x, mask))

    @torch.no_grad()
    def test_packed_images_without_their_limits(self) -> None:
        model = mctf.fuse(make("pixtral").double(), r=4)
        x, table = torch.randn(1, 20, 32, dtype=torch.float64), torch.zeros(20, 16, dtype=torch.float64)
        for mask in (None, torch.ones(1, 1, 20, 20).tril().log()):
            layers = iter(model.transformer.layers)
            text = "needs the mask that separates its images: load it with attn_implementation='sdpa' or 'eager'"
            assert_refused(model, text, lambda: next(layers)(x, mask, position_embeddings=(table, table)))  # noqa: B023

    @torch.no_grad()
    def test_a_traced_graph(self) -> None:
        model = mctf.fuse(make("siglip2").double(), r=4).requires_grad_(False)
        given = siglip2_inputs(pictures(), length=40)
        patches = given.pop("pixel_values")
        with pytest.raises(mctf.MctfError, match="which a traced or exported graph cannot follow"):
            torch.jit.trace(lambda patches: model(patches, **given).pooler_output, patches)
        with pytest.raises(mctf.MctfError, match="which a traced or exported graph cannot follow"):
            torch.export.export(model, (patches,), given, strict=False)
