"""Fused blocks the slow way: one image at a time, an explicit attention map, loops over pairs of tokens.

Written from the method's description alone and sharing no code with the library, which must agree with it. The
host's part (norms, projections, residual branches) uses the timm block's modules.

Axes: H heads, N tokens entering a block, M tokens leaving it, C channels, d channels a head.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor

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
    """What the reference hands out for one image: the last tokens and how each block grouped its tokens."""

    tokens: Tensor
    sizes: list[float]
    groups: list[Groups] = field(default_factory=list)

    def source_map(self, tokens: int) -> list[int]:
        """The final slot of each input token, following it through all blocks."""
        where = list(range(tokens))
        for groups in self.groups:
            slot = {member: index for index, members in enumerate(groups) for member in members}
            where = [slot[place] for place in where]
        return where


def run_blocks(model: VisionTransformer, tokens: Tensor, counts: list[int], method: str, options: Options) -> Result:
    """All blocks on one image's tokens (N C), fusing counts[l] tokens in block l as far as there are enough."""
    result = Result(tokens, [1.0] * len(tokens))
    protected = model.num_prefix_tokens
    for block, asked in zip(model.blocks, counts, strict=True):
        r = allowed(asked, len(result.tokens), protected, floor=0 if method == "tome" else 10)
        run = plain_block if r == 0 else tome_block if method == "tome" else mctf_block
        result.tokens, result.sizes, groups = run(block, result.tokens, result.sizes, r, protected, options)
        result.groups.append(groups)
    return result


