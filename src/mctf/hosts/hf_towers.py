"""The vision towers of transformers that can be fused, by class name, so that transformers is not imported.

A tower embeds images, videos or spectrograms and runs the layers. Heads are around it, a text tower or a language model
may be beside it.
"""

from dataclasses import dataclass

from torch import nn

from .hf_layers import BiasedLayerOps, ExpertLayerOps, LayerOps, RotaryLayerOps
from .hf_sequences import PaddedLayerOps, PixtralLayerOps, QwenLayerOps


@dataclass(frozen=True)
class TowerFamily:
    """Towers with layers of one class.

    title: for people. layers: names of the layer classes. towers: names of the classes that run them.
    ops: the pieces of a layer. attention: parts that only the attention of these layers has.
    """

    title: str
    layers: tuple[str, ...]
    towers: tuple[str, ...]
    ops: type[LayerOps] = LayerOps
    attention: frozenset[str] = frozenset()


_PRODUCT = frozenset(["qkv", "projection", "proj"])

FAMILIES = (
    TowerFamily("ViT", ("ViTLayer",), ("ViTModel",)),
    TowerFamily("DeiT", ("DeiTLayer",), ("DeiTModel",)),
    TowerFamily("BEiT", ("BeitLayer",), ("BeitModel", "BeitBackbone"), BiasedLayerOps),
    TowerFamily("DINOv2", ("Dinov2Layer",), ("Dinov2Model", "Dinov2Backbone")),
    TowerFamily(
        "DINOv2 with registers",
        ("Dinov2WithRegistersLayer",),
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
    ),
    TowerFamily("DINOv3", ("DINOv3ViTLayer",), ("DINOv3ViTModel", "DINOv3ViTBackbone"), RotaryLayerOps),
    TowerFamily("CLIP", ("CLIPEncoderLayer",), ("CLIPVisionModel", "CLIPVisionTransformer")),  # …Transformer until 5.7
    TowerFamily("SigLIP", ("SiglipEncoderLayer",), ("SiglipVisionModel", "SiglipVisionTransformer")),
    TowerFamily(
        "SigLIP 2", ("Siglip2EncoderLayer",), ("Siglip2VisionModel", "Siglip2VisionTransformer"), PaddedLayerOps
    ),
    TowerFamily("ViTMAE", ("ViTMAELayer",), ("ViTMAEModel",)),
    TowerFamily("I-JEPA", ("IJepaLayer",), ("IJepaModel",)),
    TowerFamily("ViT-MSN", ("ViTMSNLayer",), ("ViTMSNModel",)),
    TowerFamily("Data2Vec", ("Data2VecVisionLayer",), ("Data2VecVisionModel",), BiasedLayerOps),
    TowerFamily("AIMv2", ("Aimv2EncoderLayer",), ("Aimv2VisionModel",)),
    TowerFamily("BLIP", ("BlipEncoderLayer",), ("BlipVisionModel",), attention=_PRODUCT),
    TowerFamily("BLIP-2", ("Blip2EncoderLayer",), ("Blip2VisionModel",), attention=_PRODUCT),
    TowerFamily("OWL-ViT", ("OwlViTEncoderLayer",), ("OwlViTVisionTransformer",)),
    TowerFamily("OWLv2", ("Owlv2EncoderLayer",), ("Owlv2VisionTransformer",)),
    TowerFamily("CLIPSeg", ("CLIPSegEncoderLayer",), ("CLIPSegVisionModel", "CLIPSegVisionTransformer")),
    TowerFamily("DPT", ("DPTViTLayer",), ("DPTModel",)),
    TowerFamily("ViTPose", ("VitPoseBackboneLayer",), ("VitPoseBackbone",), ExpertLayerOps),
    TowerFamily("VideoMAE", ("VideoMAELayer",), ("VideoMAEModel",)),
    TowerFamily("ViViT", ("VivitLayer",), ("VivitModel",)),
    TowerFamily("AST", ("ASTLayer",), ("ASTModel",)),
    TowerFamily(
        "InternVL",
        ("InternVLVisionLayer",),
        ("InternVLVisionModel",),
        attention=frozenset(["q_norm", "k_norm", "projection_layer", "projection_dropout"]),
    ),
    TowerFamily("Idefics3", ("Idefics3EncoderLayer",), ("Idefics3VisionTransformer",), PaddedLayerOps),
    TowerFamily("SmolVLM", ("SmolVLMEncoderLayer",), ("SmolVLMVisionTransformer",), PaddedLayerOps),
    TowerFamily("Pixtral", ("PixtralAttentionLayer",), ("PixtralVisionModel",), PixtralLayerOps),
    TowerFamily(
        "Qwen2-VL", ("Qwen2VLVisionBlock",), ("Qwen2VisionTransformerPretrainedModel",), QwenLayerOps, _PRODUCT
    ),
    TowerFamily(
        "Qwen3-VL",
        ("Qwen3VLVisionBlock", "Qwen3VLMoeVisionBlock"),
        ("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel"),
        QwenLayerOps,
        _PRODUCT,
    ),
)
TOWERS = frozenset(name for family in FAMILIES for name in family.towers)
LAYERS = {name: family.attention for family in FAMILIES for name in family.layers}
TITLES = ", ".join(family.title for family in FAMILIES)
_OPS = {name: family.ops for family in FAMILIES for name in family.layers}


def ops_class(layer: type[nn.Module]) -> type[LayerOps]:
    """The class of the pieces of layers of this class."""
    return _OPS[layer.__name__]
