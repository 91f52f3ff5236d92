"""Why a model is refused: families that cannot be fused with the reason, and models inside a wrapper."""

from torch import nn

_WINDOWS = "it attends inside windows of fixed shape, which fused tokens cannot fill"
_CHANNELS = "it attends over channels, not over tokens"
_GRID = "it pools or convolves its tokens on their grid, and fused tokens form no grid"
_NONE = "it has no global attention"
_TILES = "it attends between tiles, each with a class token of its own, through two stacks of layers"

# Class names of timm and, on the last line of each group, of transformers.
FAMILIES = {
    _WINDOWS: (
        *("SwinTransformer", "SwinTransformerV2", "SwinTransformerV2Cr", "VisionTransformerSAM", "HieraDet", "MaxxVit"),
        *("DaVit", "TinyVit", "Nest", "GlobalContextVit", "Twins"),
        *("SwinModel", "Swinv2Model", "DonutSwinModel", "SamVisionEncoder", "Sam2HieraDetModel"),
        *("Qwen2_5_VisionTransformerPretrainedModel", "Florence2VisionBackbone"),
    ),
    _CHANNELS: ("Xcit", "EdgeNeXt"),
    _GRID: (
        *("Hiera", "MultiScaleVit", "PyramidVisionTransformerV2", "PoolingVisionTransformer", "Levit", "CoaT"),
        *("EfficientFormer", "EfficientFormerV2", "EfficientVit", "EfficientVitLarge", "EfficientVitMsra", "FastVit"),
        *("NextViT", "Visformer", "VOLO", "MetaFormer"),
        *("HieraModel", "PvtModel", "PvtV2Model", "SegformerModel", "LevitModel", "CvtModel", "MobileViTModel"),
    ),
    _NONE: (
        *("ResNet", "ResNetV2", "ConvNeXt", "EfficientNet", "MobileNetV3", "RegNet", "DenseNet", "VGG", "ByobNet"),
        *("FocalNet", "MlpMixer", "MambaOut", "RepVit"),
        *("ResNetModel", "BitModel", "ConvNextModel", "ConvNextV2Model", "DINOv3ConvNextModel", "FocalNetModel"),
    ),
    _TILES: ("MllamaVisionModel",),
}
_REASONS = {name: reason for reason, names in FAMILIES.items() for name in names}


def explain_refusal(model: nn.Module, *, inside: str | None) -> str:
    """The message for a model without a host. inside: name of a supported model inside it, if there is one."""
    kind = _qualified(type(model))
    if inside is not None:
        attribute = all(part.isidentifier() for part in inside.split("."))
        path = f"model.{inside}" if attribute else f"model.get_submodule({inside!r})"
        return f"{kind} is not a supported model: fuse the one inside it, mctf.fuse({path})"
    supported = "pass a Vision Transformer with global attention (DeiT, DINOv2, CLIP, SigLIP, EVA-02, BEiT, …)"
    for name, module in model.named_modules():
        reason = next((_REASONS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _REASONS), None)
        if reason is not None:
            part = f" ({name} is a {_qualified(type(module))})" if name else ""
            return f"{kind} cannot be fused, {reason}{part}: {supported}"
    return f"{kind} is not a supported model: {supported}, or register a host for it by mctf.register_host"


def _qualified(cls: type) -> str:
    """Name of a class with its module, as several libraries have a VisionTransformer."""
    return f"{cls.__module__}.{cls.__qualname__}"
