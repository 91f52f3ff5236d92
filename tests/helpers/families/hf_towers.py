"""Tiny towers of transformers beyond ViT's relatives: other names, one product for q, k and v, videos, spectrograms,
images that are padded or packed into one sequence.

They have their own tests (tests/hosts/test_towers.py), which are light: many of them differ in names alone.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from helpers.families.hf import Hf

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 48}
IMAGE = {"image_size": 48, "patch_size": 8}
VIDEO = {"image_size": 32, "num_frames": 4}
QWEN = {"depth": 4, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
CLASSES = 10


def build(kind: str, config: str, attention: str | None = None, **features: Any) -> Any:
    """A model of this class; sizes are those above where the features give none."""
    import transformers

    settings = getattr(transformers, config)(**{**SIZES, **features})
    if attention is not None:
        settings._attn_implementation = attention
    if not hasattr(transformers, kind):  # a tower that only larger models name
        return getattr(import_module(type(settings).__module__.replace("configuration", "modeling")), kind)(settings)
    return getattr(transformers, kind)(settings)


def image(kind: str, config: str, **features: Any) -> Callable[..., nn.Module]:
    return partial(build, kind, config, **{**IMAGE, **features})


def qwen(kind: str, config: str, **features: Any) -> Callable[..., nn.Module]:
    return partial(build, kind, config, **{**QWEN, **features})


class HfTowers(Hf):
    title = "Hugging Face transformers, more towers"
    models = (
        "InternVL, Idefics3, SmolVLM, Pixtral, Qwen2-VL, Qwen3-VL, BLIP, BLIP-2, AIMv2, I-JEPA, ViT-MSN, Data2Vec, "
        "OWL-ViT, OWLv2, CLIPSeg, DPT and ViTPose on their own ViT, VideoMAE, ViViT, AST, SigLIP 2"
    )
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "internvl": image(
            "InternVLVisionModel", "InternVLVisionConfig", image_size=[48, 48], patch_size=[8, 8], use_qk_norm=True,
            norm_type="layer_norm", use_absolute_position_embeddings=True, attention_bias=True,
        ),
        "idefics3": image("Idefics3VisionTransformer", "Idefics3VisionConfig"),
        "smolvlm": image("SmolVLMVisionTransformer", "SmolVLMVisionConfig", attention="eager"),
        "pixtral": image("PixtralVisionModel", "PixtralVisionConfig"),
        "qwen2_vl": qwen(
            "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", embed_dim=32, hidden_size=24, mlp_ratio=2
        ),
        "qwen3_vl": qwen(
            "Qwen3VLVisionModel", "Qwen3VLVisionConfig", out_hidden_size=24, num_position_embeddings=36,
            deepstack_visual_indexes=[1],
        ),
        "blip": image("BlipVisionModel", "BlipVisionConfig"),
        "blip_2": image("Blip2VisionModel", "Blip2VisionConfig", qkv_bias=True),
        "aimv2": image("Aimv2VisionModel", "Aimv2VisionConfig", qkv_bias=True),
        "ijepa": image("IJepaForImageClassification", "IJepaConfig", num_labels=CLASSES),
        "vit_msn": image("ViTMSNForImageClassification", "ViTMSNConfig", num_labels=CLASSES),
        "data2vec": image(
            "Data2VecVisionForImageClassification", "Data2VecVisionConfig", num_labels=CLASSES,
            use_relative_position_bias=True, use_shared_relative_position_bias=True, drop_path_rate=0.0,
        ),
        "owlvit": image("OwlViTVisionModel", "OwlViTVisionConfig"),
        "owlv2": image("Owlv2VisionModel", "Owlv2VisionConfig"),
        "clipseg": image("CLIPSegVisionModel", "CLIPSegVisionConfig"),
        "dpt": image(
            "DPTForSemanticSegmentation", "DPTConfig", num_labels=CLASSES, backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=16, use_auxiliary_head=False, readout_type="project",
        ),
        "vitpose": image("VitPoseBackbone", "VitPoseBackboneConfig", image_size=[64, 48], patch_size=[8, 8]),
        "vitpose_experts": image(
            "VitPoseBackbone", "VitPoseBackboneConfig", image_size=[64, 48], patch_size=[8, 8], num_experts=3,
            part_features=8,
        ),
        "videomae": partial(
            build, "VideoMAEForVideoClassification", "VideoMAEConfig", **VIDEO, patch_size=8, tubelet_size=2,
            num_labels=CLASSES,
        ),
        "vivit": partial(
            build, "VivitForVideoClassification", "VivitConfig", **VIDEO, tubelet_size=[2, 8, 8], num_labels=CLASSES
        ),
        "ast": partial(
            build, "ASTForAudioClassification", "ASTConfig", max_length=40, num_mel_bins=32, patch_size=8,
            frequency_stride=6, time_stride=6, num_labels=CLASSES,
        ),
        "siglip2": partial(build, "Siglip2VisionModel", "Siglip2VisionConfig", num_patches=36, patch_size=8),
    }  # fmt: skip
    chosen = ()

    def given(self, model: Any, images: Tensor) -> dict[str, Any]:
        """The inputs of a model for images: patches, frames or spectrograms where it takes those."""
        config, batch = getattr(model, "_orig_mod", model).config, len(images)
        parameters = inspect.signature(type(model).forward).parameters
        if "grid_thw" in parameters:
            grid = images.shape[2] // config.patch_size
            return {"hidden_states": qwen_patches(images, config), "grid_thw": torch.tensor([[1, grid, grid]] * batch)}
        if "spatial_shapes" in parameters:
            side = images.shape[2] // config.patch_size
            return {
                "pixel_values": patchify(images, config.patch_size),
                "pixel_attention_mask": torch.ones(batch, side * side),
                "spatial_shapes": torch.tensor([[side, side]] * batch),
            }
        if "input_values" in parameters:
            return {"input_values": images.mean(dim=1)}
        if hasattr(config, "num_frames"):
            shifts = [images.roll(frame, dims=3) for frame in range(config.num_frames)]
            return {"pixel_values": torch.stack(shifts, dim=1)}
        if getattr(config, "num_experts", 1) > 1:
            return {"pixel_values": images, "dataset_index": torch.arange(batch) % config.num_experts}
        return {"pixel_values": images}

    def image_size(self, model: Any) -> tuple[int, int]:
        from mctf.hosts.hf_cost import default_size

        config = getattr(model, "_orig_mod", model).config
        return (24, 24) if hasattr(config, "temporal_patch_size") else default_size(config)


def patchify(images: Tensor, patch: int) -> Tensor:
    """B 3 H W -> B (h w) (p q 3)."""
    rows = images.unfold(2, patch, patch).unfold(3, patch, patch)  # B 3 h w p q
    return rows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


def qwen_patches(images: Tensor, config: Any) -> Tensor:
    """B 3 H W -> (B h w) (3 t p q), in blocks of patches that are merged; each image twice, as a still."""
    patch, merge = config.patch_size, config.spatial_merge_size
    rows = images.unfold(2, patch, patch).unfold(3, patch, patch)  # B 3 h w p q
    rows = rows.unflatten(2, (-1, merge)).unflatten(4, (-1, merge))  # B 3 h m w n p q
    rows = rows.permute(0, 2, 4, 3, 5, 1, 6, 7)  # B h w m n 3 p q
    rows = rows.unsqueeze(6).expand(*rows.shape[:6], config.temporal_patch_size, patch, patch)
    return rows.flatten(5).flatten(0, 4)
