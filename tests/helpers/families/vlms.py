"""Tiny vision-language models of transformers, with a prompt for two images.

The prompt of an image holds one placeholder per token that the language model gets from it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.families.hf_towers import IMAGE, QWEN, SIZES, HfTowers, patchify, qwen_patches
from helpers.models import drawn

PLACE = 90  # the token that stands for an image
TEXT = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 32, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 98, "eos_token_id": 99},
    "max_position_embeddings": 256,
}
LLAMA = {"model_type": "llama", **TEXT}
ROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4, "mrope_interleaved": True}


def prompt(places: int) -> Tensor:
    """Two prompts with that many placeholders each."""
    words = torch.tensor([[98, 5, 17], [98, 9, 3]])
    return torch.cat([words, torch.full((2, places), PLACE), words.flip(1).clamp(max=80)], dim=1)


def of_llama(kind: str, vision: dict[str, Any], **features: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")
    name = f"{kind}ForConditionalGeneration"
    settings = config(vision_config={**SIZES, **vision}, text_config=LLAMA, **features)
    return getattr(transformers, name)(settings)


def internvl(images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    vision = {"model_type": "internvl_vision", "image_size": [48, 48], "patch_size": [8, 8]}
    model = of_llama("InternVL", vision, image_token_id=PLACE, downsample_ratio=0.5)
    return model, {"input_ids": prompt(9), "pixel_values": images}


def idefics3(images: Tensor, kind: str = "Idefics3") -> tuple[Any, dict[str, Tensor]]:
    model = of_llama(kind, IMAGE, image_token_id=PLACE, scale_factor=2)
    return model, {"input_ids": prompt(9), "pixel_values": images[:, None]}


def smolvlm(images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    return idefics3(images, "SmolVLM")


def llava_pixtral(images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    vision = {"model_type": "pixtral", **IMAGE}
    model = of_llama(
        "Llava", vision, image_token_index=PLACE, vision_feature_layer=-1, vision_feature_select_strategy="full"
    )
    return model, {"input_ids": prompt(36), "pixel_values": images, "image_sizes": torch.tensor([[48, 48]] * 2)}


def qwen2_vl(images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    return qwen(images, "Qwen2VL", {"embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2})


def qwen3_vl(images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    vision = {"out_hidden_size": 24, "num_position_embeddings": 36, "deepstack_visual_indexes": [1]}
    return qwen(images, "Qwen3VL", {**SIZES, **vision}, head_dim=12)


def qwen(images: Tensor, kind: str, vision: dict[str, Any], **text: Any) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(
        vision_config={**QWEN, **vision},
        text_config={**TEXT, "rope_parameters": ROPE, **text},
        image_token_id=PLACE,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(settings)
    images = images[:, :, :24, :24]
    ids = prompt(9)
    given = {
        "pixel_values": qwen_patches(images, settings.vision_config),
        "image_grid_thw": torch.tensor([[1, 6, 6]] * 2),
        "mm_token_type_ids": (ids == PLACE).int(),
    }
    return model, {"input_ids": ids, **given}


def blip(images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    text = {**TEXT, "encoder_hidden_size": 32, "is_decoder": True, "sep_token_id": 99}
    settings = transformers.BlipConfig(vision_config={**SIZES, **IMAGE}, text_config=text, projection_dim=16)
    return transformers.BlipForConditionalGeneration(settings), {"pixel_values": images}


def blip_2(images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    queries = {"encoder_hidden_size": 32, "hidden_size": 24, "intermediate_size": 32, "vocab_size": 100}
    settings = transformers.Blip2Config(
        vision_config={**SIZES, **IMAGE},
        qformer_config={**queries, "num_hidden_layers": 2, "num_attention_heads": 2},
        text_config=LLAMA,
        num_query_tokens=4,
        image_token_index=PLACE,
    )
    return transformers.Blip2ForConditionalGeneration(settings), {"input_ids": prompt(4), "pixel_values": images}


VLMS: dict[str, Callable[[Tensor], tuple[Any, dict[str, Tensor]]]] = {
    each.__name__: each for each in (internvl, idefics3, smolvlm, llava_pixtral, qwen2_vl, qwen3_vl, blip, blip_2)
}


def make_vlm(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The model of this name and its inputs for two images."""
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(3))
    model, given = VLMS[name](images)
    return drawn(model, HfTowers()), given


__all__ = ["VLMS", "make_vlm", "patchify"]
