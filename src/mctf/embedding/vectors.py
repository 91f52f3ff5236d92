"""Which vector of a model stands for an image: class token, mean of patches, attention pooling, projection or logits.

Axes: B images, N tokens, C channels, D of the vector, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import infer_imagenet_subset
from torch import Tensor, nn

from ..errors import MctfError
from ..hosts import find_host
from ..models.hf_images import ImageModel
from ..models.open_clip_images import OpenClipImages
from ..stack import features_for_head

VECTORS = ("auto", "class", "mean", "attention", "projection", "logits")

Outputs = tuple[Tensor, ...]  # vectors B D; with top-k also probabilities B k and classes B k


@dataclass(frozen=True)
class VectorReader:
    """From preprocessed images, B 3 H W, to one vector per image.

    kind: resolved, see `resolve_vector`. prefix: leading tokens of the features that are no patches.
    normalize: to length 1. dtype: of the vectors. top_k: classes to return beside them; 0 for none.
    """

    model: Any
    kind: str
    prefix: int
    normalize: bool
    dtype: torch.dtype
    top_k: int = 0

    def __call__(self, images: Tensor) -> Outputs:
        read = self._hugging_face if isinstance(self.model, ImageModel) else self._timm
        vectors, logits = read(images)
        vectors = vectors.float()
        if self.normalize:
            vectors = F.normalize(vectors, dim=-1)
        vectors = vectors.to(self.dtype)
        if not self.top_k:
            return (vectors,)
        probabilities, classes = logits().float().softmax(dim=-1).topk(self.top_k, dim=-1)
        return vectors, probabilities, classes

    def _timm(self, images: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        every = self.kind == "mean"
        tokens = self.model.forward_features(images) if every else features_for_head(self.model, images)

        def logits() -> Tensor:
            return self.model.forward_head(tokens)

        if self.kind in ("logits", "projection"):
            return logits(), logits
        if self.kind in ("auto", "attention"):
            return self.model.forward_head(tokens, pre_logits=True), logits
        return self._of_tokens(tokens), logits

    def _hugging_face(self, images: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        if self.kind in ("class", "mean"):
            return self._of_tokens(self.model.forward_tokens(images)), lambda: self.model(images)
        features = self.model.forward_features(images)
        if self.kind == "projection" and self.model.has_projection:
            return self.model.projection(features.pooled), lambda: features.logits
        return features.logits if self.kind == "logits" else features.pooled, lambda: features.logits

    def _of_tokens(self, tokens: Any) -> Tensor:
        if not isinstance(tokens, Tensor) or tokens.dim() != 3:
            raise MctfError(f"the model does not give its tokens for a {self.kind} vector: use --vector auto")
        vectors = tokens[:, 0] if self.kind == "class" else tokens[:, self.prefix :].mean(dim=1)
        norm = getattr(self.model, "fc_norm", None)  # timm's models that pool by mean normalize afterwards
        return vectors if norm is None else norm(vectors)


def resolve_vector(model: Any, kind: str) -> str:
    """The vector that "auto" stands for; raises MctfError where the model does not have the one that is asked for.

    "auto": the projection of CLIP models; of any other what its head reads: class token, mean, or attention pooling.
    """
    host = find_host(model)
    name = type(getattr(model, "model", model)).__name__ if isinstance(model, ImageModel) else type(model).__name__
    if kind == "auto":
        return "projection" if _has_projection(model) else "auto"
    if kind == "class" and not host.class_feature:
        raise MctfError(f"{name} has no class token: use --vector mean, or auto for what its head reads")
    if kind == "logits" and not _num_classes(model):
        raise MctfError(f"{name} has no classifier: use --vector auto")
    if kind == "attention" and not _pools_by_attention(model):
        raise MctfError(f"{name} has no attention pooling: use --vector auto for what its head reads")
    if kind == "projection" and not (_has_projection(model) or _pools_into_shared_space(model)):
        raise MctfError(
            f"{name} has no projection into a space shared with texts, as CLIP and SigLIP have: use --vector auto"
        )
    return kind


def reads_every_token(kind: str) -> bool:
    """Whether the vector is made of all patches, so that a fused model has to restore them."""
    return kind == "mean"


def check_top_k(model: Any, top_k: int) -> None:
    classes = _num_classes(model)
    if top_k > classes:
        why = f"has {classes} classes" if classes else "has no classifier"
        raise MctfError(f"the model {why}: --top-k {top_k} needs at least {top_k}")


def prefix_tokens(model: nn.Module) -> int:
    """Leading tokens after all blocks that are no patches."""
    host = find_host(model)
    return host.architecture(None).protected + int(host.class_feature and not host.class_token)


def _num_classes(model: Any) -> int:
    """Of the classifier; 0 where there is none, or where the head is a projection."""
    return 0 if _has_projection(model) else getattr(model, "num_classes", 0) or 0


def _has_projection(model: Any) -> bool:
    """Whether pooled features are projected into the space that images share with texts.

    timm keeps the projection of CLIP as the head: one linear layer without bias, or with one of zeros, and as many
    outputs as were published, which are the classes of no data set.
    """
    if isinstance(model, (ImageModel, OpenClipImages)):
        return model.has_projection
    config, head = getattr(model, "pretrained_cfg", None) or {}, getattr(model, "head", None)
    published = config.get("num_classes") or 0
    if not isinstance(head, nn.Linear) or head.out_features != published or config.get("label_names"):
        return False
    biased = head.bias is not None and bool(head.bias.any())
    return not biased and infer_imagenet_subset({"num_classes": published}) is None


def _pools_by_attention(model: Any) -> bool:
    if isinstance(model, (ImageModel, OpenClipImages)):
        return model.pools_by_attention
    return getattr(model, "attn_pool", None) is not None


def _pools_into_shared_space(model: Any) -> bool:
    """SigLIP, which has no projection: its attention pooling gives vectors of that space."""
    if not _pools_by_attention(model) or _num_classes(model):
        return False
    if isinstance(model, ImageModel):
        return "siglip" in type(model.model).__module__
    published = (getattr(model, "pretrained_cfg", None) or {}).get("num_classes")
    return published == 0  # of others, a classifier was removed
