"""Layers of transformers that take several images as one tensor: padded (SigLIP 2, Idefics3), or packed one behind the
other (Pixtral, Qwen's vision towers).

Their masks say which tokens form an image. The pieces see images of equally many tokens, without a mask.

Axes: B rows of a batch, N tokens of a row, T tokens of all images, d channels per head.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.sequences import (
    SequenceGroup,
    Sequences,
    block_lengths,
    packed_sequences,
    padded_sequences,
    read_numbers,
    real_tokens,
)
from ..errors import MctfError
from ..methods.base import run_pieces
from .hf_layers import LayerOps, RotaryLayerOps

_GROUPED = "sequence_group"  # marks the arguments of one group, whose tokens are no longer in the layer's own layout


class SequenceLayerOps(LayerOps):
    """Base class: layers whose tokens may be several sequences."""

    @classmethod
    def has_sequences(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether the tokens of a call are padded or packed."""
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def sequences(cls, x: Tensor, arguments: Mapping[str, Any]) -> Sequences:
        """The images of a call."""

    @classmethod
    @abstractmethod
    def group_arguments(cls, arguments: Mapping[str, Any], group: SequenceGroup) -> Mapping[str, Any]:
        """The arguments for the images of one group alone."""


class PaddedLayerOps(SequenceLayerOps):
    """SigLIP 2, Idefics3 and SmolVLM: images have masks of their patches."""

    adjusted = frozenset(["attention_mask"])

    @classmethod
    def has_sequences(cls, arguments: Mapping[str, Any]) -> bool:
        return arguments.get("attention_mask") is not None

    @classmethod
    def sequences(cls, x: Tensor, arguments: Mapping[str, Any]) -> Sequences:
        return padded_sequences(real_tokens(arguments["attention_mask"]))

    @classmethod
    def group_arguments(cls, arguments: Mapping[str, Any], group: SequenceGroup) -> Mapping[str, Any]:
        return {**arguments, "attention_mask": None}


class PackedLayerOps(RotaryLayerOps, SequenceLayerOps):
    """Base class: all images of a batch are one sequence, with rotary positions per token (T d)."""

    @classmethod
    def has_sequences(cls, arguments: Mapping[str, Any]) -> bool:
        return _GROUPED not in arguments

    @classmethod
    def group_arguments(cls, arguments: Mapping[str, Any], group: SequenceGroup) -> Mapping[str, Any]:
        cos, sin = arguments["position_embeddings"]
        return {"position_embeddings": (cos[group.tokens], sin[group.tokens]), _GROUPED: group}

    @classmethod
    def sequences(cls, x: Tensor, arguments: Mapping[str, Any]) -> Sequences:
        return packed_sequences(cls.lengths(x, arguments), x.device)

    @classmethod
    @abstractmethod
    def lengths(cls, x: Tensor, arguments: Mapping[str, Any]) -> list[int]:
        """Number of tokens of each image."""

    def plain(self, x: Tensor) -> Tensor:
        return run_pieces(self, x, None) if _GROUPED in self.arguments else super().plain(x)


class PixtralLayerOps(PackedLayerOps):
    """Pixtral: 1 T C, a mask of blocks on the diagonal, or the ends of the images for FlashAttention."""

    adjusted = frozenset(
        [
            *("attention_mask", "position_embeddings", "position_ids"),
            *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        ]
    )

    @classmethod
    def lengths(cls, x: Tensor, arguments: Mapping[str, Any]) -> list[int]:
        ends, mask = arguments.get("cu_seq_lens_q"), arguments.get("attention_mask")
        if ends is not None:
            return read_numbers(ends.diff())
        found = None if mask is None else block_lengths(mask[0, 0] == 0)
        if found is None:
            raise MctfError(
                "a fused Pixtral model needs the mask that separates its images: load it with "
                "attn_implementation='sdpa' or 'eager'"
            )
        return found


class QwenLayerOps(PackedLayerOps):
    """Vision towers of Qwen2-VL and Qwen3-VL: T C, with the ends of the images, or frames, in `cu_seqlens`."""

    adjusted = frozenset(["cu_seqlens", "max_seqlen", "position_embeddings", "rotary_pos_emb"])

    @classmethod
    def lengths(cls, x: Tensor, arguments: Mapping[str, Any]) -> list[int]:
        return read_numbers(arguments["cu_seqlens"].diff())
