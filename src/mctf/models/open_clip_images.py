"""Image towers of open_clip with the interface of timm's models, preprocessing in `pretrained_cfg`.

Axes: B images, N tokens, C channels, D of the projection.
"""

from typing import Any

from torch import Tensor, nn

from ..errors import MctfError, shown

_RESIZE_MODES = {"shortest": "center", "squash": "squash"}  # timm's names of them


class OpenClipImages(nn.Module):
    """One VisionTransformer of open_clip, `visual`, with timm's method names. num_classes: none."""

    num_classes = 0

    def __init__(self, visual: nn.Module, pretrained_cfg: dict[str, Any]) -> None:
        super().__init__()
        self.visual: Any = visual
        self.pretrained_cfg = pretrained_cfg

    @classmethod
    def of(cls, model: Any) -> "OpenClipImages":
        """The image tower of a CLIP or CoCa model, or this tower itself; raises MctfError for others."""
        name = f"{type(model).__module__}.{type(model).__name__}"
        visual = getattr(model, "visual", model)
        if hasattr(visual, "trunk"):
            raise MctfError(f"{name} holds an image tower of timm: pass that one, model.visual.trunk")
        if not hasattr(visual, "transformer") or not hasattr(visual, "_global_pool"):
            raise MctfError(
                f"{name} has no VisionTransformer as its image tower ({type(visual).__name__}): pass one that has"
            )
        if visual.pool_type == "none" and getattr(visual, "attn_pool_contrastive", None) is None:
            raise MctfError(f"{name} gives every token (pool_type='none') and no vector per image: pass one that pools")
        return cls(visual, _read_preprocessing(visual, name))

    @property
    def has_projection(self) -> bool:
        return self.visual.proj is not None

    @property
    def pools_by_attention(self) -> bool:
        return self.visual.attn_pool is not None

    def forward(self, images: Tensor) -> Tensor:
        """What `encode_image` gives, before it is normalized: B D."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens, B N C, after the last norm where it is applied to tokens."""
        tokens = self.visual.transformer(self.visual._embeds(images))
        return self.visual.ln_post(tokens) if self._norms_tokens else tokens

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        pooled, _ = self.visual._global_pool(tokens) if self._norms_tokens else self.visual._pool(tokens)
        if pooled.dim() == 3:  # of an attention pooling with one query
            pooled = pooled.squeeze(1)
        return pooled if pre_logits or not self.has_projection else pooled @ self.visual.proj

    @property
    def _norms_tokens(self) -> bool:
        return not (self.pools_by_attention or self.visual.final_ln_after_pool)


def _read_preprocessing(visual: Any, name: str) -> dict[str, Any]:
    """From open_clip's own record of the preprocessing to the entries of a timm `pretrained_cfg`."""
    given = getattr(visual, "preprocess_cfg", None)
    if not given:
        raise MctfError(f"{name} has no record of its preprocessing: create it by open_clip.create_model")
    mode = given.get("resize_mode", "shortest")
    if mode not in _RESIZE_MODES:
        raise MctfError(
            f"{name} is prepared by resize_mode={shown(mode)}, which mctf does not know: create it with "
            "image_resize_mode='shortest' or 'squash'"
        )
    return {
        "architecture": name,
        "input_size": (3, *visual.image_size),
        "crop_pct": 1.0,
        "crop_mode": _RESIZE_MODES[mode],
        "interpolation": "bilinear" if given.get("interpolation") == "bilinear" else "bicubic",
        "mean": tuple(given["mean"]),
        "std": tuple(given["std"]),
    }
