"""Tiny vision models of transformers, one for each way its layers differ: tokens in front, positions, scales, heads."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from helpers.families.base import CLASSES, DEPTH, Family
from helpers.families.hf_blocks import Biased, Layer, Rotary, beit_pairs
from helpers.reference_blocks import Pieces

SIZES = {"hidden_size": 48, "num_attention_heads": 3, "image_size": 64, "patch_size": 8}
MLP = {"intermediate_size": 96}
BEIT = {**MLP, "use_relative_position_bias": True, "drop_path_rate": 0.0}
DINOV3 = {**MLP, "num_register_tokens": 4, "key_bias": True, "use_gated_mlp": True, "pos_embed_rescale": None}
INTERNVL = {**MLP, "image_size": [64, 64], "patch_size": [8, 8], "use_qk_norm": True, "use_mean_pooling": False}
TOWERS = ("vit", "deit", "beit", "dinov2", "vision_model")
NORMS = ("layernorm", "norm", "post_layernorm")


def build(
    kind: str, config: str, *, depth: int = DEPTH, attention: str = "sdpa", masks: bool = False, **features: Any
) -> Any:
    """A model of this class; its config takes the features. masks: keep the token that stands for masked patches."""
    import transformers

    settings = getattr(transformers, config)(**{**SIZES, "num_hidden_layers": depth, **features})
    settings._attn_implementation = attention
    model = getattr(transformers, kind)(settings)
    if not masks:
        Hf.tower(model).embeddings.mask_token = None  # nothing reads it, so it would not learn
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # ViTMAE's positions too
    return model


def _classifier(kind: str, config: str, **features: Any) -> Callable[..., nn.Module]:
    return partial(build, kind, config, num_labels=CLASSES, **features)


class Hf(Family):
    title = "Hugging Face transformers"
    models = "ViT, DeiT, BEiT, DINOv2 with and without registers, DINOv3, CLIP, SigLIP, BLIP-2, InternVL, ViTMAE"
    classes = ("PreTrainedModel",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "hf_vit": _classifier("ViTForImageClassification", "ViTConfig", **MLP),
        "hf_deit": _classifier("DeiTForImageClassificationWithTeacher", "DeiTConfig", **MLP, qkv_bias=False),
        "hf_beit": _classifier("BeitForImageClassification", "BeitConfig", **BEIT),
        "hf_beit_shared": _classifier(
            "BeitForImageClassification",
            "BeitConfig",
            **BEIT,
            use_shared_relative_position_bias=True,
            use_absolute_position_embeddings=True,
            use_mean_pooling=False,
            layer_scale_init_value=0.0,
            attention="eager",
        ),
        "hf_dinov2": _classifier("Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2),
        "hf_dinov2_registers": partial(
            build, "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", mlp_ratio=2, use_swiglu_ffn=True
        ),
        "hf_dinov3": partial(build, "DINOv3ViTModel", "DINOv3ViTConfig", **DINOV3),
        "hf_clip": partial(
            build, "CLIPVisionModelWithProjection", "CLIPVisionConfig", **MLP, projection_dim=32, attention="eager"
        ),
        "hf_siglip": partial(build, "SiglipVisionModel", "SiglipVisionConfig", **MLP),
        "hf_blip_2": partial(build, "Blip2VisionModel", "Blip2VisionConfig", **MLP),
        "hf_internvl": partial(build, "InternVLVisionModel", "InternVLVisionConfig", **INTERNVL),
        "hf_mae": partial(build, "ViTMAEModel", "ViTMAEConfig", **MLP, mask_ratio=0.25),
    }
    chosen = ("hf_vit", "hf_beit_shared", "hf_dinov3")  # one per class of layer operations
    timm = False

    @staticmethod
    def tower(model: Any) -> Any:
        """The part that embeds images and runs the layers."""
        plain = getattr(model, "_orig_mod", model)
        return next((getattr(plain, name) for name in TOWERS if hasattr(plain, name)), plain)

    def container(self, model: Any) -> nn.Module:
        for name in ("layers", "encoder.layer", "encoder.layers", "model.layer", "layer"):
            try:
                return self.tower(model).get_submodule(name)
            except AttributeError:
                continue
        raise LookupError(type(model).__name__)

    def image_size(self, model: Any) -> tuple[int, int]:
        return 64, 64

    def prefix(self, model: Any) -> int:
        embeddings = self.tower(model).embeddings
        registers = getattr(embeddings, "register_tokens", torch.empty(1, 0))
        single = ("cls_token", "class_embedding", "distillation_token")
        return sum(hasattr(embeddings, name) for name in single) + registers.shape[1]

    def tokens(self, model: Any) -> int:
        return self.prefix(model) + (48 if hasattr(model.config, "mask_ratio") else 64)

    def width(self, model: Any) -> int:
        return 48

    def given(self, model: Any, images: Tensor) -> dict[str, Any]:
        """The images, and for ViTMAE the same patches hidden every time."""
        noise = torch.rand(64, generator=torch.Generator().manual_seed(5)).expand(len(images), -1)
        config = getattr(model, "_orig_mod", model).config
        return {"pixel_values": images} | ({"noise": noise} if hasattr(config, "mask_ratio") else {})

    def run(self, model: Any, images: Tensor) -> Tensor:
        output = model(**self.given(model, images))
        for name in ("logits", "image_embeds", "pooler_output"):
            if getattr(output, name, None) is not None:
                return getattr(output, name)
        return output.last_hidden_state[:, 0]

    def features(self, model: Any, images: Tensor) -> Tensor:
        return self.tower(model)(**self.given(model, images)).last_hidden_state

    def embed(self, model: Any, images: Tensor) -> Tensor:
        tower = self.tower(model)
        embedded = tower.embeddings(**self.given(model, images))
        embedded = embedded[0] if isinstance(embedded, tuple) else embedded
        return tower.pre_layrnorm(embedded) if hasattr(tower, "pre_layrnorm") else embedded

    def finish(self, model: Any, tokens: Tensor) -> Tensor:
        tower = self.tower(model)
        if hasattr(tower, "pre_layrnorm"):  # CLIP normalizes the class token only
            return tokens
        return next(getattr(tower, name) for name in NORMS if hasattr(tower, name))(tokens)

    def head(self, model: Any, features: Tensor) -> Tensor:
        first, rest = features[:, 0], features[:, 1:]
        match type(model).__name__:
            case "ViTForImageClassification":
                return model.classifier(first)
            case "DeiTForImageClassificationWithTeacher":
                return (model.cls_classifier(first) + model.distillation_classifier(features[:, 1])) / 2
            case "BeitForImageClassification":
                norm = model.beit.pooler.layernorm
                return model.classifier(first if norm is None else norm(rest.mean(dim=1)))
            case "Dinov2ForImageClassification":
                return model.classifier(torch.cat([first, rest.mean(dim=1)], dim=1))
            case "Blip2VisionModel":
                return self.tower(model).post_layernorm(first)
            case "CLIPVisionModelWithProjection":
                return model.visual_projection(self.tower(model).post_layernorm(first))
            case "SiglipVisionModel":
                return self.tower(model).head(features)
        return first

    def pieces(self, model: Any) -> list[Pieces]:
        tower, layers = self.tower(model), list(self.container(model).children())
        if hasattr(tower, "rope_embeddings"):
            images = torch.zeros(1, 3, 64, 64, dtype=tower.embeddings.cls_token.dtype)
            return [Rotary(layer, tower.rope_embeddings(images), self.prefix(model)) for layer in layers]
        if type(layers[0]).__name__ == "BeitLayer":
            shared = [
                beit_pairs(part) for part in bias_tables(model) if not any(part in layer.modules() for layer in layers)
            ]
            return [Biased(layer, shared) for layer in layers]
        return [Layer(layer) for layer in layers]

    def through_blocks(self, model: Any, tokens: Tensor, *, equal: int) -> Tensor:
        given = self.layer_arguments(model, tokens, equal)
        for layer in self.container(model):
            output = layer(tokens, **given)
            tokens = output[0] if isinstance(output, tuple) else output
        for part in bias_tables(model):
            del part.forward
        return tokens

    def layer_arguments(self, model: Any, tokens: Tensor, equal: int) -> dict[str, Any]:
        """Arguments of a layer for 48 patches in runs of equal ones; BEiT's tables are those of these patches."""
        kind = type(next(self.container(model).children()))
        names = list(inspect.signature(kind.forward).parameters.values())[2:]
        given = {each.name: None for each in names if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
        if kind.__name__ == "DINOv3ViTLayer":
            angles = torch.randn(48 // equal, 16, generator=torch.Generator().manual_seed(11))
            angles = angles[:, :8].repeat(1, 2).repeat_interleave(equal, dim=0).to(tokens.dtype)
            given["position_embeddings"] = angles.cos(), angles.sin()
        if kind.__name__ == "BeitLayer":
            positions = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(48) // equal])
            for part in bias_tables(model):
                pairs = beit_pairs(part)[:, positions][:, :, positions][None]
                part.forward = lambda *_, pairs=pairs, **__: pairs
            given["resolution"] = (48, 64)
            shared = getattr(self.tower(model), "shared_position_bias", None)
            if shared is not None:
                given["attention_mask"] = shared()
        return given

    def uncounted(self, model: Any) -> int:
        """BEiT resamples its tables for the size of the images: fvcore takes 4 for an element.

        SigLIP's convolution has its padding in a word, and fvcore does not see it at all.
        """
        if type(model).__name__ == "SiglipVisionModel":
            return -64 * 48 * 3 * 8 * 8
        return sum(4 * 3 * 15 * 15 for _ in bias_tables(model))

    def checkpoint(self, model: Any, enable: bool) -> None:
        model.gradient_checkpointing_enable() if enable else model.gradient_checkpointing_disable()

    def gain(self, path: str) -> float:
        return 2.0 if path.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")) else 1.0


def bias_tables(model: nn.Module) -> list[Any]:
    """The modules that hold relative position biases."""
    return [part for part in model.modules() if type(part).__name__ == "BeitRelativePositionBias"]


VISION = {**SIZES, **MLP, "num_hidden_layers": DEPTH}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}


def two_towers(library: str) -> Any:
    """A CLIPModel or SiglipModel with small towers."""
    import transformers

    text = {**TEXT, "bos_token_id": 98, "eos_token_id": 99, "pad_token_id": 1}
    more = {"projection_dim": 32} if library == "CLIP" else {}
    if library == "Siglip":
        text["projection_size"] = SIZES["hidden_size"]
    config = getattr(transformers, f"{library}Config")(vision_config=VISION, text_config=text, **more)
    return getattr(transformers, f"{library}Model")(config).eval()
