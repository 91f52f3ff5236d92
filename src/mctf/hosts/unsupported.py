"""Families of models that cannot be fused, and why not."""

from torch import nn

_WINDOWS = "it attends inside windows of fixed shape, which fused tokens do not fill"
_CHANNELS = "it attends over channels, not over tokens"
_GRID = "it pools or convolves its tokens on their grid, and fused tokens lie on none"
_NONE = "it has no global attention"

# Names of classes, as timm and, on the last line of each family, transformers have them.
FAMILIES = {
    _WINDOWS: (
        *("SwinTransformer", "SwinTransformerV2", "SwinTransformerV2Cr", "VisionTransformerSAM", "HieraDet", "MaxxVit"),
        *("DaVit", "TinyVit", "Nest", "GlobalContextVit", "Twins"),
        *("SwinModel", "Swinv2Model", "DonutSwinModel", "SamVisionEncoder", "Sam2HieraDetModel"),
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
}
_REASONS = {name: reason for reason, names in FAMILIES.items() for name in names}


def reason_against(module: nn.Module) -> str | None:
    """Why models of this class cannot be fused; None where that is not known."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((_REASONS[name] for name in names if name in _REASONS), None)
