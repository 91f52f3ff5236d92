"""A fused model against the slow reference, image by image."""

from typing import Any

import torch
from torch import Tensor, nn

import mctf
from helpers import reference
from helpers.models import family_of

# Sizes and their shares are float32 in the library, and so are some rotary tables; everything else is float64 here.
TOLERANCE = 1e-5


def slow_result(
    model: nn.Module, tokens: Tensor, counts: list[int], method: str, options: reference.Options
) -> reference.Result:
    """The reference on one image's tokens (N C)."""
    family = family_of(model)
    blocks, protected = family.pieces(model), family.prefix(model)
    return reference.run_blocks(blocks, tokens, counts, protected=protected, method=method, options=options)


def assert_as_reference(model: nn.Module, images: Tensor, counts: list[int], method: str, **options: Any) -> None:
    """Final tokens, sizes, source map and output of the fused model are the reference's, image by image."""
    family = family_of(model)
    tokens = family.embed(model, images)
    own = {"attention": "exact", "informativeness": "auto"} if method == "mctf_exact" else {}
    meant = reference.Options(**{**own, **options})
    expected = [slow_result(model, one, counts, method, meant) for one in tokens]

    mctf.fuse(model, method, r=counts, restore="copy", **options)
    with mctf.trace(model) as trace:
        output = family.run(model, images)
        features = family.features(model, images)
    mctf.unfuse(model)

    for image, slow in enumerate(expected):
        where = slow.source_map(tokens.shape[1])
        assert trace.source_map()[image].tolist() == where
        assert trace.blocks[-1].sizes[image].tolist() == slow.sizes
        final = family.finish(model, (slow.tokens[where] if family.keeps_every_token(model) else slow.tokens)[None])
        torch.testing.assert_close(features[image], final[0], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(output[image], family.head(model, final)[0], atol=TOLERANCE, rtol=TOLERANCE)
