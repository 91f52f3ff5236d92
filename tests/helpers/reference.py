"""Fused blocks the slow way: one image at a time, an explicit attention map, loops over pairs of tokens.

Written from the method's description alone and sharing no code with the library, which must agree with it. The
host's part (norms, projections, residual branches) is in `reference_blocks`, with the host's own modules.

Axes: H heads, N tokens entering a block, M tokens leaving it, C channels, d channels a head.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from helpers.reference_blocks import Cover, Pieces

Groups = list[list[int]]  # for each output token the input tokens it is made of


@dataclass(frozen=True)
class Options:
    """MCTF's options, by the names of the public API."""

    tau_sim: float = 1.0
    tau_info: float = 1 / 20
    tau_size: float = 1 / 40
    bidirectional: bool = True
    pooling: str = "attention"
    attention: str = "one_step_ahead"
    informativeness: str = "mean"
    proportional: bool = True


@dataclass
class Result:
    """What the reference hands out for one image: the last tokens and how each block grouped its tokens.

    covered: after each block the input tokens that have a share in any token, where they are recorded.
    """

    tokens: Tensor
    sizes: list[float]
    groups: list[Groups] = field(default_factory=list)
    covered: list[set[int]] = field(default_factory=list)

    def source_map(self, tokens: int) -> list[int]:
        """The final slot of each input token, following it through all blocks."""
        where = list(range(tokens))
        for groups in self.groups:
            slot = {member: index for index, members in enumerate(groups) for member in members}
            where = [slot[place] for place in where]
        return where


@dataclass
class Tokens:
    """What one block hands to the next: N C, how many input tokens each stands for, and the places they cover."""

    x: Tensor
    sizes: list[float]
    cover: Cover

    def fused(self, groups: Groups, weights: list[float], x: Tensor) -> "Tokens":
        """The tokens x of the groups, with all that goes with them."""
        sizes = [sum(self.sizes[i] for i in members) for members in groups]
        return Tokens(x, sizes, [self._places(members, weights) for members in groups])

    def covered(self) -> set[int]:
        """The input tokens that have a share in any of these."""
        return {place for shares in self.cover for place, share in shares.items() if share > 0}

    def _places(self, members: list[int], weights: list[float]) -> dict[int, float]:
        total = sum(weights[i] for i in members)
        return {place: weights[i] / total * share for i in members for place, share in self.cover[i].items()}


def run_blocks(
    blocks: list[Pieces], tokens: Tensor, counts: list[int], *, protected: int, method: str, options: Options
) -> Result:
    """All blocks on one image's tokens (N C), fusing counts[l] tokens in block l as far as there are enough."""
    present = Tokens(tokens, [1.0] * len(tokens), [{place: 1.0} for place in range(len(tokens))])
    groups = []
    for block, asked in zip(blocks, counts, strict=True):
        r = allowed(asked, len(present.x), protected, floor=0 if method == "tome" else 10)
        run = plain_block if r == 0 else tome_block if method == "tome" else mctf_block
        present, made = run(block, present, r, protected, options)
        groups.append(made)
    return Result(present.x, present.sizes, groups)


