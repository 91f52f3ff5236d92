"""What the references of the image-adaptive methods share: an image drops tokens, and nothing pads it.

Axes: N tokens, M tokens that stay, C channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import mctf
from helpers.models import family_of, run, tokens_of
from helpers.naive import TOLERANCE, NaiveBlock, assert_dropped_as_naive, run_naive
from helpers.reference import Groups, Result, Tokens


def dropped(tokens: Tokens, stay: list[int], x: Tensor, protected: int) -> tuple[Tokens, Groups]:
    """The kept tokens x (M C). A dropped one maps with weight 0 to the one before it, else to the first patch."""
    groups: Groups = [[token] for token in stay]
    for token in range(len(tokens.x)):
        if token not in stay:
            before = [place for place, kept in enumerate(stay) if kept < token]
            place = before[-1] if before else protected
            if place < protected and len(stay) > protected:
                place = protected
            groups[place].append(token)
    weights = [float(token in stay) for token in range(len(tokens.x))]
    fused = tokens.fused(groups, weights, x)
    return Tokens(x, [1.0] * len(stay), fused.cover), groups


def run_each(model: nn.Module, images: Tensor, block: NaiveBlock, schedule: Sequence[float]) -> list[Result]:
    """The naive blocks on each image alone; the model must not be fused yet, and in float64."""
    return [run_naive(model, one, schedule, block) for one in family_of(model).embed(model, images)]


def assert_as_unpadded(model: nn.Module, images: Tensor, expected: Sequence[Result]) -> list[list[int]]:
    """Each image that a fused model is given in a batch has the tokens, source map and output of `run_each`.

    The same tokens are dropped, too. Gives the tokens of each image after each block.
    """
    family, tokens = family_of(model), tokens_of(model)
    with mctf.trace(model) as trace:
        output, features = run(model, images), family.features(model, images)
    counts = [[len(groups) for groups in slow.groups] for slow in expected]
    found = torch.stack([(block.sizes > 0).sum(dim=1) for block in trace.blocks], dim=1)
    assert found.tolist() == counts
    assert_dropped_as_naive(trace, expected)
    for image, slow in enumerate(expected):
        where = slow.source_map(tokens)
        assert trace.source_map()[image].tolist() == where
        final = family.finish(model, (slow.tokens[where] if family.keeps_every_token(model) else slow.tokens)[None])
        padding = features.shape[1] - final.shape[1]
        final_and_copies = torch.cat([final, final[:, -1:].expand(-1, padding, -1)], dim=1)
        torch.testing.assert_close(features[image], final_and_copies[0], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(output[image], family.head(model, final)[0], atol=TOLERANCE, rtol=TOLERANCE)
    return counts