def allowed(r: int, tokens: int, protected: int, floor: int) -> int:
    """At least `floor` tokens remain, and at most half of the unprotected ones go."""
    return max(0, min(r, tokens - floor, (tokens - protected) // 2))


def plain_block(
    block: Any, x: Tensor, sizes: list[float], r: int, protected: int, options: Options
) -> tuple[Tensor, list[float], Groups]:
    return whole_block(block, x, sizes, options.proportional), sizes, [[i] for i in range(len(x))]


def mctf_block(
    block: Any, x: Tensor, sizes: list[float], r: int, protected: int, options: Options
) -> tuple[Tensor, list[float], Groups]:
    full_map = attention_map(block, x, sizes, options.proportional)
    informative = received(full_map, options.informativeness, protected)
    if options.attention == "previous":
        x = whole_block(block, x, sizes, options.proportional)
    groups = match(x, informative, sizes, r, protected, options)
    weights = pooling_weights(informative, sizes, options.pooling)
    fused = pool(x, groups, weights, options.pooling)
    fused_sizes = [sum(sizes[i] for i in members) for members in groups]
    if options.attention == "previous":
        return fused, fused_sizes, groups
    if options.attention == "precise":
        return whole_block(block, fused, fused_sizes, options.proportional), fused_sizes, groups
    if options.attention == "exact":
        read = before_attention(block, x)
        context = finish(block, joined_heads(full_map @ values(block, read)), read)
        context = pool(context, groups, weights, options.pooling)
        return add_mlp(block, add_attention(block, fused, context)), fused_sizes, groups
    small_map = approximated_map(full_map, groups, weights, options.pooling)
    read = before_attention(block, fused)
    context = joined_heads(small_map @ values(block, read))
    return add_mlp(block, add_attention(block, fused, finish(block, context, read))), fused_sizes, groups


def tome_block(
    block: Any, x: Tensor, sizes: list[float], r: int, protected: int, options: Options
) -> tuple[Tensor, list[float], Groups]:
    read = before_attention(block, x)
    context = joined_heads(attention_map(block, x, sizes, options.proportional) @ values(block, read))
    _, keys = queries_keys(block, read)
    x = add_attention(block, x, finish(block, context, read))
    metric = keys.mean(dim=0)
    score = {
        (i, j): cosine(metric[i], metric[j])
        for i in range(0, len(x), 2)
        for j in range(1, len(x), 2)
        if min(i, j) >= protected
    }
    groups = match_one_way(score, len(x), r, protected)
    fused_sizes = [sum(sizes[i] for i in members) for members in groups]
    return add_mlp(block, pool(x, groups, sizes, "size")), fused_sizes, groups


def whole_block(block: Any, x: Tensor, sizes: list[float], proportional: bool) -> Tensor:
    """The block without fusing, with proportional attention."""
    read = before_attention(block, x)
    context = joined_heads(attention_map(block, x, sizes, proportional) @ values(block, read))
    return add_mlp(block, add_attention(block, x, finish(block, context, read)))


def received(full_map: Tensor, rows: str, protected: int) -> list[float]:
    """How much attention each token gets, from all tokens, from the class token, or the mean of these two."""
    everyone = full_map.mean(dim=(0, 1)).tolist()
    class_token = full_map[:, 0].mean(dim=0).tolist()
    if rows == "mean" or (rows == "auto" and not protected):
        return everyone
    return class_token if rows == "class" else [(a + b) / 2 for a, b in zip(everyone, class_token, strict=True)]


def attention_map(block: Any, x: Tensor, sizes: list[float], proportional: bool) -> Tensor:
    """A = softmax(q kT / sqrt(d) + log s of the key), H N N."""
    q, k = queries_keys(block, before_attention(block, x))
    logits = q @ k.transpose(1, 2) / math.sqrt(block.attn.head_dim)
    if proportional:
        for j, size in enumerate(sizes):
            logits[:, :, j] += math.log(size)
    return logits.softmax(dim=2)


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
    score = {}
    for i in range(0, len(x), 2):
        for j in range(1, len(x), 2):
            if min(i, j) >= protected:
                similar = ((cosine(x[i], x[j]) + 1) / 2) ** options.tau_sim
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


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def pooling_weights(informative: list[float], sizes: list[float], pooling: str) -> list[float]:
    if pooling == "attention":
        return [a * s for a, s in zip(informative, sizes, strict=True)]
    return list(sizes) if pooling == "size" else [1.0] * len(sizes)


def pool(x: Tensor, groups: Groups, weights: list[float], pooling: str) -> Tensor:
    if pooling == "max":
        return torch.stack([x[members].amax(dim=0) for members in groups])
    fused = [sum(weights[i] * x[i] for i in members) / sum(weights[i] for i in members) for members in groups]
    return torch.stack(fused)


def before_attention(block: Any, x: Tensor) -> Tensor:
    return x if isinstance(block, ResPostBlock) else block.norm1(x)


def queries_keys(block: Any, read: Tensor) -> tuple[Tensor, Tensor]:
    q, k, _ = block.attn.qkv(read).chunk(3, dim=1)
    return block.attn.q_norm(split_heads(block, q)), block.attn.k_norm(split_heads(block, k))


def values(block: Any, read: Tensor) -> Tensor:
    return split_heads(block, block.attn.qkv(read).chunk(3, dim=1)[2])


def split_heads(block: Any, flat: Tensor) -> Tensor:
    """N (H d) -> H N d."""
    return flat.view(len(flat), block.attn.num_heads, -1).transpose(0, 1)


def joined_heads(context: Tensor) -> Tensor:
    """H N d -> N (H d)."""
    return context.transpose(0, 1).flatten(1)


def finish(block: Any, context: Tensor, read: Tensor) -> Tensor:
    """What some blocks do between attention and its output projection: a norm, a gate."""
    context = block.attn.norm(context)
    return context if block.attn.gate is None else context * torch.sigmoid(block.attn.gate(read))


def add_attention(block: Any, x: Tensor, context: Tensor) -> Tensor:
    y = block.attn.proj(context)
    return x + (block.norm1(y) if isinstance(block, ResPostBlock) else block.ls1(y))


def add_mlp(block: Any, x: Tensor) -> Tensor:
    if isinstance(block, ResPostBlock):
        return x + block.norm2(block.mlp(x))
    return x + block.ls2(block.mlp(block.norm2(x)))
