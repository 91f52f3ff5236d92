"""A script of two processes that prints what tests of DistributedDataParallel and FSDP2 compare, as one JSON object.

python -m helpers.two_ranks MODEL/METHOD/HOW ...: in each of two processes started by torchrun. HOW is "ddp", or how the
blocks are named to `fully_shard` after fusing: "iterate", "index", "children"; "checkpoint" for gradient checkpointing,
"before" for sharding before fusing.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mctf
from helpers.models import family_of, make, make_images, run


def main(*cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {case: run_case(*case.split("/"), rank=dist.get_rank()) for case in cases}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def run_case(name: str, method: str, how: str, *, rank: int) -> dict[str, Any]:
    reference = mctf.fuse(make(name).double(), method, r=8)
    images = make_images(reference, 4)
    model = make(name).double()
    if how == "before":
        shard(model, "iterate")
    try:
        mctf.fuse(model, method, r=8)
    except mctf.MctfError as refusal:
        return {"refused": str(refusal)}
    return compare(reference, model, images, rank, how)


def compare(reference: Any, model: Any, images: Tensor, rank: int, how: str) -> dict[str, Any]:
    """Largest differences between one process on all images and two on half of them each."""
    if how == "checkpoint":
        for each in (reference, model):
            family_of(each).checkpoint(each, True)
    run(reference, images).square().mean().backward()
    inside = model
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        model(images[2 * rank : 2 * rank + 2]).square().mean().backward()
    else:
        shard(model, how)
        run(model, images[2 * rank : 2 * rank + 2]).square().mean().backward()
    pairs = zip(inside.parameters(), reference.parameters(), strict=True)
    found = {"gradient": max(float((whole(ours.grad) - theirs.grad).abs().max()) for ours, theirs in pairs)}
    with torch.no_grad():
        found["fused"] = float((run(inside, images) - run(reference, images)).abs().max())
        mctf.unfuse(inside)
        mctf.unfuse(reference)
        found["unfused"] = float((run(inside, images) - run(reference, images)).abs().max())
    return found


def shard(model: Any, how: str) -> None:
    from torch.distributed.fsdp import fully_shard

    blocks: Any = family_of(model).container(model)
    if how == "index":
        blocks = [blocks[index] for index in range(len(blocks))]
    for block in blocks.children() if how == "children" else blocks:
        fully_shard(block)
    fully_shard(model)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    main(*sys.argv[1:])