def allowed(r: int, tokens: int, protected: int, floor: int) -> int:
    """At least `floor` tokens remain, and at most half of the unprotected ones go."""
    return max(0, min(r, tokens - floor, (tokens - protected) // 2))


def plain_block(block: Pieces, tokens: Tokens, r: int, protected: int, options: Options) -> tuple[Tokens, Groups]:
    alone = [[i] for i in range(len(tokens.x))]
    return whole_block(block, tokens, options), alone


def mctf_block(block: Pieces, tokens: Tokens, r: int, protected: int, options: Options) -> tuple[Tokens, Groups]:
    read = block.read(tokens.x)
    full_map = attention_map(block, read, tokens, options)
    informative = received(full_map, options.informativeness, protected)
    if options.attention == "previous":
        tokens = whole_block(block, tokens, options)
    groups = match(tokens.x, informative, tokens.sizes, r, protected, options)
    weights = pooling_weights(informative, tokens.sizes, options.pooling)
    fused = tokens.fused(groups, weights, pool(tokens.x, groups, weights, options.pooling))
    if options.attention == "previous":
        return fused, groups
    if options.attention == "precise":
        return whole_block(block, fused, options), groups
    if options.attention == "exact":
        context = block.finish(joined_heads(full_map @ block.values(read)), read)
        context = pool(context, groups, weights, options.pooling)
    else:
        small_map = approximated_map(full_map, groups, weights, options.pooling)
        read = block.read(fused.x)
        context = block.finish(joined_heads(small_map @ block.values(read)), read)
    fused.x = block.add_mlp(block.add_attention(fused.x, context))
    return fused, groups


def tome_block(block: Pieces, tokens: Tokens, r: int, protected: int, options: Options) -> tuple[Tokens, Groups]:
    read = block.read(tokens.x)
    context = joined_heads(attention_map(block, read, tokens, options) @ block.values(read))
    _, keys = block.queries_keys(read, tokens.cover)
    x = block.add_attention(tokens.x, block.finish(context, read))
    similarity = cosines(keys.mean(dim=0))
    score = {
        (i, j): similarity[i][j] for i in range(0, len(x), 2) for j in range(1, len(x), 2) if min(i, j) >= protected
    }
    groups = match_one_way(score, len(x), r, protected)
    fused = block.add_mlp(pool(x, groups, tokens.sizes, "size"))
    return tokens.fused(groups, tokens.sizes, fused), groups


def whole_block(block: Pieces, tokens: Tokens, options: Options) -> Tokens:
    """The block without fusing, with proportional attention."""
    read = block.read(tokens.x)
    context = joined_heads(attention_map(block, read, tokens, options) @ block.values(read))
    x = block.add_mlp(block.add_attention(tokens.x, block.finish(context, read)))
    return Tokens(x, tokens.sizes, tokens.cover)


def attention_map(block: Pieces, read: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """The block's attention, H N N, to which a token of size s counts s times unless that is switched off."""
    q, k = block.queries_keys(read, tokens.cover)
    sizes = tokens.sizes if options.proportional else [1.0] * len(read)
    return block.attention_map(q, k, sizes, tokens.cover)


def received(full_map: Tensor, rows: str, protected: int) -> list[float]:
    """How much attention each token gets, from all tokens, from the class token, or the mean of these two.

    At least a trace: heads that talk to each other may weigh a token below 0.
    """
    everyone, class_token = full_map.mean(dim=(0, 1)), full_map[:, 0].mean(dim=0)
    if rows == "mean" or (rows == "auto" and not protected):
        looks = everyone
    else:
        looks = class_token if rows == "class" else (everyone + class_token) / 2
    return looks.clamp_min(1e-30).tolist()


def approximated_map(full_map: Tensor, groups: Groups, weights: list[float], pooling: str) -> Tensor:
    """A_hat: keys of a group summed; query rows by weighted mean, or by maximum under max pooling. H M M."""
    columns = torch.stack([full_map[:, :, members].sum(dim=2) for members in groups], dim=2)
    rows = []
    for members in groups:
        if pooling == "max":
            rows.append(columns[:, members].amax(dim=1))
        else:
            total = sum(weights[i] for i in members)
            rows.append(sum(weights[i] / total * columns[:, i] for i in members))
    return torch.stack(rows, dim=1)


def match(x: Tensor, informative: list[float], sizes: list[float], r: int, protected: int, options: Options) -> Groups:
    score, similarity = {}, cosines(x)
    for i in range(0, len(x), 2):
        for j in range(1, len(x), 2):
            if min(i, j) >= protected:
                similar = ((similarity[i][j] + 1) / 2) ** options.tau_sim
                plain = (1 / (informative[i] * informative[j])) ** options.tau_info
                small = (1 / (sizes[i] * sizes[j])) ** options.tau_size
                score[i, j] = similar * plain * small
    if options.bidirectional:
        return match_both_ways(score, len(x), r, protected)
    return match_one_way(score, len(x), r, protected)


def match_both_ways(score: dict[tuple[int, int], float], tokens: int, r: int, protected: int) -> Groups:
    """r // 2 even tokens go to their best odd token, then the rest of r odd ones to their best remaining even one."""
    even, odd = sides(tokens, protected)
    forth = r // 2
    best = {i: max(odd, key=lambda j: score[i, j]) for i in even}
    leaving = strongest(even, {i: score[i, best[i]] for i in even})[:forth]
    staying = [i for i in even if i not in leaving]
    absorbed = {j: [j] + [i for i in leaving if best[i] == j] for j in odd}

    best_back = {j: max(staying, key=lambda i: score[i, j]) for j in odd}
    ranked = strongest(odd, {j: score[best_back[j], j] for j in odd})
    gone, remaining = ranked[: r - forth], ranked[r - forth :]
    groups = [[i] for i in range(protected)]
    groups += [[i] + [member for j in gone if best_back[j] == i for member in absorbed[j]] for i in staying]
    return groups + [absorbed[j] for j in remaining]


def match_one_way(score: dict[tuple[int, int], float], tokens: int, r: int, protected: int) -> Groups:
    even, odd = sides(tokens, protected)
    best = {i: max(odd, key=lambda j: score[i, j]) for i in even}
    leaving = strongest(even, {i: score[i, best[i]] for i in even})[:r]
    groups = [[i] for i in range(protected)] + [[i] for i in even if i not in leaving]
    return groups + [[j] + [i for i in leaving if best[i] == j] for j in odd]


def sides(tokens: int, protected: int) -> tuple[list[int], list[int]]:
    return (
        [i for i in range(0, tokens, 2) if i >= protected],
        [j for j in range(1, tokens, 2) if j >= protected],
    )


def strongest(tokens: list[int], strength: dict[int, float]) -> list[int]:
    return sorted(tokens, key=lambda token: -strength[token])


def cosines(x: Tensor) -> list[list[float]]:
    """The cosine of each pair of rows."""
    unit = x / x.norm(dim=1, keepdim=True)
    return (unit @ unit.T).tolist()


def pooling_weights(informative: list[float], sizes: list[float], pooling: str) -> list[float]:
    if pooling == "attention":
        return [a * s for a, s in zip(informative, sizes, strict=True)]
    return list(sizes) if pooling == "size" else [1.0] * len(sizes)


def pool(x: Tensor, groups: Groups, weights: list[float], pooling: str) -> Tensor:
    if pooling == "max":
        return torch.stack([x[members].amax(dim=0) for members in groups])
    fused = [sum(weights[i] * x[i] for i in members) / sum(weights[i] for i in members) for members in groups]
    return torch.stack(fused)


def joined_heads(context: Tensor) -> Tensor:
    """H N d -> N (H d)."""
    return context.transpose(0, 1).flatten(1)
